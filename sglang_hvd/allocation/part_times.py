"""What the parts of a step take beside what a table of costs says."""

from sglang_hvd.allocation.latest_times import (
    FORGOTTEN,
    LEAST_MS,
    LEAST_PRIOR,
    OUTLIER,
    PRIOR_TIMES,
    LatestTimes,
    Outliers,
)

# The ratio that a part begins at, of so many times as spread, or of times of so much spread in the
# expected ones, in their squared mean: less tells little of a ratio.
_PRIOR_SPREAD = 0.05

# What is expected of a part is summed up anew for its first times, then after so many steps.
_EXPECT_EVERY = 16


class TimeRatio:
    """Ratio of the measured times to the expected ones, in the latest steps of the server."""

    def __init__(self) -> None:
        self._sums = LatestTimes()
        self._outliers = Outliers()

    def add(
        self,
        step: int,
        shape: tuple[int, int],
        expected: float,
        measured: float,
        *,
        of_contexts: float,
    ) -> float | None:
        """Takes in a time and returns it as it counts; None if it does not.

        step: its number, of all steps. shape: what the expected time is of. of_contexts:
            milliseconds that its contexts take beside that, as far as it is known.
        """
        most = OUTLIER * (max(self.value(step), 1.0) * expected + of_contexts)
        counted = self._outliers.counted(shape, measured, most)
        if counted is not None:
            self._sums.add(step, expected, counted)
        return counted

    def value(self, step: int) -> float:
        """The ratio at that step; without times 1."""
        self._sums.forget(step)
        if self._sums.num < 1e-9:
            return 1.0
        prior = PRIOR_TIMES * self._sums.x / self._sums.num
        return (self._sums.y + prior) / (self._sums.x + prior)


class TimeLine:
    """Measured times as a part that does not depend on the size and a ratio to the expected ones,
    in the latest steps of the server, whether or not they ran this part: what a part that is seldom
    run took long ago does not keep it from being run again. The ratio follows from how times of as
    many requests differ: those of others may take longer for their contexts."""

    def __init__(self) -> None:
        # Sums of expected and measured times, by the number of requests.
        self._of_batch: dict[int, LatestTimes] = {}
        self._outliers = Outliers()
        self._num_added = 0
        self._known, self._known_at = (0.0, 1.0), 0  # a value of not long ago, and its step

    def add(
        self,
        step: int,
        shape: tuple[int, int],
        expected: float,
        measured: float,
        *,
        before: float,
    ) -> None:
        """Takes in a time, if it counts.

        step: its number, of all steps. shape: requests, and what else the expected time is of.
        before: see value.
        """
        if self._num_added < _EXPECT_EVERY or step - self._known_at >= _EXPECT_EVERY:
            self._known, self._known_at = self.value(step, before), step
        self._num_added += 1
        more, ratio = self._known
        # A part that was not timed since may well take what the table says.
        most = OUTLIER * max(more + ratio * expected, expected, LEAST_MS)
        counted = self._outliers.counted(shape, measured, most)
        if counted is not None:
            self._of_batch.setdefault(shape[0], LatestTimes()).add(step, expected, counted)

    def value(self, step: int, before: float) -> tuple[float, float]:
        """Milliseconds and ratio at that step, neither negative; without times 0 and before."""
        num = x = y = spread = missing = 0.0
        for sums in self._of_batch.values():
            sums.forget(step)
            num += sums.num
            x += sums.x
            y += sums.y
            of_batch, with_times = sums.centred()
            spread += of_batch
            missing += with_times - before * of_batch
        if num < FORGOTTEN:
            self._num_added = 0
            return 0.0, before
        times = max(PRIOR_TIMES * num / self._num_added, LEAST_PRIOR)
        prior = max(_PRIOR_SPREAD * (x / num) ** 2, times * spread / num)
        ratio = max(before + missing / (spread + prior), 0.0) if prior > 0 else before
        more = (y - ratio * x) / (num + times)
        if more >= 0:
            return more, ratio
        prior = times * x / num
        return 0.0, (y + before * prior) / (x + prior)
