"""Types of the native core. cache.py documents its methods."""

import numpy as np
from numpy.typing import NDArray

# The names of DraftBatch.matches' columns and of the fields of its evidence, with their places.
MATCH_COLUMNS: list[tuple[str, int]]
EVIDENCE_FIELDS: list[tuple[str, int]]
MATCH_ORIGINS: dict[str, int]

class CacheCore:
    def __init__(
        self,
        *,
        shared_tokens: int,
        namespace_tokens: int,
        session_tokens: int,
        indexes_in_background: bool,
        min_token_prob: float,
    ) -> None: ...
    @staticmethod
    def as_in_paper(
        *,
        shared_tokens: int,
        namespace_tokens: int,
        max_depth: int,
        max_draft_tokens: int,
        max_spec_factor: float,
        max_spec_offset: float,
        min_token_prob: float,
    ) -> CacheCore: ...
    def start(self, namespace: str, prompt_ids: NDArray[np.int32]) -> int: ...
    def commit(
        self, slots: NDArray[np.int32], token_ids: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> None: ...
    def propose(
        self,
        slots: NDArray[np.int32],
        max_nodes: NDArray[np.int32],
        is_tree: bool,
        by_votes: bool,
        with_evidence: bool,
        token_ids: NDArray[np.int32],
        parents: NDArray[np.int32],
        depths: NDArray[np.int32],
        probs: NDArray[np.float32],
        lengths: NDArray[np.int32],
        matches: NDArray[np.float32],
        evidence: NDArray[np.float32],
    ) -> None: ...
    def finish(self, slot: int, keep: bool, output_ids: NDArray[np.int32] | None) -> None: ...
    def flush(self, namespace: str) -> None: ...
    def resize(self, shared_tokens: int, namespace_tokens: int) -> None: ...
    def flush_all(self) -> None: ...
    def drain(self) -> None: ...
    def check(self) -> str | None: ...
    def stats(self) -> dict[str, int]: ...
