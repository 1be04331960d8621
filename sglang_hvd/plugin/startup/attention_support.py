"""Which attention backends verify which shapes of drafts correctly.

A chain only needs causal attention. A tree needs a mask that lets every node see only its
ancestors, and layers must derive positions from a node's depth. SGLang 0.5.23 deviates from that
here:

- fa3 with topk 1, and trtllm_mha: there is no mask, every draft is treated as a chain.
- fa3 with topk above 1 and pages of several tokens: with an MLA model it mistakes slots for pages,
  and with a sliding window it crashes at the first verification.
- fa3 with a model that attends in chunks (Llama 4): a verification attends to the whole text.
- flashinfer with an MLA model: it drops the mask (see "TODO: Support topk > 1" in
  flashinfer_mla_backend.py).
- triton with a sliding window: the window starts by a node's slot, not by its depth. The CPU
  backends were not examined.
- flashinfer with a sliding window: a verification's window starts at the first token of the text.
- linear attention with topk 1: states pass from slot to slot.

With --enable-deterministic-inference drafts are chains on every backend. In a tree, the slots of a
path depend on what else was drafted, and so does the order in which its attention is summed. In a
chain a node's slot is its depth.
"""

from __future__ import annotations

from dataclasses import dataclass

# On the CPU, patches/ registers its own backend as torch_native.
_MASKED = frozenset({"flashinfer", "triton", "torch_native", "intel_amx"})
_MASKED_WITH_TREES = _MASKED | {"fa3"}
_CAUSAL = _MASKED_WITH_TREES | {"trtllm_mha"}


@dataclass(frozen=True, slots=True)
class TargetAttention:
    """What decides which drafts of a target model are verified correctly.

    backends: its attention backends of prefill and decode; verifications may run on either.
    is_mla: latent attention, as in DeepSeek's models.
    is_linear: some layers keep a state instead of a KV cache.
    is_chunked: some layers attend only to their chunk of the text, as in Llama 4.
    has_window: some layers attend only to the latest tokens.
    page_size: tokens per page of the KV cache.
    is_deterministic: sums must not depend on what else was drafted.
    """

    backends: frozenset[str] = frozenset()
    is_mla: bool = False
    is_linear: bool = False
    is_chunked: bool = False
    has_window: bool = False
    page_size: int = 1
    is_deterministic: bool = False

    def check_draft_shapes(self, topk: int, *, needs_trees: bool) -> None:
        """Raises ValueError if the server's drafts would not be verified correctly.

        topk: the model drafter's; above 1 its drafts branch.
        needs_trees: the policy verifies trees whatever the topk.
        """
        if self.is_deterministic and (topk > 1 or needs_trees):
            what, instead = ("--hvd-policy both", "use another policy")
            if topk > 1:
                what = f"--speculative-eagle-topk {topk}"
                instead = "use --speculative-eagle-topk 1, with --speculative-num-steps"
            raise ValueError(
                "With --enable-deterministic-inference HVD verifies chains only, not "
                f"{what}: {instead}"
            )
        chains, trees = self._backends_of_chains(), self._backends_of_trees(topk)
        shape = f"trees (topk {topk})" if topk > 1 else "both drafts" if needs_trees else "chains"
        for backend in sorted(self.backends):
            supported = trees if topk > 1 or needs_trees else chains
            if backend not in supported:
                others = f"use one of {', '.join(sorted(supported))}" if supported else "use chains"
                is_chain_enough = topk > 1 and backend in chains
                raise ValueError(
                    f"HVD cannot verify {shape}{self._of_model()} on attention backend {backend}: "
                    f"{others}{', or topk 1' if is_chain_enough else ''}"
                )
        if self.is_linear and topk == 1 and needs_trees:
            raise ValueError(
                "HVD cannot verify both drafts of a model with linear attention with "
                "--speculative-eagle-topk 1: use a tree or another policy"
            )

    def may_branch(self, topk: int) -> bool:
        """Whether drafts may branch: two drafts of a request in one tree, or a cache draft that
        branches itself. If not, every draft must be a chain.

        topk: the model drafter's.
        """
        if self.is_linear and topk == 1:
            return False
        return self._backends_of_trees(topk).issuperset(self.backends)

    def _backends_of_chains(self) -> frozenset[str]:
        """Backends that verify chains correctly."""
        backends = _CAUSAL
        if self.has_window:
            backends -= {"flashinfer"}
        if self.is_chunked:
            backends -= {"fa3"}
        if self.is_mla:
            backends -= {"trtllm_mha"}  # SGLang refuses it
        return backends

    def _backends_of_trees(self, topk: int) -> frozenset[str]:
        """Backends that verify trees correctly if the model drafter has this topk."""
        if self.is_deterministic:
            return frozenset()
        backends = (_MASKED_WITH_TREES if topk > 1 else _MASKED) & self._backends_of_chains()
        if self.has_window or self.is_chunked:
            backends -= _MASKED
        if self.is_mla:
            backends -= {"flashinfer"}
        if self.page_size > 1 and (self.is_mla or self.has_window):
            backends -= {"fa3"}
        return backends

    def _of_model(self) -> str:
        """For messages: " of a model with ...", or nothing for an ordinary model."""
        traits = {
            "latent attention (MLA)": self.is_mla,
            "a sliding window": self.has_window,
            "chunks": self.is_chunked,
        }
        named = " and ".join(name for name, has in traits.items() if has)
        pages = f", page size {self.page_size}" if self.page_size > 1 else ""
        return f" of a model with {named}{pages}" if named else ""
