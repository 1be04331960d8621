import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Bool = npt.NDArray[np.bool_]
_UInt8 = npt.NDArray[np.uint8]

class HostTreeJoiner:
    def join(
        self,
        chain_tokens: _Int32,
        chain_lens: _Int32,
        acceptance: _Float32,
        draft_tokens: _Int32,
        draft_parents: _Int32,
        draft_depths: _Int32,
        draft_probs: _Float32,
        draft_nodes: _Int32,
        source: int,
        tokens: _Int32,
        parents: _Int32,
        depths: _Int32,
        probs: _Float32,
        is_chain: _Bool,
        sources: _UInt8,
        num_nodes: _Int32,
    ) -> None: ...
    def add(
        self,
        num: int,
        draft_tokens: _Int32,
        draft_parents: _Int32,
        draft_depths: _Int32,
        draft_probs: _Float32,
        draft_nodes: _Int32,
        source: int,
        tokens: _Int32,
        parents: _Int32,
        depths: _Int32,
        probs: _Float32,
        is_chain: _Bool,
        sources: _UInt8,
        num_nodes: _Int32,
    ) -> None: ...
    def take(
        self,
        tokens: _Int32,
        parents: _Int32,
        is_chain: _Bool,
        sources: _UInt8,
        acceptance: _Float32,
        of_chains: _Int32,
        num_taken: _Int32,
        out_tokens: _Int32,
        out_parents: _Int32,
        are_trees: _Bool,
        source_sets: _UInt8,
        chain_lens: _Int32,
        chain_predicted: _Float32,
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
        limits: tuple[_Bool, _Int32, _Int32, _Int32] | None,
        probs: _Float32,
        depths: _Int32,
        num_nodes: _Int32,
        model_probs: _Float32,
        model_probs_if_right: _Float32,
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
        limits: tuple[_Bool, _Int32, _Int32, _Int32] | None,
        probs: _Float32,
        depths: _Int32,
        num_nodes: _Int32,
        model_probs: _Float32,
        model_probs_if_right: _Float32,
        costs: BatchCosts,
        context_ms: float,
    ) -> bool: ...
