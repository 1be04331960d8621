"""What a run of `benchmarks.paper` measured, as it stands in its result file.

Figures that can be computed from others are not kept: `rounds` computes them.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

Template = Literal["official", "none"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_Record):
    """Where a run was made.

    gpu: its name as the driver gives it; None on a CPU.
    """

    gpu: str | None
    num_gpus: int
    cpu: str
    num_cores: int
    memory_gb: float


class Mode(_Record):
    """A way of serving.

    name: `greedy`, `eagle3`, `suffix`, `frequency`, `hvd-paper`, `hvd`, `eagle3-adaptive` or
        `ngram`.
    label: what tables call it.
    flags: the server's, beyond those that all modes share.
    why_not: why this machine cannot serve it; None if it was served.
    """

    name: str
    label: str
    flags: tuple[str, ...]
    why_not: str | None = None


class DataSet(_Record):
    """A data set as it was measured.

    revision: of the hub; None for a local sample or a file.
    is_sample: its rows were made for a test and are not the data set's.
    signs: structural signals of the measured prompts (figure 2a), each in units of 1000 characters.
    """

    name: str
    family: str
    source: str
    licence: str
    revision: str | None
    is_sample: bool
    num_measured: int
    num_warm_up: int
    signs: Mapping[str, float]


class Measurement(_Record):
    """One mode's replies to the measured prompts of one data set, in one round.

    concurrency: requests that run at once. rate: requests that arrive per second; None in a closed
        loop.
    num_tokens, seconds, num_cycles: the appendix's G, T and C. A prefill generates a reply's first
        token and is no cycle. With several requests at once, seconds are those of the whole round.
    num_accepted: draft tokens of which the target model accepted, bonus tokens left out.
    cycles: decoding cycles by the source of what they verified: `cache`, `model`, `both` or `none`.
        Empty where the server does not say.
    accepted: how many cycles that verified a cache draft accepted k of its tokens, for each k
        (figure 3). Empty where the mode has no cache.
    ttft_ms, tpot_ms: 50th, 90th and 99th percentile. tpot_ms is None if each reply came in one
        chunk.
    is_identical: each reply equals that of mode `greedy`, token for token. None: none is known to
        differ, but not all were compared.
    error: what ended the round early; its figures are then those of the replies before that.
    """

    mode: str
    data_set: str
    template: Template = "official"
    concurrency: int
    rate: float | None = None
    round: int
    num_requests: int
    num_tokens: int
    seconds: float
    num_cycles: int
    num_accepted: int
    cycles: Mapping[str, int]
    accepted: Mapping[int, int] = {}
    ttft_ms: tuple[float, float, float] | None = None
    tpot_ms: tuple[float, float, float] | None = None
    is_identical: bool | None = None
    error: str | None = None


class CalibrationBin(_Record):
    """Drafts of like prediction: their number, mean prediction and mean accepted length."""

    num_drafts: int
    predicted: float
    accepted: float


class Selection(_Record):
    """What the paper's predictor made of each cache draft that was proposed (table 2, appendix G).

    The drafts are those of a replay of mode `greedy`'s replies to the measured prompts.

    num_high: drafts whose accepted length reaches the threshold. num_selected: whose predicted
    length does. num_both: both.
    """

    data_set: str
    threshold: float
    num_proposed: int
    num_high: int
    num_selected: int
    num_both: int
    calibration: tuple[CalibrationBin, ...]


class Training(_Record):
    """How the run's own predictor was trained.

    warnings: for example, that there is too little data for the paper's batch size.
    """

    num_requests: int
    num_examples: int
    settings: Mapping[str, str | int | float]
    seconds: float
    warnings: tuple[str, ...] = ()


class Result(_Record):
    """A whole run, or as much of it as is there.

    model: a name of the paper's (`qwen3-8b`, ...), or `demo`.
    versions: of packages by name, and of this project's commit.
    is_complete: False while the run goes on, or after it broke.
    """

    format_version: Literal[1] = 1
    model: str
    target: str
    drafter: str
    machine: Machine
    versions: Mapping[str, str]
    command: str
    started: datetime
    seed: int
    max_new_tokens: int
    shared_flags: tuple[str, ...]
    modes: tuple[Mode, ...]
    data_sets: tuple[DataSet, ...]
    training: Training | None
    measurements: tuple[Measurement, ...]
    selections: tuple[Selection, ...]
    is_complete: bool


def read_result(path: Path) -> Result:
    """The result in a file.

    Raises ValueError, in one line, if the file cannot be read or holds something else.
    """
    try:
        return Result.model_validate_json(path.read_bytes())
    except IsADirectoryError as error:
        raise ValueError(
            f"cannot read {path}: Is a directory; a run keeps its result in {path / 'result.json'}"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"{path} is not a result of benchmarks.paper: {where}: {first['msg']}"
        ) from error
