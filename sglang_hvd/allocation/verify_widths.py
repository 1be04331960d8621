"""How wide the verifications of a server may be."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Steps of so few requests may verify more nodes of each than others can. In replay 64 in place of
# 32 are worth .09 to .10 of the speed at one request, .07 at two, and nothing from four on.
MOST_WIDE_REQUESTS = 2

# Tokens that a GPU verifies in little more than the time of one, since reading the weights takes
# as long: 128 by configs/costs, which are derived; half of that, to be on the safe side.
_NEARLY_FREE_TOKENS = 64


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


def powers_of_two_below(widest: int) -> tuple[int, ...]:
    """Narrower widths to choose from beside the widest."""
    return tuple(2**k for k in range(widest.bit_length()) if 2**k < widest)


def widths_that_save(widest: int, most_requests: int) -> tuple[int, ...]:
    """Narrower widths worth their memory on a GPU that serves at most so many requests at once:
    powers of two, from the widest at which a full batch stays nearly free to verify."""
    narrowest = max(_NEARLY_FREE_TOKENS // most_requests, 1)
    return tuple(width for width in powers_of_two_below(widest) if 2 * width > narrowest)
