"""The paper's predictor: trained on the target's own outputs, judged on drafts it has not seen."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.paper.replies import record
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.paper.results import CalibrationBin, Selection, Training
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.replay.core.model_drafter import ModelDrafter
from sglang_hvd.replay.core.recordings import (
    Recording,
    TraceTokenizer,
    find_recordings,
    session_fingerprints,
)
from sglang_hvd.replay.core.training_rows import TrainingRows
from sglang_hvd.replay.core.walk import WalkSettings, walk_recording
from sglang_hvd.replay.training.train import TrainPlan, few_updates, train_predictors
from sglang_hvd.traces.trace import Trace

# Table 10.
_BATCH_SIZE, _NUM_EPOCHS = 65536, 20

_NUM_BINS = 10


def train_paper(
    recordings: Path,
    tokenizer: TraceTokenizer,
    config: HvdConfig,
    output: Path,
    *,
    seed: int,
) -> Training:
    """Trains the paper's predictor on a folder of recordings, and writes it.

    The command `sglang-hvd train --kind mlp --held-out 0` does the same with the same settings.

    Raises ValueError, in one line, if the recordings hold nothing to learn from.
    """
    start = time.monotonic()
    plan = TrainPlan(
        config=config, held_out=0, batch_size=_BATCH_SIZE, num_epochs=_NUM_EPOCHS, seed=seed
    ).as_paper()
    found = find_recordings(recordings)
    predictor = train_predictors(found, [tokenizer], plan, ["mlp"])["mlp"]
    predictor.save(output)
    settings = predictor.provenance["training"]
    num_rows = predictor.provenance["num_rows"]
    assert isinstance(settings, dict), "train_predictors writes its settings"
    assert isinstance(num_rows, int), "train_predictors counts its rows"
    few = few_updates(predictor)
    return Training(
        num_requests=sum(len(recording.traces(tokenizer)) for recording in found),
        num_examples=num_rows,
        settings={
            "kind": "mlp",
            "hidden_sizes": "x".join(map(str, settings["hidden_sizes"])),
            "learning_rate": settings["learning_rate"],
            "batch_size": _BATCH_SIZE,
            "epochs": _NUM_EPOCHS,
            "rounds": plan.num_rounds,
            "seed": seed,
        },
        seconds=time.monotonic() - start,
        warnings=() if few is None else (few,),
    )


def selection(
    data_set: str,
    warm_up: Sequence[Trace],
    measured: Sequence[Trace],
    predictor: AcceptancePredictor,
    tokenizer: TraceTokenizer,
    config: HvdConfig,
) -> Selection:
    """What a predictor makes of each cache draft of the measured replies, at every output token.

    warm_up: replies that fill the shared cache first, and are not counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{data_set}.hvdt"
        # Sessions are numbered in both.
        apart = [replace(trace, session=f"measured {trace.session}") for trace in measured]
        record(path, [*warm_up, *apart])
        settings = WalkSettings(
            config.for_policy("model", calibrate=False),
            model_drafter=ModelDrafter(0),  # so every token begins a cycle
            draft_limits=(config.max_draft_tokens,),
            without=frozenset(session_fingerprints(warm_up).values()),
        )
        walk = walk_recording(Recording(path, None), tokenizer, settings, settings.max_rows)
    return selection_of(data_set, walk.judged_rows(), predictor)


def selection_of(
    data_set: str, rows: TrainingRows | None, predictor: AcceptancePredictor
) -> Selection:
    """Counts drafts by their predicted and their true accepted length. rows: None: no draft."""
    true = np.empty(0, np.int32) if rows is None else rows.accepted_lens
    predicted = np.empty(0, np.float32) if rows is None else rows.predict(predictor).accepted_lens
    is_high, is_selected = true >= PAPER_THRESHOLD, predicted >= PAPER_THRESHOLD
    groups = np.array_split(np.argsort(predicted, kind="stable"), _NUM_BINS)
    return Selection(
        data_set=data_set,
        threshold=PAPER_THRESHOLD,
        num_proposed=len(true),
        num_high=int(is_high.sum()),
        num_selected=int(is_selected.sum()),
        num_both=int((is_high & is_selected).sum()),
        calibration=tuple(
            CalibrationBin(
                num_drafts=len(group),
                predicted=float(predicted[group].mean()),
                accepted=float(true[group].mean()),
            )
            for group in groups
            if len(group)
        ),
    )
