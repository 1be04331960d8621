"""`sglang-hvd train`: learns a predictor from recorded generations.

The features of a draft depend on what was verified before it, so training goes in rounds. The
first walks decode with the model drafter alone, token by token, and with the cache alone; then a
predictor trained on these decides, and the cycles its decisions lead to are learned from too
(docs/payoff.md says what that is worth).
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig, Policy
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.payoff.predictor import Kind, feature_settings
from sglang_hvd.payoff.training import TrainingSettings, train
from sglang_hvd.payoff.training_rows import Lessons
from sglang_hvd.replay.evaluate import NO_DRAFT, judge, judging_walks
from sglang_hvd.replay.model_drafter import ModelDrafter
from sglang_hvd.replay.recordings import Recording
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.replay.walk import (
    RecordingWalk,
    WalkSettings,
    fingerprints_of,
    walk_recordings,
)

# Longest cache drafts in training, in turns: what is verified of a draft depends on the server's
# verify width. Most drafts have the default's.
_DRAFT_LIMITS = (31, 31, 7, 31, 31, 15, 31, 31, 63)

# Who decodes in the first round, and how many tokens the model drafter has accepted in each cycle.
# With none accepted every token begins a cycle, also in the middle of a copy (see token_stride).
_FIRST_ROUND: tuple[tuple[Policy, ModelDrafter], ...] = (
    ("model", ModelDrafter()),
    ("model", ModelDrafter(0)),
    ("cache", ModelDrafter()),
)

# Thresholds of the payoff policy in the later rounds: the server's default and the paper's.
_THRESHOLDS = (None, PAPER_THRESHOLD)

# Weight of the rows of other tokenizers than the first, with which a predictor is judged
# (docs/payoff.md, "What each idea brought").
_OTHERS = 0.4

# A recording's rows count with its number of rows to this power, so that the longest do not drown
# the others; 1 would count every row the same.
_POWER_OF_SIZE = 0.7


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a training does.

    config: how the suffix cache drafts.
    held_out: share of each recording's sessions, the last ones, that is not trained on and on which
        the predictor is judged. One session of a recording with several is always held out.
    token_stride: where every token begins a cycle, one cycle in this many is learned from.
    max_rows: that are learned from, of all walks; each walk gives no more (WalkSettings.max_rows).
    """

    config: HvdConfig
    held_out: float = 0.25
    num_rounds: int = 2
    token_stride: int = 3
    max_rows: int = 1_000_000
    seed: int = 42
    num_processes: int = 2


