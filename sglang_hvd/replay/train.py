"""`sglang-hvd train`: learns a predictor from recorded generations.

The features of a draft depend on what was verified before it, so training goes in rounds. The
first walks decode with the model drafter alone and with the cache alone; then a predictor trained
on these decides, and the cycles its decisions lead to are learned from too (docs/payoff.md says
what that is worth).
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, PAPER_THRESHOLD, HvdConfig, Policy
from sglang_hvd.payoff import PayoffPredictor
from sglang_hvd.payoff.predictor import Kind, feature_settings
from sglang_hvd.payoff.rows import TrainingRows
from sglang_hvd.payoff.training import TrainingSettings, train
from sglang_hvd.replay.evaluate import judge, judging_walks
from sglang_hvd.replay.model_drafter import ModelDrafter
from sglang_hvd.replay.recordings import Recording, Vocabulary
from sglang_hvd.replay.walk import RecordingWalk, WalkSettings, walk_recordings

# Longest cache drafts in training, in turns: what is verified of a draft depends on the server's
# verify width. Most drafts have the default's.
DRAFT_LIMITS = (31, 31, 7, 31, 31, 15, 31, 31, 63)

_FIRST_ROUND: tuple[Policy, ...] = ("model", "cache")

# Of the payoff policy in the later rounds: the server's own, and the paper's.
_THRESHOLDS = (None, PAPER_THRESHOLD)

# A recording's rows count with its number of rows to this power, so that the longest do not drown
# the others; 1 would count every row the same.
_POWER_OF_SIZE = 0.5


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a training does.

    config: how the suffix cache drafts.
    held_out: share of each recording's sessions, the last ones, that is not trained on and on which
        the predictor is judged. One session of a recording with several is always held out.
    """

    config: HvdConfig
    kind: Kind = "survival"
    held_out: float = 0.25
    num_rounds: int = 2
    max_rows: int = 1_000_000
    seed: int = 42
    num_processes: int = 2


def train_predictor(
    recordings: Sequence[Recording], vocabulary: Vocabulary, plan: TrainPlan
) -> PayoffPredictor:
    """The predictor, with its quality on the held-out sessions in its provenance.

    Raises ValueError, in one line, if the recordings cannot be used or hold nothing to learn from.
    """
    return train_predictors(recordings, vocabulary, plan, [plan.kind])[plan.kind]


