"""Times of a server's latest steps, as what is learned from them counts them."""

# What the sums keep of themselves with each further time: the last few hundred count.
KEPT = 0.998

# What a part, and steps of a shape, begin at counts as so many times beside all that were seen, of
# which the latest make up the mean: what is timed now and then only would else never be taken for
# what it is. Of the latest it counts as this at least, so that what is timed no more is forgotten.
PRIOR_TIMES = 4.0
LEAST_PRIOR = 0.1

# A part, or a shape, of which less is left among the latest steps is as if it was never timed.
FORGOTTEN = 0.02

# A time this much above what is expected tells of the machine, not of the step: the first step
# of a batch size may wait for kernels to be compiled. It does not count, unless half of the latest
# times of steps of its shape are such: then these take so long now, and count up to this.
OUTLIER = 3.0
LEAST_MS = 0.5  # of what is expected, likewise: a short part waits as long for the host as any
_LATEST = 8


class LatestTimes:
    """Sums over the latest: how many, expected and measured ones, x and y, and x with itself
    and with y; tokens of context, and these with themselves and with y. num_seen: how many in all.
    """

    __slots__ = ("_cc", "_cy", "_step", "_xx", "_xy", "context", "num", "num_seen", "x", "y")

    def __init__(self) -> None:
        self._step = self.num_seen = 0
        self.num = self.x = self.y = self._xx = self._xy = 0.0
        self.context = self._cc = self._cy = 0.0

    def add(self, step: int, x: float, y: float, context: float = 0.0) -> None:
        """Takes in a time. step: its number, of all steps."""
        self.forget(step)
        self.num_seen += 1
        self.num += 1
        self.x += x
        self.y += y
        self._xx += x * x
        self._xy += x * y
        self.context += context
        self._cc += context * context
        self._cy += context * y

    def forget(self, step: int) -> None:
        """Counts the sums for what they are worth at that step."""
        if step == self._step:
            return
        kept = KEPT ** (step - self._step)
        self._step = step
        self.num *= kept
        self.x *= kept
        self.y *= kept
        self._xx *= kept
        self._xy *= kept
        self.context *= kept
        self._cc *= kept
        self._cy *= kept

    def centred(self) -> tuple[float, float]:
        """The products where each is taken from its mean."""
        if self.num < 1e-9:
            return 0.0, 0.0
        mean = self.x / self.num
        return max(self._xx - mean * self.x, 0.0), self._xy - mean * self.y

    def contexts_centred(self) -> tuple[float, float]:
        """The products of contexts, likewise."""
        if self.num < 1e-9:
            return 0.0, 0.0
        mean = self.context / self.num
        return max(self._cc - mean * self.context, 0.0), self._cy - mean * self.y


class Outliers:
    """Times far above what was expected, by shape."""

    def __init__(self) -> None:
        # Which of its latest times were: a bit for each, the newest lowest.
        self._latest: dict[tuple[int, int], int] = {}

    def counted(self, shape: tuple[int, int], measured: float, most: float) -> float | None:
        """A time as it counts; None if it does not. most: more than that is far above."""
        is_outlier = measured > most
        latest = (self._latest.get(shape, 0) << 1 | is_outlier) & ((1 << _LATEST) - 1)
        self._latest[shape] = latest
        if is_outlier and 2 * latest.bit_count() < _LATEST:
            return None
        return min(measured, most)
