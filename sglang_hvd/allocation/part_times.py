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

# Contexts that hardly differ tell little of what they take: they count beside so many times of
# which the contexts are as far from the mean as the mean is from none, and which take as long.
_PRIOR_CONTEXTS = 1.0

# Of a ratio this much is the table's, at least, where contexts are found to take nearly all.
_LEAST_RATIO = 0.1

# What is expected of a part is summed up anew for its first times, then after so many steps.
_EXPECT_EVERY = 16


class VerifyTimes:
    """Measured times of verifications as a ratio to the expected ones and what each token of
    context takes beside that, in the latest steps of the server: least squares, weighed by one over
    the expected time. Where contexts are in proportion to expected times nothing tells the two
    apart, and all is in the ratio."""

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
        num_context: int,
    ) -> float | None:
        """Takes in a time and returns it as it counts; None if it does not.

        step: its number, of all steps. shape: what the expected time is of. num_context: tokens in
        the KV caches of its requests.
        """
        ratio, of_token = self.value(step)
        most = OUTLIER * (max(ratio, 1.0) * expected + of_token * num_context)
        counted = self._outliers.counted(shape, measured, most)
        if counted is not None:
            self._sums.add(step, expected, counted, num_context)
        return counted

    def value(self, step: int) -> tuple[float, float]:
        """The ratio at that step, and milliseconds for each token of context, which are not
        negative; without times 1 and 0."""
        sums = self._sums
        sums.forget(step)
        if sums.num < 1e-9:
            return 1.0, 0.0
        prior = PRIOR_TIMES * sums.x / sums.num
        ratio = (sums.y + prior) / (sums.x + prior)
        spread, with_times = sums.contexts_centred()
        if with_times <= 0:
            return ratio, 0.0
        spread += _PRIOR_CONTEXTS * sums.context**2 / (sums.x * sums.num)
        per_x = sums.context / (sums.x + prior)
        of_token = min(with_times / spread, max(ratio - _LEAST_RATIO, 0.0) / per_x)
        return ratio - of_token * per_x, of_token


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
