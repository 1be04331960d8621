"""Which shapes of drafts the attention of a target model verifies rightly.

A chain only needs causal attention. A tree needs a mask that lets every node see its ancestors
alone, and whatever else a layer derives from a place must come from the node's depth. What SGLang
0.5.23 does instead, where it does:

- fa3 with topk 1, trtllm_mha: no mask, every draft is taken for a chain.
- flashinfer of an MLA model: drops the mask (flashinfer_mla_backend.py, "TODO: Support topk > 1").
- triton with a sliding window: the window begins by a node's slot, not by its depth.
- flashinfer with a sliding window: a verification's window begins at the first token of the text.
- linear attention with topk 1: states go from slot to slot.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# The CPU host registers a backend of its own under torch_native.
_MASKED = {"flashinfer", "triton", "torch_native", "intel_amx"}
_MASKED_WITH_TREES = _MASKED | {"fa3"}
_CAUSAL = _MASKED_WITH_TREES | {"trtllm_mha"}


@dataclass(frozen=True, slots=True)
class TargetAttention:
    """What decides it in a target model.

    has_window: some layers attend to the latest tokens only.
    """

    is_mla: bool = False
    is_linear: bool = False
    has_window: bool = False


def verifies_trees(
    backends: Collection[str], attention: TargetAttention, *, topk: int, needs_trees: bool
) -> bool:
    """Whether drafts may branch; else they must be chains.

    backends: of prefill and decode; verifications may run on either.
    topk: of the model drafter; above 1 its own drafts branch.
    needs_trees: the policy verifies trees with any topk.

    Raises ValueError if not even the model drafter's drafts would be verified rightly, or if trees
    are needed and would not.
    """
    is_tree = topk > 1
    shape = f"trees (topk {topk})" if is_tree else "both drafts" if needs_trees else "chains"
    for backend in backends:
        for_chains = _CAUSAL - ({"flashinfer"} if attention.has_window else set())
        for_trees = (_MASKED_WITH_TREES if is_tree else _MASKED) & for_chains
        if attention.has_window:
            for_trees -= {"triton"}
        if attention.is_mla:
            for_trees -= {"flashinfer"}
        supported = for_trees if is_tree or needs_trees else for_chains
        if backend not in supported:
            raise ValueError(
                f"HVD cannot verify {shape}{_of(attention)} on attention backend {backend}: "
                f"use one of {', '.join(sorted(supported))}"
                + ("" if not is_tree or backend not in for_chains else ", or topk 1")
            )
        if backend not in for_trees:
            return False
    if attention.is_linear and not is_tree:
        if needs_trees:
            raise ValueError(
                "HVD cannot verify both drafts of a model with linear attention with "
                "--speculative-eagle-topk 1: use a tree or another policy"
            )
        return False
    return True


def _of(attention: TargetAttention) -> str:
    traits = [
        name
        for name, has in (
            ("latent attention (MLA)", attention.is_mla),
            ("a sliding window", attention.has_window),
        )
        if has
    ]
    return f" of a model with {' and '.join(traits)}" if traits else ""
