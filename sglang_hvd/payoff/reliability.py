"""What was predicted of some events and what came of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reliability:
    """Means over events; None without any.

    weight: number of events, the older ones counting less.
    """

    mean_predicted: float | None
    share: float | None
    weight: float

    @classmethod
    def of_sums(cls, weight: float, predicted: float, came: float) -> "Reliability":
        """Of running sums, as native/reliability.hpp keeps them."""
        if weight == 0:
            return cls(None, None, 0.0)
        return cls(predicted / weight, came / weight, weight)
