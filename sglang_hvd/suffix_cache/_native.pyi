"""Types of the native core. cache.py documents its methods."""

import numpy as np
from numpy.typing import NDArray

from sglang_hvd.types import DraftBatch

_Int32 = NDArray[np.int32]

# The names of DraftBatch.matches' columns and of the fields of its evidence, with their places.
MATCH_COLUMNS: list[tuple[str, int]]
EVIDENCE_FIELDS: list[tuple[str, int]]
MATCH_ORIGINS: dict[str, int]

class PaperSettings:
    def __init__(
        self,
        *,
        max_depth: int,
        max_draft_tokens: int,
        max_spec_factor: float,
        max_spec_offset: float,
        min_token_prob: float,
    ) -> None: ...

class CacheSettings:
    def __init__(
        self,
        *,
        shared_tokens: int,
        namespace_tokens: int,
        session_tokens: int,
        indexes_in_background: bool,
        is_deterministic: bool,
        min_token_prob: float,
        paper: PaperSettings | None,
    ) -> None: ...

class CacheCore:
    def __init__(self, settings: CacheSettings, /) -> None: ...
    def start(self, namespace: str, prompt_ids: _Int32, /) -> int: ...
    def commit(self, slots: _Int32, token_ids: _Int32, lengths: _Int32, /) -> None: ...
    def propose(
        self,
        slots: _Int32,
        max_nodes: _Int32,
        is_tree: bool,
        by_votes: bool,
        with_evidence: bool,
        batch: DraftBatch,
        /,
    ) -> None: ...
    def finish(self, slot: int, keep: bool, output_ids: _Int32 | None, /) -> None: ...
    def add(
        self,
        namespace: str,
        token_ids: _Int32,
        lengths: _Int32,
        kept_at: NDArray[np.int64],
        /,
    ) -> None: ...
    def copy_after(
        self, serial: int, max_tokens: int, /
    ) -> tuple[list[str], bytes, bytes, bytes, bytes, int]: ...
    def contents(self) -> list[tuple[str, int, int, int, int, int, int]]: ...
    def flush(self, namespace: str, /) -> None: ...
    def resize(self, shared_tokens: int, namespace_tokens: int, /) -> None: ...
    def flush_all(self) -> None: ...
    def drain(self) -> None: ...
    def check(self) -> str | None: ...
    def stats(self) -> dict[str, int]: ...
