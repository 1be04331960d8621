"""`sglang-hvd train`: trains a predictor on recorded generations.

The features of a draft depend on what was verified before it, so training goes in rounds. In the
first round the recordings are decoded with the model drafter alone, token by token, and with the
cache alone. In later rounds the predictor trained so far decides, and the next one learns from
these cycles too (docs/experiments/predictor-ideas.md has the gain).
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig, Policy
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.payoff.predictor import Kind, feature_settings
from sglang_hvd.replay.core.model_drafter import ModelDrafter
from sglang_hvd.replay.core.recording_walk import RecordingWalk, fingerprints_of
from sglang_hvd.replay.core.recordings import Recording, TraceTokenizer
from sglang_hvd.replay.core.training_rows import Lessons
from sglang_hvd.replay.core.walk import WalkSettings, walk_recordings
from sglang_hvd.replay.training.evaluate import NO_DRAFT, judge, judging_walks
from sglang_hvd.replay.training.fit import TrainingSettings, train

# Longest cache drafts in training; traces take turns. The server's verify width limits how much of
# a draft is verified, and most servers have the default width.
_DRAFT_LIMITS = (31, 31, 7, 31, 31, 15, 31, 31, 63)

# The first round's walks: the policy, and the tokens that the model drafter has accepted in each
# cycle. With 0 every token begins a cycle, also in the middle of a copy (see token_stride).
_FIRST_ROUND: tuple[tuple[Policy, ModelDrafter], ...] = (
    ("model", ModelDrafter()),
    ("model", ModelDrafter(0)),
    ("cache", ModelDrafter()),
)

# Thresholds of the payoff policy in later rounds: the server's default and the paper's.
_THRESHOLDS = (None, PAPER_THRESHOLD)

# With fewer updates the paper's network has not converged (docs/experiments/predictor-ideas.md has
# its quality by batch size).
_MIN_UPDATES = 1000

# Weight of rows of all tokenizers but the first. Predictors are judged with the first
# (docs/experiments/predictor-ideas.md, "How training became what it is").
_OTHERS = 0.4

# All rows of a recording together have the weight num_rows ** _POWER_OF_SIZE, so that the longest
# recordings do not outweigh the others. With 1 every row would count the same.
_POWER_OF_SIZE = 0.7


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Settings of a training.

    config: how the suffix cache drafts.
    held_out: share of each recording's sessions, the last ones, that are held out to judge the
        predictor on. Of a recording with several sessions at least one is held out.
    token_stride: in walks where every token begins a cycle, one cycle in this many gives a row.
    draft_limits: longest cache drafts, as in WalkSettings.
    batch_size, num_epochs: of every kind's training; None: that of the kind.
    max_rows: limit on the rows to learn from, and on each walk's rows (WalkSettings.max_rows).
    """

    config: HvdConfig
    held_out: float = 0.25
    num_rounds: int = 2
    token_stride: int = 3
    draft_limits: tuple[int, ...] = _DRAFT_LIMITS
    batch_size: int | None = None
    num_epochs: int | None = None
    max_rows: int = 1_000_000
    seed: int = 42
    num_processes: int = 2

    def as_paper(self) -> "TrainPlan":
        """Learns as appendix B does: from whole drafts, at every output token.

        The walks that the plan has in addition show the features of recent cache drafts.
        """
        return replace(self, token_stride=1, draft_limits=(self.config.max_draft_tokens,))


