"""The native replay labels, against a Python oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_hvd.suffix_cache._native import accepted_lengths

Case = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]


def common_prefix(draft: list[int], continuation: list[int]) -> int:
    num_equal = 0
    for drafted, recorded in zip(draft, continuation, strict=False):
        if drafted != recorded:
            break
        num_equal += 1
    return num_equal


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Three token ids make long agreements likely; the extremes check that int32 is kept whole.
    token_ids = st.sampled_from([0, 1, 2**31 - 1, -(2**31)])
    sequence = draw(st.lists(token_ids, max_size=24))
    width = draw(st.integers(0, 8))
    num_drafts = draw(st.integers(0, 6))
    rows = [draw(st.lists(token_ids, min_size=width, max_size=width)) for _ in range(num_drafts)]
    lengths = [draw(st.integers(0, width)) for _ in range(num_drafts)]
    positions = [draw(st.integers(0, len(sequence))) for _ in range(num_drafts)]
    return (
        np.array(rows, np.int32).reshape(num_drafts, width),
        np.array(lengths, np.int32),
        np.array(positions, np.int64),
        np.array(sequence, np.int32),
    )


def one_draft(**changed: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "draft_tokens": np.array([[7, 8, 9]], np.int32),
        "draft_lengths": np.array([3], np.int32),
        "positions": np.array([1], np.int64),
        "sequence": np.array([5, 7, 8, 6], np.int32),
    }
    return arguments | changed


@given(cases())
def test_labels_equal_the_oracle(case: Case) -> None:
    draft_tokens, draft_lengths, positions, sequence = case
    want = [
        common_prefix(row[:length].tolist(), sequence[position:].tolist())
        for row, length, position in zip(draft_tokens, draft_lengths, positions, strict=True)
    ]
    got = accepted_lengths(draft_tokens, draft_lengths, positions, sequence)
    assert got.dtype == np.int32
    assert got.tolist() == want


def test_padding_behind_a_draft_does_not_count() -> None:
    got = accepted_lengths(**one_draft(draft_lengths=np.array([1], np.int32)))
    assert got.tolist() == [1]


def test_a_draft_past_the_end_of_the_recording_is_cut_there() -> None:
    sequence = np.array([7, 8], np.int32)
    got = accepted_lengths(**one_draft(sequence=sequence, positions=np.array([0], np.int64)))
    assert got.tolist() == [2]


def test_read_only_arrays_are_taken_as_they_are() -> None:
    arguments = one_draft()
    for array in arguments.values():
        array.flags.writeable = False
    assert accepted_lengths(**arguments).tolist() == [2]


def test_the_result_outlives_its_inputs() -> None:
    results = [accepted_lengths(**one_draft()) for _ in range(100)]
    assert all(result.tolist() == [2] for result in results)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("draft_tokens", np.array([[7, 8, 9]], np.int64)),
        ("draft_tokens", np.array([7, 8, 9], np.int32)),
        ("draft_tokens", np.array([[7, 0, 8, 0, 9, 0]], np.int32)[:, ::2]),
        ("draft_tokens", np.asfortranarray(np.zeros((3, 3), np.int32))),
        ("draft_lengths", np.array([3], np.int64)),
        ("positions", np.array([1], np.int32)),
        ("positions", np.array([[1]], np.int64)),
        ("sequence", np.array([5, 7, 8, 6], np.uint32)),
        ("sequence", [5, 7, 8, 6]),
        ("sequence", None),
    ],
)
def test_another_dtype_shape_or_layout_is_refused_not_converted(name: str, array: object) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        accepted_lengths(**one_draft(**{name: array}))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("draft_lengths", np.array([4], np.int32), r"draft_lengths\[0\] is 4: must lie in 0\.\.3"),
        ("draft_lengths", np.array([-1], np.int32), r"draft_lengths\[0\] is -1: must lie in 0"),
        ("positions", np.array([5], np.int64), r"positions\[0\] is 5: must lie in 0\.\.4"),
        ("positions", np.array([-1], np.int64), r"positions\[0\] is -1: must lie in 0\.\.4"),
        ("positions", np.array([2**62], np.int64), r"positions\[0\] is 4611686018427387904"),
        ("positions", np.array([1, 1], np.int64), "positions has 2 entries, draft_tokens has 1"),
        ("draft_lengths", np.array([], np.int32), "draft_lengths has 0 entries"),
    ],
)
def test_a_value_out_of_range_is_named(name: str, array: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accepted_lengths(**one_draft(**{name: array}))
