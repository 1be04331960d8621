"""The check of token ids."""

import numpy as np
import pytest

from sglang_hvd.suffix_cache.token_ids import as_token_ids, padded
from sglang_hvd.types import TokenIds

LARGEST = 2**31 - 1


def ids(*token_ids: int) -> TokenIds:
    return np.array(token_ids, dtype=np.int32)


def test_integers_and_int32_arrays_are_token_ids() -> None:
    assert as_token_ids([0, LARGEST]).tolist() == [0, LARGEST]
    assert as_token_ids(ids(3, 4)).tolist() == [3, 4]
    assert as_token_ids([]).dtype == np.int32
    assert as_token_ids((np.int64(3),)).tolist() == [3]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.array([1, 2]), r"must be int32\[num_tokens\], got int64\[2\]"),
        (np.array([[1]], dtype=np.int32), r"got int32\[1, 1\]"),
        (ids(3, -1), "must not be negative, got -1"),
        ([3, -1], "from 0 to 2147483647"),
        ([LARGEST + 1], "from 0 to 2147483647"),
        ([1.0], "must be integers"),
        (["1"], "must be integers"),
        ("12", "must be integers"),
    ],
)
def test_anything_else_is_refused(value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_token_ids(value)  # type: ignore[arg-type]


def test_rows_of_several_lengths_become_one_array() -> None:
    token_ids, lengths = padded([[1, 2, 3], ids(), ids(4)])
    assert token_ids.dtype == lengths.dtype == np.int32
    assert token_ids.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert lengths.tolist() == [3, 0, 1]
    assert padded([])[0].shape == (0, 0)
    with pytest.raises(ValueError, match="not be negative"):
        padded([[1], ids(-1)])
