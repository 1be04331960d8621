"""Drafts branch only where SGLang's attention verifies trees rightly."""

from dataclasses import replace

import pytest

from sglang_hvd.plugin.startup.attention_support import TargetAttention

PLAIN = TargetAttention()
MLA = TargetAttention(is_mla=True)
MLA_IN_PAGES = TargetAttention(is_mla=True, page_size=64)
WINDOW = TargetAttention(has_window=True)
WINDOW_IN_PAGES = TargetAttention(has_window=True, page_size=16)
CHUNKS = TargetAttention(is_chunked=True)
LINEAR = TargetAttention(is_linear=True)


def branches(
    attention: TargetAttention, *backends: str, topk: int, needs_trees: bool = False
) -> bool | str:
    """Whether drafts may branch, or what is said."""
    attention = replace(attention, backends=frozenset(backends))
    try:
        attention.check_draft_shapes(topk, needs_trees=needs_trees)
    except ValueError as error:
        return str(error)
    return attention.may_branch(topk)


@pytest.mark.parametrize(
    ("attention", "backend", "with_chains", "with_trees"),
    [
        (PLAIN, "flashinfer", True, True),
        (PLAIN, "triton", True, True),
        (PLAIN, "torch_native", True, True),
        (PLAIN, "fa3", False, True),
        (PLAIN, "trtllm_mha", False, None),
        (PLAIN, "fa4", None, None),
        (MLA, "flashinfer", False, None),
        (MLA, "triton", True, True),
        (MLA, "trtllm_mha", None, None),
        (MLA, "fa3", False, True),
        (MLA_IN_PAGES, "fa3", False, None),
        (TargetAttention(page_size=64), "fa3", False, True),
        (WINDOW, "flashinfer", None, None),
        (WINDOW, "triton", False, None),
        (WINDOW, "fa3", False, True),
        (WINDOW, "torch_native", False, None),
        (WINDOW_IN_PAGES, "fa3", False, None),
        (CHUNKS, "fa3", None, None),
        (CHUNKS, "triton", False, None),
        (LINEAR, "flashinfer", False, True),
    ],
)
def test_what_a_backend_verifies_of_a_model(
    attention: TargetAttention, backend: str, with_chains: bool | None, with_trees: bool | None
) -> None:
    for topk, expected in ((1, with_chains), (4, with_trees)):
        found = branches(attention, backend, topk=topk)
        if expected is None:
            shape = "chains" if topk == 1 else "trees (topk 4)"
            assert isinstance(found, str)
            assert found.startswith(f"HVD cannot verify {shape}")
            assert f"attention backend {backend}: use " in found
            assert backend not in found.split(": use ")[1]
        else:
            assert found is expected
        # Who needs trees is told where there are none.
        needs = branches(attention, backend, topk=topk, needs_trees=True)
        assert needs is True if expected else isinstance(needs, str)
        # Another backend that does less, before it or behind it, is looked at all the same.
        for pair in ((backend, "fa4"), ("fa4", backend)):
            assert "fa4" in str(branches(attention, *pair, topk=topk)) or expected is None


def test_the_backends_of_prefill_and_decode_must_both_do() -> None:
    assert branches(PLAIN, "triton", "fa3", topk=1) is False
    assert branches(PLAIN, "fa3", "triton", topk=1) is False
    assert "backend trtllm_mha" in str(branches(PLAIN, "triton", "trtllm_mha", topk=4))
    for pair in (("triton", "flashinfer"), ("flashinfer", "triton")):
        assert "backend flashinfer" in str(branches(WINDOW, *pair, topk=1))


def test_chains_are_offered_where_they_are_verified() -> None:
    assert str(branches(MLA, "flashinfer", topk=4)).endswith(", or topk 1")
    assert "use chains, or topk 1" in str(branches(CHUNKS, "triton", topk=4))
    assert "model with a sliding window" in str(branches(WINDOW, "triton", topk=4))
    assert not str(branches(WINDOW, "flashinfer", topk=4)).endswith("topk 1")


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "fa3"])
def test_drafts_are_chains_where_output_must_not_depend_on_other_drafts(backend: str) -> None:
    deterministic = TargetAttention(is_deterministic=True)
    assert branches(deterministic, backend, topk=1) is False
    only = "With --enable-deterministic-inference HVD verifies chains only, not "
    for needs_trees in (False, True):
        assert branches(deterministic, backend, topk=4, needs_trees=needs_trees) == (
            f"{only}--speculative-eagle-topk 4: use --speculative-eagle-topk 1, with "
            "--speculative-num-steps"
        )
    assert branches(deterministic, backend, topk=1, needs_trees=True) == (
        f"{only}--hvd-policy both: use another policy"
    )
    assert "fa4: use one of" in str(branches(deterministic, "fa4", topk=1))
