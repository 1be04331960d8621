"""Types of the native module. The files that import a class or function document it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_hvd.allocation.allocator import PredictedDrafts, RowLimits
from sglang_hvd.allocation.host_trees import HostTrees
from sglang_hvd.drafter.proposer import StepArrays
from sglang_hvd.drafter.request import BatchLimits
from sglang_hvd.types import DraftBatch

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Bool = npt.NDArray[np.bool_]
_UInt8 = npt.NDArray[np.uint8]

# The suffix cache.

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
        kept_at: _Int64,
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

# Payoff.

NUM_DRAFT_FEATURES: int
NUM_POSITION_FEATURES: int
NUM_BUCKETS: int
MAX_DEPTH: int

def bucket_of(position: int, /) -> int: ...

# Floats per register in which features and network are computed; for tests.
def widest_lanes() -> int: ...
def use_lanes(lanes: int, /) -> None: ...

class Tracker:
    def __init__(self, window: int, classes: _UInt8, /) -> None: ...
    def start(self, prompt_ids: _Int32, namespace: str, teaches: bool, /) -> int: ...
    def forget(self) -> None: ...
    def finish(self, slot: int, /) -> None: ...
    def extend(self, slot: int, token_ids: _Int32, /) -> None: ...
    def commit(
        self,
        slots: _Int32,
        token_ids: _Int32,
        lengths: _Int32,
        verified_lens: _Int32,
        accepted_lens: _Int32,
        /,
    ) -> None: ...
    def write(
        self,
        slots: _Int32,
        drafts: DraftBatch,
        votes: DraftBatch,
        features: _Float32,
        positions: _Float32,
        /,
    ) -> None: ...

class Network:
    def __init__(
        self,
        mean: _Float32,
        std: _Float32,
        weights: Sequence[_Float32],
        biases: Sequence[_Float32],
        /,
    ) -> None: ...
    def predict_acceptance(
        self,
        features: _Float32,
        positions: _Float32,
        num_tokens: _Int32,
        accepted_lens: _Float32,
        acceptance: _Float32,
        /,
    ) -> None: ...
    def predict_len(self, features: _Float32, accepted_lens: _Float32, /) -> None: ...

# Weight, and the sums of predictions and observations.
_Sums = tuple[float, float, float]

class Calibration:
    def __init__(self, depth: int, /) -> None: ...
    def corrects(self) -> bool: ...
    def correct(
        self,
        slots: _Int32,
        drafts: DraftBatch,
        accepted_lens: _Float32,
        acceptance: _Float32 | None,
        /,
    ) -> None: ...
    def observe(
        self,
        slots: _Int32,
        token_ids: _Int32,
        lengths: _Int32,
        accepted_lens: _Int32,
        verified_lens: _Int32,
        predicted: _Float32,
        /,
    ) -> list[tuple[int, bool, float, float]]: ...
    def are_fallback(self) -> list[bool]: ...
    def figures(self, origin: int, /) -> tuple[int, float, bool, _Sums, _Sums, list[_Sums]]: ...

class ModelPredictor:
    def __init__(self, num_steps: int, full_size: int, size_effect: float, /) -> None: ...
    def odds_of(self, num_nodes: int, /) -> float: ...
    def start(self, slot: int, /) -> None: ...
    def predict(
        self, slots: _Int32, drafts: DraftBatch, cache_acceptance: _Float32 | None, out: _Float32, /
    ) -> None: ...
    def predict_sizes(
        self,
        slots: _Int32,
        drafts: DraftBatch,
        cache_acceptance: _Float32 | None,
        sizes: _Int32,
        odds: _Float64,
        acceptance: _Float32,
        if_cache_right: _Float32,
        /,
    ) -> None: ...
    def observe(
        self,
        slots: _Int32,
        token_ids: _Int32,
        lengths: _Int32,
        num_accepted: _Int32,
        num_nodes: _Int32,
        num_steps: _Int32,
        predicted: _Float32,
        /,
    ) -> None: ...
    def figures(self) -> tuple[int, _Sums]: ...
    def probs(self) -> tuple[float, float, float, float]: ...

# Allocation.

class HostTreeJoiner:
    def join(
        self,
        chains: DraftBatch,
        acceptance: _Float32,
        votes: DraftBatch,
        source: int,
        trees: HostTrees,
        /,
    ) -> None: ...
    def add(self, num: int, drafts: DraftBatch, source: int, trees: HostTrees, /) -> None: ...
    def take(
        self,
        trees: HostTrees,
        acceptance: _Float32,
        chains: DraftBatch,
        num_taken: _Int32,
        token_ids: _Int32,
        parents: _Int32,
        are_trees: _Bool,
        source_sets: _UInt8,
        chain_lens: _Int32,
        chain_predicted: _Float32,
        /,
    ) -> None: ...

class Pace:
    def __init__(self) -> None: ...
    def start(self, slot: int) -> None: ...
    def write_token_values(self, slots: _Int32, values: _Float64) -> None: ...
    def price(self, num_requests: int, plain_ms: float) -> float: ...
    def see_step(self, ms: float, plain_ms: float) -> None: ...
    def see_tokens(self, slots: _Int32, num_tokens: _Int32) -> None: ...

class BatchCosts:
    @staticmethod
    def of(
        widths: _Int32,
        step_ms: _Float64,
        drafters: _Int32,
        num_steps: _Int32,
        max_nodes: _Int32,
        draft_ms: _Float64,
        wait_ms: float,
    ) -> BatchCosts: ...

class StepAllocator:
    @staticmethod
    def of(sizes: _Int32, drafters: _Int32, merges: bool, look_after: int) -> StepAllocator: ...
    @property
    def pace(self) -> Pace: ...
    def start(self, slot: int) -> None: ...
    def see_tokens(self, slots: _Int32, num_tokens: _Int32) -> None: ...
    def allocate(
        self,
        slots: _Int32,
        limits: RowLimits | None,
        predicted: PredictedDrafts,
        costs: BatchCosts,
        context_ms: float,
        next_waits: bool,
        num_host: _Int32,
        num_model: _Int32,
        model_size: _Int32,
        model_predicted: _Float32,
    ) -> tuple[int, int, int]: ...
    def wants_drafts(
        self,
        slots: _Int32,
        limits: RowLimits | None,
        predicted: PredictedDrafts,
        costs: BatchCosts,
        context_ms: float,
    ) -> bool: ...

# The drafter.

class Rule:
    def __init__(
        self,
        *,
        policy: str,
        threshold: float | None,
        min_score: float,
        has_model: bool,
        drafter: int,
        room: int,
        num_steps: int,
        num_nodes: int,
    ) -> None: ...

class StepCore:
    def __init__(
        self,
        cache: CacheCore,
        tracker: Tracker | None,
        models: Sequence[tuple[ModelPredictor, int, list[int], list[float]]],
        allocator: StepAllocator | None,
        rule: Rule | None,
        num_sets: int,
        cache_bit: int,
        asks_votes: bool,
    ) -> None: ...
    def use_predictor(
        self, network: Network | None, is_survival: bool, calibration: Calibration | None
    ) -> None: ...
    def use_arrays(self, arrays: StepArrays, /) -> None: ...
    def start(self, slot: int, num_tokens: int, /) -> None: ...
    def extend(self, slot: int, num_tokens: int, counts: bool, /) -> None: ...
    def num_tokens(self, slot: int, /) -> int: ...
    def write_lengths(self, of_cache: _Int32, out: _Int64, /) -> None: ...
    def counts(self, slot: int | None) -> tuple[list[int], list[int], int]: ...
    def propose(
        self,
        of_cache: _Int32,
        of_rest: _Int32,
        limits: BatchLimits | None,
        max_chain: int,
        max_branch: int | None,
    ) -> tuple[float, float, float]: ...
    def choose(
        self,
        of_cache: _Int32,
        of_rest: _Int32,
        limits: BatchLimits | None,
        costs: BatchCosts | None,
        context: float,
        next_waits: bool,
        ints: _Int32,
        floats: _Float32,
        bytes: _UInt8,
        nodes: _Int32,
    ) -> tuple[int, int, int]: ...
    def wants_drafts(
        self,
        of_cache: _Int32,
        of_rest: _Int32,
        limits: BatchLimits | None,
        costs: BatchCosts,
        context: float,
    ) -> bool: ...
    def are_planned(self, of_cache: _Int32, /) -> bool: ...
    def commit(
        self,
        of_cache: _Int32,
        of_rest: _Int32,
        teaches: _Bool | None,
        token_ids: _Int32,
        lengths: _Int32,
        num_accepted: _Int32,
        num_model_accepted: _Int32,
    ) -> list[tuple[int, bool, float, float]]: ...

# Verify trees.

def lay_out_drafts(
    draft_tokens: _Int32,
    draft_parents: _Int32,
    num_nodes: _Int32,
    roots: _Int64,
    seq_lens: _Int64,
    rows: _Int64 | None,
    tree_tokens: _Int64 | None,
    parent_list: _Int64 | None,
    top_scores_index: _Int64 | None,
    topk: int,
    ranks: _Int64 | None,
    num_kept: _Int64 | None,
    is_model_node: _UInt8 | None,
    planes: _Int64,
    num_used: _Int64,
    mask: _UInt8,
    is_full_mask: bool,
) -> None: ...
def merge(
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    num_used: torch.Tensor,
    is_model_node: torch.Tensor,
    rows: torch.Tensor | None,
    tree_tokens: torch.Tensor,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    topk: int,
    ranks: torch.Tensor | None,
    num_kept: torch.Tensor,
) -> None: ...
def lay_out(
    parents: torch.Tensor,
    num_used: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    mask: torch.Tensor,
    is_full_mask: bool,
) -> None: ...

# What the draft KV caches lack.

class MissingPlaces:
    def __init__(self) -> None: ...
    def keep(self, slots: _Int64, cached_lens: _Int64, width: int, /) -> None: ...
    def settle(self, slots: _Int64, cached_lens: _Int64, /) -> _Int64: ...
    def forget(self, slots: _Int64, /) -> None: ...
    def take(self, slots: _Int64, /) -> _Int64: ...
    def num_of(self, slots: _Int64, /) -> _Int64: ...
    @property
    def num_places(self) -> int: ...
