"""The widths that the verifications of a server may have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Steps of at most so many requests may verify more nodes per request than others. In replay, 64
# instead of 32 nodes gain 9 to 10 % speed at one request, 7 % at two, and nothing from four on.
MAX_WIDE_REQUESTS = 2

# Tokens that a GPU verifies in little more than the time of one, since reading the weights takes
# most of the time: 1.17 times as long for one request and 1.15 for four, on an H200
# (configs/costs).
_NEARLY_FREE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class VerifyWidths:
    """Nodes per request in one verification, root included.

    values: widths to choose from, rising.
    base: the widest width for any number of requests, for which SGLang makes its own backends and
        graphs. Wider ones are for steps of at most MAX_WIDE_REQUESTS.
    asked_for: widths that the settings name, in addition to the base.
    """

    values: tuple[int, ...]
    base: int
    asked_for: frozenset[int] = frozenset()

    @property
    def widest(self) -> int:
        """The widest of all widths."""
        return self.values[-1]

    def widest_of(self, num_requests: int) -> int:
        """The widest that a step of so many requests can verify."""
        return self.widest if num_requests <= MAX_WIDE_REQUESTS else self.base

    def of_step(self, num_requests: int) -> tuple[int, ...]:
        """The widths that a step of so many requests can choose from, rising."""
        widest = self.widest_of(num_requests)
        return tuple(width for width in self.values if width <= widest)

    def narrowest(self, num_nodes: int) -> int:
        """The narrowest width that holds so many nodes, root included."""
        return next(width for width in self.values if width >= num_nodes)

    def batch_limit(self, width: int, max_running_requests: int) -> int:
        """The most requests in a step that verifies so wide, on a server that runs so many."""
        if width <= self.base:
            return max_running_requests
        return min(MAX_WIDE_REQUESTS, max_running_requests)

    def max_nodes(self, max_running_requests: int) -> int:
        """The most nodes that a step of such a server verifies, of all its requests together."""
        return max(width * self.batch_limit(width, max_running_requests) for width in self.values)

    def only(self, built: Sequence[int]) -> "VerifyWidths":
        """The widths that could be built, the base among them."""
        return replace(self, values=tuple(built))


def powers_of_two_below(widest: int) -> tuple[int, ...]:
    """Narrower widths to choose from, in addition to the widest."""
    return tuple(2**k for k in range(widest.bit_length()) if 2**k < widest)


def widths_that_save(widest: int, max_requests: int) -> tuple[int, ...]:
    """Narrower widths worth their memory on a GPU that serves at most so many requests at once:
    powers of two, from the widest at which a full batch stays nearly free to verify."""
    narrowest = max(_NEARLY_FREE_TOKENS // max_requests, 1)
    return tuple(width for width in powers_of_two_below(widest) if 2 * width > narrowest)
