import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation.allocator import PredictedDrafts, RowLimits
from sglang_hvd.allocation.host_trees import HostTrees
from sglang_hvd.types import DraftBatch

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Bool = npt.NDArray[np.bool_]
_UInt8 = npt.NDArray[np.uint8]

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