def train_predictors(
    recordings: Sequence[Recording],
    tokenizers: Sequence[TraceTokenizer],
    plan: TrainPlan,
    kinds: Sequence[Kind],
) -> Mapping[Kind, AcceptancePredictor]:
    """Predictors of one kind, or of several from the same cycles, to compare: with their quality on
    the held-out sessions in their provenance. The first kind decides in the later rounds.

    tokenizers: the recordings are learned from as each of these reads them, and must be texts if
        there are several; the predictors are judged with the first.

    Raises ValueError, in one line, if the recordings cannot be used or hold nothing to learn from.
    """
    first: list[Lessons] = []
    held_out = fingerprints = frozenset[str]()
    for tokenizer in tokenizers:
        lessons = []
        for walks in first_round(recordings, tokenizer, plan):
            if not fingerprints:
                held_out = held_out_sessions(walks, plan.held_out)
                fingerprints = fingerprints_of(walks)
            assert fingerprints_of(walks) == fingerprints, "sessions are known by their text"
            lessons += _weighed(walks, without=held_out)
            del walks  # whole drafts take four times the memory of lessons
        first.append(_all_of(lessons))
    parts = first
    predictor = _fit(parts, plan, kinds[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deciding.safetensors"
        for _ in range(1, plan.num_rounds):
            predictor.save(path)
            parts = []
            for tokenizer, before in zip(tokenizers, first, strict=True):
                lessons = [before]
                for walks in later_round(recordings, tokenizer, plan, path, without=held_out):
                    lessons += _weighed(walks, without=held_out)
                    del walks
                parts.append(_all_of(lessons))
            predictor = _fit(parts, plan, kinds[0])
        predictor.save(path)
        judged = walk_recordings(
            recordings,
            tokenizers[0],
            judging_walks(
                plan.config.model_copy(update={"predictor": path}),
                without=fingerprints - held_out,
            )["cycle"],
            label="replay of held-out sessions",
            num_processes=plan.num_processes,
        )
    provenance = _provenance(recordings, tokenizers, plan, fingerprints, held_out)
    trained: dict[Kind, AcceptancePredictor] = {}
    for kind in kinds:
        of_kind = predictor if kind == kinds[0] else _fit(parts, plan, kind)
        evaluations = judge(
            judged,
            {kind: of_kind},
            cache_mode=plan.config.cache_mode,
            at="cycle",
        )
        heldout = [e.row() for e in evaluations if e.predictor == kind]
        trained[kind] = replace(
            of_kind, provenance={**provenance, **of_kind.provenance, "heldout": heldout}
        )
    return trained


def first_round(
    recordings: Sequence[Recording], tokenizer: TraceTokenizer, plan: TrainPlan
) -> Iterator[list[RecordingWalk]]:
    """The walks of all recordings that no predictor decides, by who does."""
    for policy, model_drafter in _FIRST_ROUND:
        yield walk_recordings(
            recordings,
            tokenizer,
            WalkSettings(
                plan.config.for_policy(policy, calibrate=False),
                model_drafter=model_drafter,
                draft_limits=_DRAFT_LIMITS,
                row_stride=1 if model_drafter.mean_accepted else plan.token_stride,
                max_rows=plan.max_rows,
            ),
            label=f"replay, policy {policy}",
            num_processes=plan.num_processes,
        )


def later_round(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    plan: TrainPlan,
    deciding: Path,
    *,
    without: frozenset[str],
) -> Iterator[list[RecordingWalk]]:
    """The walks of all recordings that a predictor decides, by threshold.

    deciding: its file.
    without: fingerprints of sessions that give no rows.
    """
    for threshold in _THRESHOLDS:
        yield walk_recordings(
            recordings,
            tokenizer,
            WalkSettings(
                plan.config.for_policy(
                    "payoff", threshold=threshold, predictor=deciding, calibrate=False
                ),
                draft_limits=_DRAFT_LIMITS,
                without=without,
                max_rows=plan.max_rows,
            ),
            label="replay, policy payoff",
            num_processes=plan.num_processes,
        )


def held_out_sessions(walks: Sequence[RecordingWalk], share: float) -> frozenset[str]:
    """Fingerprints of the last sessions of each recording: that share of the sessions, and at least
    one where there are several; none for a share of 0."""
    held_out: set[str] = set()
    for walk in walks:
        sessions = [session.fingerprint for session in walk.sessions]
        num = max(1, int(len(sessions) * share)) if share > 0 and len(sessions) > 1 else 0
        held_out.update(sessions[len(sessions) - num :])
    return frozenset(held_out)


def lessons_of(walks: Sequence[RecordingWalk], *, without: frozenset[str]) -> Lessons:
    """The lessons of walks. The rows of a walk together count as a power of their number; the mean
    weight is 1.

    without: fingerprints of sessions that are not learned from.

    Raises ValueError if no cycle had a cache draft.
    """
    return _normalised(_all_of(_weighed(walks, without=without)))


def _weighed(walks: Sequence[RecordingWalk], *, without: frozenset[str]) -> list[Lessons]:
    parts = []
    for walk in walks:
        rows = walk.excluding(without).rows()
        if rows is not None:
            weight = (len(rows) * walk.thinning) ** (_POWER_OF_SIZE - 1)
            parts.append(Lessons.of(rows).weighted(weight * walk.thinning))
    return parts


def _all_of(parts: Sequence[Lessons]) -> Lessons:
    if not parts:
        raise ValueError(NO_DRAFT)
    return Lessons.concatenate(parts)


def _together(parts: Sequence[Lessons]) -> Lessons:
    """All lessons. parts: by tokenizer, the one that counts most first."""
    first, *others = map(_normalised, parts)
    if not others:
        return first
    return Lessons.concatenate([first, *(of_one.weighted(_OTHERS) for of_one in others)])


def _normalised(lessons: Lessons) -> Lessons:
    return lessons.weighted(1 / float(lessons.weights.mean()))


def _fit(parts: Sequence[Lessons], plan: TrainPlan, kind: Kind) -> AcceptancePredictor:
    """Trains a predictor. parts: lessons by tokenizer; the paper's predictor learns from the first
    alone, with equal weights."""
    if kind == "mlp":
        lessons = parts[0].sample(plan.max_rows, plan.seed).unweighted()
        settings = TrainingSettings.of_paper(len(lessons))
    else:
        lessons = _together(parts).sample(plan.max_rows, plan.seed)
        settings = TrainingSettings()
    settings = replace(settings, seed=plan.seed)
    return train(
        lessons,
        kind=kind,
        settings=settings,
        feature_settings=feature_settings(plan.config),
        provenance={"num_rows": len(lessons), "training": asdict(settings)},
    )


def _provenance(
    recordings: Sequence[Recording],
    tokenizers: Sequence[TraceTokenizer],
    plan: TrainPlan,
    fingerprints: frozenset[str],
    held_out: frozenset[str],
) -> dict[str, object]:
    return {
        "recordings": [
            {
                "name": recording.name,
                "repository": f"github.com/{recording.source.repository}",
                "licence": recording.licence,
            }
            if recording.source is not None
            else {"name": recording.name}
            for recording in recordings
        ],
        "trained_sessions": sorted(fingerprints - held_out),
        "num_heldout_sessions": len(held_out),
        "first_round": [
            {"policy": policy, "num_model_accepted": model_drafter.mean_accepted}
            for policy, model_drafter in _FIRST_ROUND
        ],
        "num_model_accepted": ModelDrafter().mean_accepted,
        "token_stride": plan.token_stride,
        "power_of_size": _POWER_OF_SIZE,
        "weight_of_other_tokenizers": _OTHERS,
        "draft_limits": list(_DRAFT_LIMITS),
        "num_rounds": plan.num_rounds,
        "tokenizers": [tokenizer.fingerprint for tokenizer in tokenizers],
    }
