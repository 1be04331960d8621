"""What was predicted of some events and what came of them."""

from dataclasses import dataclass

# What a sum keeps of itself with each further event: the figures are of the last thousand or so.
_KEPT = 0.999


@dataclass(frozen=True, slots=True)
class Reliability:
    """Means over events; None without any.

    weight: number of events, the older ones counting less.
    """

    mean_predicted: float | None
    share: float | None
    weight: float


@dataclass(slots=True)
class RunningReliability:
    """Sums over events, exponentially forgotten."""

    weight: float = 0.0
    predicted: float = 0.0
    came: float = 0.0

    def add(self, predicted: float, came: float) -> None:
        self.weight = self.weight * _KEPT + 1
        self.predicted = self.predicted * _KEPT + predicted
        self.came = self.came * _KEPT + came

    @property
    def squared_weight(self) -> float:
        """The events' squared weights: what the variance of `came` is times that of an event."""
        left = 1 - self.weight * (1 - _KEPT)  # of a weight, since the first event
        return (1 - left * left) / (1 - _KEPT * _KEPT)

    def means(self) -> Reliability:
        if self.weight == 0:
            return Reliability(None, None, 0.0)
        return Reliability(self.predicted / self.weight, self.came / self.weight, self.weight)
