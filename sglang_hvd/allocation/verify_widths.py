"""How wide the verifications of a server may be."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Steps of so few requests may verify more nodes of each than others can. In replay 64 in place of
# 32 are worth .09 to .10 of the speed at one request, .07 at two, and nothing from four on.
MOST_WIDE_REQUESTS = 2


@dataclass(frozen=True, slots=True)
class VerifyWidths:
    """Nodes per request in one verification, root included.

    values: to choose from, rising.
    base: the widest of them for any number of requests, for which SGLang makes its own backends and
        graphs. Wider ones are for steps of at most MOST_WIDE_REQUESTS.
    asked_for: those that the settings name, beside the base.
    """

    values: tuple[int, ...]
    base: int
    asked_for: frozenset[int] = frozenset()

    @property
    def widest(self) -> int:
        """Of all."""
        return self.values[-1]

    def widest_of(self, num_requests: int) -> int:
        """That a step of so many can verify."""
        return self.widest if num_requests <= MOST_WIDE_REQUESTS else self.base

    def of_step(self, num_requests: int) -> tuple[int, ...]:
        """Those that a step of so many can choose from, rising."""
        widest = self.widest_of(num_requests)
        return tuple(width for width in self.values if width <= widest)

    def most_requests(self, width: int, most_requests: int) -> int:
        """Of a step that verifies so wide, on a server that runs at most so many."""
        return most_requests if width <= self.base else min(MOST_WIDE_REQUESTS, most_requests)

    def most_nodes(self, most_requests: int) -> int:
        """That a step of such a server verifies, of all its requests together."""
        return max(width * self.most_requests(width, most_requests) for width in self.values)

    def only(self, built: Sequence[int]) -> "VerifyWidths":
        """Those of them that could be built, the base among them."""
        return replace(self, values=tuple(built))
