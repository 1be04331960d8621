"""What one decode step does: decided once, and handed along until its tokens are committed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_hvd.plugin.requests.held_requests import HeldBatch, Int64
from sglang_hvd.types import DraftPlans


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One decode step. Row i belongs to request i of the batch.

    held: the requests of the batch.
    drafts: what each of them verifies.
    cached_lens: int64[num_requests], tokens of each request in the KV cache. Its newest token,
        which is the root of what it verifies, is not among them.
    width: nodes of each request in the verification, root included.
    num_plain: number of consecutive plain steps (one node for each request), this one included; 0
        if this step has room for drafts.
    runs_ahead: the step is launched without drafts, before the tokens of the last step are known.
    gives_lengths: cached_lens replaces SGLang's lengths on the host, which the attention backends
        need and SGLang did not read.
    """

    held: HeldBatch
    drafts: DraftPlans
    cached_lens: Int64
    width: int
    num_plain: int
    runs_ahead: bool = False
    gives_lengths: bool = False

    @property
    def num_context(self) -> int:
        """Tokens of all requests together, their newest ones included."""
        return int(self.cached_lens.sum()) + len(self.cached_lens)

    @property
    def drafting_rows(self) -> Int64:
        """The requests for which the model drafter drafts."""
        return np.flatnonzero(self.drafts.num_model_nodes)

    def max_depth(self, rows: Int64) -> int:
        """No path of these requests has more draft tokens."""
        drafts = self.drafts
        of_host = int(drafts.drafts.num_nodes[rows].max(initial=0))
        is_drafting = bool(drafts.num_model_nodes[rows].any())
        return max(of_host, drafts.num_model_steps if is_drafting else 0)
