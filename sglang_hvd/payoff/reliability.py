"""What was predicted of some events and what came of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reliability:
    """Means over events, of the latest most; None without any.

    mean_predicted: mean of the predictions, probabilities or tokens.
    share: mean of what was observed: the share of events that came true, or tokens.
    weight: number of events, the older ones counting less.
    """

    mean_predicted: float | None
    share: float | None
    weight: float

    @classmethod
    def of_sums(cls, weight: float, predicted: float, observed: float) -> "Reliability":
        """The means by running sums, as native/reliability.hpp keeps them."""
        if weight == 0:
            return cls(None, None, 0.0)
        return cls(predicted / weight, observed / weight, weight)
