"""What is packed into one copy comes out as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hvd.plugin.device.host_transfer import (
    Arrays,
    HostCopy,
    _packed,
    _unpacked,
    all_to_device,
)

ARRAYS = {
    "matrix": np.arange(6).reshape(2, 3),
    "nothing": np.empty(0, np.int64),
    "no columns": np.empty((2, 0), np.int64),
    "row of a wider array": np.arange(12).reshape(3, 4)[:, 1:3],
    "one": np.array([-1]),
}


def in_one_block(arrays: Arrays) -> dict[str, torch.Tensor]:
    """What a GPU gets, here in memory that is not pinned."""
    sent = _unpacked(_packed(arrays, pin_memory=False), arrays)
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent.values()}) <= 1
    return sent


@pytest.mark.parametrize("send", [in_one_block, partial(all_to_device, device="cpu")])
def test_arrays_of_any_shape_are_sent(send: Callable[[Arrays], dict[str, torch.Tensor]]) -> None:
    sent = send(ARRAYS)
    assert sent.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert sent[name].shape == array.shape
        assert sent[name].tolist() == array.tolist()
    assert send({"nothing": ARRAYS["nothing"]})["nothing"].tolist() == []
    assert send({}) == {}


def test_arrays_of_another_type_are_refused() -> None:
    of_another_type: Any = {"rows": np.zeros(2, np.int32)}
    with pytest.raises(AssertionError, match="one type"):
        all_to_device(of_another_type, "cpu")


def test_tensors_of_different_types_do_not_come_in_one_copy() -> None:
    with pytest.raises(AssertionError, match="one type"):
        HostCopy([torch.zeros(2), torch.zeros(2, dtype=torch.int32)], None)
