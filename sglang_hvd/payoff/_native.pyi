from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import DraftBatch

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]

NUM_DRAFT_FEATURES: int
NUM_POSITION_FEATURES: int
NUM_BUCKETS: int
MAX_DEPTH: int

def bucket_of(position: int, /) -> int: ...

# Floats per register in which features and network are computed; for tests.
def widest_lanes() -> int: ...
def use_lanes(lanes: int, /) -> None: ...

class Tracker:
    def __init__(self, window: int, classes: npt.NDArray[np.uint8], /) -> None: ...
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