def few_updates(predictor: AcceptancePredictor) -> str | None:
    """What to say if a predictor's training had fewer updates than Adam needs; None if enough."""
    settings, num_rows = predictor.provenance["training"], predictor.provenance["num_rows"]
    assert isinstance(settings, dict), "train_predictors writes its settings"
    assert isinstance(num_rows, int), "train_predictors counts its rows"
    trained = TrainingSettings(**settings)
    num_batches = -(-num_rows // trained.batch_size)
    num_updates = trained.num_epochs(num_rows) * num_batches
    if num_updates >= _MIN_UPDATES:
        return None
    return (
        f"{num_rows} rows gave {num_updates} updates with a batch size of {trained.batch_size}, "
        f"and Adam needs {_MIN_UPDATES} or more: lower --batch-size or leave it out, or give more "
        "traces"
    )


def train_predictors(
    recordings: Sequence[Recording],
    tokenizers: Sequence[TraceTokenizer],
    plan: TrainPlan,
    kinds: Sequence[Kind],
) -> Mapping[Kind, AcceptancePredictor]:
    """Trains a predictor of each kind on the same cycles. The first kind decides in later rounds.

    A predictor's provenance has its quality on the held-out sessions.

    tokenizers: the predictors learn from the recordings as read with each of these. If there are
        several, recordings must be texts. The predictors are judged with the first.

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
            assert fingerprints_of(walks) == fingerprints, (
                "a session's fingerprint must not depend on the tokenizer"
            )
            lessons += _weighed(walks, without=held_out)
            del walks  # they need four times the memory of lessons
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
    """The walks of the first round: for each policy, those of all recordings."""
    for policy, model_drafter in _FIRST_ROUND:
        yield walk_recordings(
            recordings,
            tokenizer,
            WalkSettings(
                plan.config.for_policy(policy, calibrate=False),
                model_drafter=model_drafter,
                draft_limits=plan.draft_limits,
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
    """The walks of a later round: for each threshold, those of all recordings.

    deciding: file of the predictor that decides.
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
                draft_limits=plan.draft_limits,
                without=without,
                max_rows=plan.max_rows,
            ),
            label="replay, policy payoff",
            num_processes=plan.num_processes,
        )


def held_out_sessions(walks: Sequence[RecordingWalk], share: float) -> frozenset[str]:
    """Fingerprints of each recording's last sessions, by share of its sessions. Of several sessions
    at least one is held out, unless the share is 0."""
    held_out: set[str] = set()
    for walk in walks:
        sessions = [session.fingerprint for session in walk.sessions]
        num = max(1, int(len(sessions) * share)) if share > 0 and len(sessions) > 1 else 0
        held_out.update(sessions[len(sessions) - num :])
    return frozenset(held_out)


def lessons_of(walks: Sequence[RecordingWalk], *, without: frozenset[str]) -> Lessons:
    """The lessons of walks. See _POWER_OF_SIZE for their weights, whose mean is 1.

    without: fingerprints of sessions that give no lessons.

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
    """All lessons. parts: lessons by tokenizer, those of the first tokenizer first."""
    first, *others = map(_normalised, parts)
    if not others:
        return first
    return Lessons.concatenate([first, *(of_one.weighted(_OTHERS) for of_one in others)])


def _normalised(lessons: Lessons) -> Lessons:
    return lessons.weighted(1 / float(lessons.weights.mean()))


def _fit(parts: Sequence[Lessons], plan: TrainPlan, kind: Kind) -> AcceptancePredictor:
    """Trains a predictor. parts: lessons by tokenizer. The paper's predictor learns from those of
    the first tokenizer only, with equal weights."""
    if kind == "mlp":
        lessons = parts[0].sample(plan.max_rows, plan.seed).unweighted()
        settings = TrainingSettings.of_paper(len(lessons))
    else:
        lessons = _together(parts).sample(plan.max_rows, plan.seed)
        settings = TrainingSettings()
    settings = replace(settings, seed=plan.seed)
    if plan.batch_size is not None:
        settings = replace(settings, batch_size=plan.batch_size)
    if plan.num_epochs is not None:
        settings = replace(settings, min_epochs=plan.num_epochs, max_epochs=plan.num_epochs)
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
        "draft_limits": list(plan.draft_limits),
        "num_rounds": plan.num_rounds,
        "tokenizers": [tokenizer.fingerprint for tokenizer in tokenizers],
    }
