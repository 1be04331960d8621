"""Token sequences laid one after the other in one growing array."""

import numpy as np

from sglang_hvd.types import TokenIds

# Follows every sequence. No token is negative, so nothing matches or continues across it.
END = -1


class TokenText:
    """Sequences in an int32 array, each followed by END; only the last one can grow.

    guard: number of extra positions kept readable before the first sequence, the nearest of them
        END, so that a window of that length ending inside the text never leaves the array.
    """

    def __init__(self, guard: int) -> None:
        self._guard = guard
        self._start = guard
        self._end = guard  # position of the last END
        self._array = np.full(2 * guard + 64, END, dtype=np.int32)

    def __len__(self) -> int:
        """Positions in use: all tokens, and END after every sequence but the last."""
        return self._end - self._start

    @property
    def with_guard(self) -> TokenIds:
        """int32[guard + len + 1]: the guard, the sequences and the last END. A view: it is
        valid until the text changes."""
        return self._array[self._start - self._guard : self._end + 1]

    @property
    def tokens(self) -> TokenIds:
        """int32[len], without guard and last END. A view: it is valid until the text changes."""
        return self._array[self._start : self._end]

    def extend(self, token_ids: TokenIds) -> None:
        """Appends tokens to the last sequence."""
        self._reserve(len(token_ids))
        end = self._end + len(token_ids)
        self._array[self._end : end] = token_ids
        self._array[end] = END
        self._end = end

    def close(self) -> None:
        """Ends the last sequence; the next tokens start a new one."""
        self._reserve(1)
        self._end += 1
        self._array[self._end] = END

    def drop_front(self, num_positions: int) -> None:
        """Forgets the first positions, which must be whole sequences with their END."""
        self._start += num_positions
        assert self._array[self._start - 1] == END, "the text must be cut between sequences"

    def _reserve(self, num_positions: int) -> None:
        if self._end + num_positions < len(self._array):
            return
        kept = self.with_guard
        # Twice what is needed: growing and moving the text is amortised O(1) per token.
        grown = np.full(2 * (len(kept) + num_positions), END, dtype=np.int32)
        grown[: len(kept)] = kept
        self._start, self._end = self._guard, self._guard + len(self)
        self._array = grown
