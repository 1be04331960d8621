"""Checks token ids and pads those of several requests."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import TokenIds

_MAX_TOKEN = np.iinfo(np.int32).max


def as_token_ids(token_ids: TokenIds | Sequence[int]) -> TokenIds:
    """Checks token ids: a one-dimensional int32 array, or a sequence of integers.

    Returns int32[num_tokens], which may share memory with the argument.
    Raises ValueError for another dtype or shape and for ids outside 0 ... 2**31 - 1.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype != np.int32 or token_ids.ndim != 1:
            raise ValueError(
                f"token ids must be int32[num_tokens], got {token_ids.dtype}{list(token_ids.shape)}"
            )
        wide = token_ids
    else:
        if not all(isinstance(token, (int, np.integer)) for token in token_ids):
            raise ValueError("token ids must be integers")
        if any(not 0 <= token <= _MAX_TOKEN for token in token_ids):
            raise ValueError(f"token ids must be from 0 to {_MAX_TOKEN}")
        return np.array(token_ids, dtype=np.int32)
    if len(wide) and wide.min() < 0:
        raise ValueError(f"token ids must not be negative, got {wide.min()}")
    return wide


def padded(
    rows: TokenIds | Sequence[TokenIds | Sequence[int]],
) -> tuple[TokenIds, npt.NDArray[np.int32]]:
    """Token ids of several requests as one array: int32[num_rows, longest], and the rows' lengths,
    int32[num_rows].

    Raises ValueError as as_token_ids does.
    """
    checked = [as_token_ids(row) for row in rows]
    lengths = np.fromiter(map(len, checked), np.int32, len(checked))
    token_ids = np.zeros((len(checked), lengths.max(initial=0)), np.int32)
    for filled, row in zip(token_ids, checked, strict=True):
        filled[: len(row)] = row
    return token_ids, lengths
