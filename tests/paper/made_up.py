"""Results that nobody measured, with figures that are easy to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sglang_hvd.paper.results import (
    CalibrationBin,
    DataSet,
    Machine,
    Measurement,
    Mode,
    Result,
    Selection,
    Training,
)

LABELS = {
    "greedy": "Greedy",
    "eagle3": "EAGLE3",
    "suffix": "Suffix",
    "frequency": "Frequency hybrid",
    "hvd-paper": "HVD (paper)",
    "hvd": "HVD (allocate)",
}
# Tokens per second of each mode, before the factor of a data set and a round.
SPEEDS = {
    "greedy": 100.0,
    "eagle3": 150.0,
    "suffix": 80.0,
    "frequency": 160.0,
    "hvd-paper": 200.0,
    "hvd": 240.0,
}
FAMILIES = {
    "delegate-52": "agentic / workflow editing",
    "mbpp": "code / repository",
    "infinitebench": "long-context",
    "cnn-dailymail": "long-context",
    "mt-bench": "open-ended instruction / chat",
}
# Of 1000 tokens: cycles with a cache draft, with the model drafter's, without a draft.
CYCLES = {
    "greedy": (0, 0, 1000),
    "eagle3": (0, 500, 0),
    "suffix": (300, 0, 100),
    "frequency": (100, 250, 0),
    "hvd-paper": (80, 220, 0),
    "hvd": (90, 160, 10),
}


def measurement(
    mode: str, data_set: str, number: int = 0, *, speed: float | None = None, **given: Any
) -> Measurement:
    """A round of 1000 tokens."""
    cache, model, none = CYCLES[mode]
    values: dict[str, Any] = {
        "concurrency": 1,
        "round": number,
        "num_requests": 20,
        "num_tokens": 1000,
        "seconds": 1000 / (SPEEDS[mode] if speed is None else speed),
        "num_cycles": cache + model + none,
        "num_accepted": 1000 - (cache + model + none),
        "cycles": {"cache": cache, "model": model, "both": 0, "none": none},
        "accepted": {0: cache // 4, 4: cache // 4, 8: cache - 2 * (cache // 4)} if cache else {},
        "ttft_ms": (20.0, 40.0, 60.0),
        "tpot_ms": (5.0, 6.0, 9.0),
        "is_identical": None if mode == "greedy" else True,
    }
    return Measurement(mode=mode, data_set=data_set, **{**values, **given})


def data_set(name: str, **given: Any) -> DataSet:
    values: dict[str, Any] = {
        "family": FAMILIES.get(name, "of its own"),
        "source": f"hub:made/up@12345678 {name}",
        "licence": "CC0",
        "revision": "1234567890abcdef",
        "is_sample": False,
        "num_measured": 20,
        "num_warm_up": 40,
        "signs": {"paths": 1.5, "brackets": 12.0, "repeated lines": 0.25},
    }
    return DataSet(name=name, **{**values, **given})


def selection(name: str, **given: Any) -> Selection:
    values: dict[str, Any] = {
        "threshold": 6.0,
        "num_proposed": 1000,
        "num_high": 50,
        "num_selected": 40,
        "num_both": 30,
        "calibration": (
            CalibrationBin(num_drafts=900, predicted=0.5, accepted=0.25),
            CalibrationBin(num_drafts=60, predicted=4.5, accepted=5.0),
            CalibrationBin(num_drafts=40, predicted=9.0, accepted=10.5),
        ),
    }
    return Selection(data_set=name, **{**values, **given})


def result(
    data_sets: Sequence[str] = tuple(FAMILIES),
    modes: Sequence[str] = tuple(LABELS),
    rounds: Mapping[int, float] | None = None,
    data_sets_of: tuple[DataSet, ...] | None = None,
    **given: Any,
) -> Result:
    """A whole run.

    rounds: the factor of each round's throughput. data_sets_of: what the data sets are.
    """
    rounds = {0: 1.0, 1: 0.9, 2: 1.1} if rounds is None else rounds
    measurements = [
        measurement(mode, name, number, speed=SPEEDS[mode] * factor)
        for number, factor in rounds.items()
        for name in data_sets
        for mode in modes
    ]
    values: dict[str, Any] = {
        "model": "qwen3-8b",
        "target": "Qwen/Qwen3-8B",
        "drafter": "Tengyunw/qwen3_8b_eagle3",
        "machine": Machine(
            gpu="NVIDIA H100 80GB HBM3",
            num_gpus=1,
            cpu="Intel Xeon Platinum 8480",
            num_cores=16,
            memory_gb=128.0,
        ),
        "versions": {"sglang-hvd": "0.1", "sglang": "0.5.23"},
        "command": "python -m benchmarks.paper --model qwen3-8b --out runs",
        "started": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "seed": 42,
        "max_new_tokens": 8192,
        "shared_flags": ("--dtype", "float16"),
        "modes": tuple(
            Mode(name=mode, label=LABELS[mode], flags=("--hvd-policy", mode)) for mode in modes
        ),
        "data_sets": data_sets_of or tuple(map(data_set, data_sets)),
        "training": Training(
            num_requests=40,
            num_examples=5000,
            settings={"kind": "mlp", "epochs": 20},
            seconds=12.5,
        ),
        "measurements": tuple(measurements),
        "selections": tuple(map(selection, data_sets)),
        "is_complete": True,
    }
    return Result(**{**values, **given})


CPU = Machine(gpu=None, num_gpus=0, cpu="AMD EPYC", num_cores=2, memory_gb=8.0)
