"""What is packed into one copy comes out as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_hvd.plugin.device.host_transfer import HostCopy, all_to_device


def test_arrays_of_any_shape_are_sent_in_one_block() -> None:
    arrays = {
        "matrix": np.arange(6).reshape(2, 3),
        "nothing": np.empty(0, np.int64),
        "no columns": np.empty((2, 0), np.int64),
        "row of a wider array": np.arange(12).reshape(3, 4)[:, 1:3],
        "one": np.array([-1]),
    }
    sent = all_to_device(arrays, "cpu")
    assert sent.keys() == arrays.keys()
    for name, array in arrays.items():
        assert sent[name].shape == array.shape
        assert sent[name].tolist() == array.tolist()
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent.values()}) == 1
    arrays["one"][0] = 7
    assert sent["one"].tolist() == [-1]


def test_nothing_can_be_sent() -> None:
    assert all_to_device({"nothing": np.empty(0, np.int64)}, "cpu")["nothing"].tolist() == []


def test_tensors_of_different_types_do_not_come_in_one_copy() -> None:
    with pytest.raises(AssertionError, match="one type"):
        HostCopy([torch.zeros(2), torch.zeros(2, dtype=torch.int32)], None)
