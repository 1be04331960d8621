from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]

NUM_DRAFT_FEATURES: int
NUM_POSITION_FEATURES: int
NUM_BUCKETS: int
MAX_DEPTH: int

def bucket_of(position: int) -> int: ...

# Floats side by side in the registers that features and network are computed in; for tests.
def widest_lanes() -> int: ...
def use_lanes(lanes: int) -> None: ...

class Tracker:
    def __init__(self, window: int, classes: npt.NDArray[np.uint8]) -> None: ...
    def start(self, prompt_ids: _Int32, namespace: str, teaches: bool) -> int: ...
    def forget(self) -> None: ...
    def finish(self, slot: int) -> None: ...
    def extend(self, slot: int, token_ids: _Int32) -> None: ...
    def commit(
        self, slots: _Int32, token_ids: _Int32, lengths: _Int32, accepted: _Int32
    ) -> None: ...
    def write(
        self,
        slots: _Int32,
        token_ids: _Int32,
        probs: _Float32,
        num_nodes: _Int32,
        matches: _Float32,
        evidence: _Float32,
        votes_token_ids: _Int32,
        votes_probs: _Float32,
        votes_num_nodes: _Int32,
        votes_matches: _Float32,
        votes_evidence: _Float32,
        features: _Float32,
        positions: _Float32,
    ) -> None: ...

class Network:
    def __init__(
        self,
        mean: _Float32,
        std: _Float32,
        weights: Sequence[_Float32],
        biases: Sequence[_Float32],
    ) -> None: ...
    def predict_survival(
        self,
        features: _Float32,
        positions: _Float32,
        num_tokens: _Int32,
        payoffs: _Float32,
        survival: _Float32,
    ) -> None: ...
    def predict_length(self, features: _Float32, payoffs: _Float32) -> None: ...

class CacheExpectations:
    def __init__(self) -> None: ...
    def expect(
        self,
        slots: _Int32,
        token_ids: _Int32,
        num_nodes: _Int32,
        matches: _Float32,
        factors: npt.NDArray[np.float64],
        depth: int,
        payoffs: _Float32,
        survival: _Float32 | None,
    ) -> None: ...
    def take(self, slot: int) -> tuple[int, int, int, float, float, float]: ...

class ModelExpectations:
    def __init__(
        self,
        num_steps: int,
        prob: float,
        weight: float,
        kept: float,
        weight_of_request: float,
        kept_of_request: float,
    ) -> None: ...
    def start(self, slot: int) -> None: ...
    def expect(
        self,
        slots: _Int32,
        token_ids: _Int32,
        num_nodes: _Int32,
        survival: _Float32 | None,
        out: _Float32,
    ) -> None: ...
    def expect_sizes(
        self,
        slots: _Int32,
        num_nodes: _Int32,
        survival: _Float32 | None,
        sizes: _Int32,
        odds: npt.NDArray[np.float64],
        reaches: _Float32,
        reaches_if_right: _Float32,
    ) -> None: ...
    def observe(
        self,
        slot: int,
        token_ids: _Int32,
        num_accepted: int,
        num_steps: int,
        odds: float,
        of_all: float,
    ) -> None: ...
    def expected(self, slot: int) -> tuple[float, float, float]: ...
    def probs(self) -> tuple[float, float, float, float]: ...
