"""Small walks: made up, with figures that can be worked out by hand, or of small recordings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sglang_hvd.payoff import FEATURE_NAMES, POSITION_FEATURES
from sglang_hvd.replay.core.recording_walk import RecordingWalk, SessionWalk
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings
from sglang_hvd.replay.core.totals import CycleTotals
from sglang_hvd.replay.core.training_rows import TrainingRows
from sglang_hvd.replay.core.walk import WalkSettings, walk_recordings
from sglang_hvd.replay.report.analysis import About, Analysis
from sglang_hvd.replay.report.analyze import analyze_walks
from sglang_hvd.replay.report.prompts import PromptCounts
from tests.payoff.made_up import linear

ABOUT = About(
    traces="recorded",
    files=("one", "two"),
    num_sessions=2,
    num_trained_sessions=1,
    tokenizer="0123456789abcdef",
    cache_mode="votes",
    policy="payoff",
    threshold=6.0,
    num_model_accepted=2,
    predictor="made_up.safetensors",
    predictor_fingerprint="fedcba9876543210",
)


def rows(
    accepted: Sequence[int], verified: Sequence[bool] | None = None, **features: Sequence[float]
) -> TrainingRows:
    """Drafts of 31 tokens; features that are not given are 0."""
    num = len(accepted)
    values = np.zeros((num, len(FEATURE_NAMES)), np.float32)
    for name, column in features.items():
        values[:, FEATURE_NAMES.index(name)] = column
    return TrainingRows(
        features=values,
        positions=np.zeros((num, 31, len(POSITION_FEATURES)), np.float32),
        draft_lens=np.full(num, 31, np.int32),
        accepted_lens=np.array(accepted, np.int32),
        is_verified=np.array([False] * num if verified is None else verified),
        is_worth_known=np.ones(num, np.bool_),
    )


def walk(
    family: str,
    of_session: TrainingRows | None,
    *,
    num_cycles: int,
    name: str = "",
    num_cache: int,
    thinning: int = 1,
) -> RecordingWalk:
    """A recording of one session; every cycle commits one token. thinning: see RecordingWalk."""
    totals = CycleTotals(num_cycles=num_cycles, num_tokens=num_cycles, num_cache=num_cache)
    num_drafts = 0 if of_session is None else thinning * len(of_session)
    session = SessionWalk(f"session of {name or family}", totals, of_session, num_drafts)
    return RecordingWalk(name or family, family, (session,), thinning)


def counts(prompt_lens: Sequence[int], num_repeated: Sequence[int]) -> PromptCounts:
    """Every second token of each prompt is a delimiter; outputs have ten tokens."""
    by_class = np.zeros((len(prompt_lens), 5), np.int64)
    by_class[:, 4] = np.array(prompt_lens) // 2
    return PromptCounts(
        np.array(prompt_lens, np.int64),
        np.array(num_repeated, np.int64),
        by_class,
        np.full(len(prompt_lens), 10, np.int64),
    )


def small_analysis(families: tuple[str, str] = ("code", "chat")) -> Analysis:
    """Two families of a file each. The predictor reads the score, the mlp the match's length."""
    accepted = ([7, 8, 2, 0], [6, 1, 0, 3])
    features = (
        {"score": [9, 7, 3, 1], "match_len": [2, 9, 7, 1], "in_prompt": [1, 1, 1, 0]},
        {"score": [5, 2, 1, 7], "match_len": [1, 1, 1, 1], "in_output": [1, 0, 0, 1]},
    )
    cycles, positions = [], []
    for family, lens, columns in zip(families, accepted, features, strict=True):
        verified = [value >= 6 for value in columns["score"]]
        drafts = rows(lens, verified, **columns)
        name = f"{family} file"
        cycles.append(walk(family, drafts, num_cycles=10, num_cache=sum(verified), name=name))
        positions.append(walk(family, drafts, num_cycles=20, num_cache=0, name=name))
    return analyze_walks(
        ABOUT,
        cycles,
        positions,
        [counts([8, 20], [1, 11]), counts([5], [0])],
        {"predictor": linear({"score": 1}), "mlp": linear({"match_len": 1})},
    )


def walked(
    traces: Path, tokenizer: Path, settings: WalkSettings, *, num_processes: int = 1
) -> list[RecordingWalk]:
    return walk_recordings(
        find_recordings(traces),
        TraceTokenizer(tokenizer, "<|im_end|>"),
        settings,
        label="test",
        num_processes=num_processes,
    )