def train_predictors(
    recordings: Sequence[Recording], vocabulary: Vocabulary, plan: TrainPlan, kinds: Sequence[Kind]
) -> Mapping[Kind, PayoffPredictor]:
    """Several kinds from the same cycles, to compare. The first decides in the later rounds."""
    first_round = [
        walk for policy in _FIRST_ROUND for walk in _walk(recordings, vocabulary, plan, policy)
    ]
    held_out = held_out_sessions(first_round, plan.held_out)
    rows = weighted_rows(first_round, without=held_out)
    predictor = _fit(rows, plan, kinds[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deciding.safetensors"
        for _ in range(1, plan.num_rounds):
            predictor.save(path)
            on_policy = [
                walk
                for threshold in _THRESHOLDS
                for walk in _walk(recordings, vocabulary, plan, "payoff", path, threshold)
            ]
            rows = weighted_rows([*first_round, *on_policy], without=held_out)
            predictor = _fit(rows, plan, kinds[0])
        predictor.save(path)
        judged = walk_recordings(
            recordings,
            vocabulary,
            judging_walks(plan.config, path)["cycle"],
            label="replay of held-out sessions",
            num_processes=plan.num_processes,
        )
    provenance = _provenance(recordings, vocabulary, plan, first_round, held_out)
    trained: dict[Kind, PayoffPredictor] = {}
    for kind in kinds:
        of_kind = predictor if kind == kinds[0] else _fit(rows, plan, kind)
        evaluations = judge(
            judged,
            {kind: of_kind},
            cache_mode=plan.config.cache_mode,
            at="cycle",
            without=frozenset(_fingerprints(first_round)) - held_out,
        )
        heldout = [e.row() for e in evaluations if e.predictor == kind]
        trained[kind] = replace(
            of_kind, provenance={**provenance, **of_kind.provenance, "heldout": heldout}
        )
    return trained


def held_out_sessions(walks: Sequence[RecordingWalk], share: float) -> frozenset[str]:
    """Fingerprints of the last sessions of each recording: that share of them, at least one of
    several. None for a share of 0."""
    held_out: set[str] = set()
    for walk in walks:
        sessions = [session.fingerprint for session in walk.sessions]
        num = max(1, int(len(sessions) * share)) if share > 0 and len(sessions) > 1 else 0
        held_out.update(sessions[len(sessions) - num :])
    return frozenset(held_out)


def _walk(
    recordings: Sequence[Recording],
    vocabulary: Vocabulary,
    plan: TrainPlan,
    policy: Policy,
    predictor: Path | None = None,
    threshold: float | None = None,
) -> list[RecordingWalk]:
    return walk_recordings(
        recordings,
        vocabulary,
        WalkSettings(
            plan.config.model_copy(
                update={"policy": policy, "threshold": threshold, "calibrate": False}
            ),
            predictor=predictor,
            draft_limits=DRAFT_LIMITS,
        ),
        label=f"replay, policy {policy}",
        num_processes=plan.num_processes,
    )


def weighted_rows(walks: Sequence[RecordingWalk], *, without: frozenset[str]) -> TrainingRows:
    """All rows to learn from. Each walk's together count as a power of their number; the mean
    weight is 1.

    without: fingerprints of sessions that are not learned from.

    Raises ValueError if there are none.
    """
    parts = []
    for walk in walks:
        rows = walk.rows(without=without)
        if rows is not None:
            weight = len(rows) ** (_POWER_OF_SIZE - 1)
            parts.append(replace(rows, weights=np.full(len(rows), weight, np.float32)))
    if not parts:
        raise ValueError("no cycle of the traces had a cache draft: nothing to learn from")
    rows = TrainingRows.concatenate(parts)
    assert rows.weights is not None
    return replace(rows, weights=rows.weights / rows.weights.mean())


def _fit(rows: TrainingRows, plan: TrainPlan, kind: Kind) -> PayoffPredictor:
    rows = rows.sample(plan.max_rows, plan.seed)
    if kind == "mlp":  # the paper's counts every row the same
        rows = replace(rows, weights=None)
        settings = TrainingSettings.of_paper(len(rows))
    else:
        settings = TrainingSettings()
    settings = replace(settings, seed=plan.seed)
    return train(
        rows,
        kind=kind,
        settings=settings,
        feature_settings=feature_settings(plan.config),
        provenance={"num_rows": len(rows), "training": asdict(settings)},
    )


def _provenance(
    recordings: Sequence[Recording],
    vocabulary: Vocabulary,
    plan: TrainPlan,
    walks: Sequence[RecordingWalk],
    held_out: frozenset[str],
) -> dict[str, object]:
    return {
        "recordings": [
            {
                "name": recording.name,
                "repository": f"github.com/{recording.source.source_repo}",
                "licence": recording.licence,
            }
            if recording.source is not None
            else {"name": recording.name}
            for recording in recordings
        ],
        "trained_sessions": sorted(_fingerprints(walks) - held_out),
        "num_heldout_sessions": len(held_out),
        "num_model_accepted": ModelDrafter().mean_accepted,
        "verify_width": DEFAULT_VERIFY_WIDTH,
        "num_rounds": plan.num_rounds,
        "tokenizer": vocabulary.fingerprint,
    }


def _fingerprints(walks: Sequence[RecordingWalk]) -> set[str]:
    return {session.fingerprint for walk in walks for session in walk.sessions}
