"""native/pace.hpp in Python."""

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]

# What a mean keeps of itself with each further cycle or step.
_KEPT_OF_REQUEST = 0.9
_KEPT_OF_ALL = 0.98
_KEPT_OF_STEPS = 0.9

# Tokens per cycle before anything was seen.
_FIRST = 2.0
_FIRST_STEP = 1.0  # time of a step over that of a plain one


class Pace:
    """Tokens per cycle of each request, by slot, and the time of steps beside plain ones.

    It counts what the cost table says, not what a clock says: equal calls give equal results.
    """

    def __init__(self) -> None:
        self._of_requests = np.full(1, _FIRST)
        self._of_all = _FIRST
        self._of_plain = _FIRST_STEP

    def start(self, slot: int) -> None:
        """A new request has this slot; it begins at the mean of all."""
        if slot >= len(self._of_requests):
            grown = np.full(2 * (slot + 1), _FIRST)
            grown[: len(self._of_requests)] = self._of_requests
            self._of_requests = grown
        self._of_requests[slot] = self._of_all

    def token_values(self, slots: Int32) -> Float64:
        """What one more token saves each request, in cycles: float64[num_requests]."""
        return np.asarray(1 / self._of_requests[slots])

    def price(self, num_requests: int, plain_ms: float) -> float:
        """What a millisecond of a step costs so many requests, in cycles.

        plain_ms: of a plain step of this batch. Another batch, or another table, changes it at
        once; how much longer steps take than plain ones changes slowly.
        """
        return num_requests / (self._of_plain * plain_ms)

    def see_step(self, milliseconds: float, plain_ms: float) -> None:
        """Takes in the time of a step, and of a plain step of the same batch."""
        ratio = milliseconds / plain_ms
        self._of_plain += (1 - _KEPT_OF_STEPS) * (ratio - self._of_plain)

    def see_tokens(self, slots: Int32, num_tokens: Int32) -> None:
        """Takes in how many tokens a cycle of each request committed."""
        of_cycle = np.maximum(num_tokens, 1)
        before = self._of_requests[slots]
        self._of_requests[slots] = before + (1 - _KEPT_OF_REQUEST) * (of_cycle - before)
        if len(of_cycle):
            # As if they had come one after the other.
            kept = _KEPT_OF_ALL ** len(of_cycle)
            self._of_all = kept * self._of_all + (1 - kept) * float(of_cycle.mean())
