"""`sglang-hvd evaluate`: judges a predictor on recorded generations, next to the predictor that
ships, the paper's predictor and the frequency score."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from sglang_hvd.config import PAPER_THRESHOLD, WORTH_LEN, CacheMode, HvdConfig
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor
from sglang_hvd.payoff.predictor import feature_settings, shipped_predictors
from sglang_hvd.replay.core.model_drafter import ModelDrafter
from sglang_hvd.replay.core.recording_walk import RecordingWalk, fingerprints_of, strides
from sglang_hvd.replay.core.recordings import (
    MEAN,
    NOTHING_DECODED,
    NOTHING_LEFT,
    Recording,
    TraceTokenizer,
    mean_over_families,
    tell_trained_on,
)
from sglang_hvd.replay.core.training_rows import TrainingRows
from sglang_hvd.replay.core.walk import WalkSettings, walk_recordings
from sglang_hvd.replay.training.quality import (
    NUM_BINS,
    Judgement,
    PayoffQuality,
    payoff_quality,
    reliability_curve,
)

NO_DRAFT = "no cycle of the traces had a cache draft: give more or longer traces"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A predictor's quality on the drafts of a file, or its mean over the families (file: "mean").

    at: "cycle": drafts at cycle starts, served with the default predictor and the paper's
        threshold. Only there does a gate act. "position": drafts at every output token, as the
        paper counts.
    """

    file: str
    family: str
    cache_mode: CacheMode
    predictor: str
    at: str
    quality: PayoffQuality

    def row(self) -> dict[str, object]:
        """The row in the JSON file."""
        fields = asdict(self)
        quality: Mapping[str, object] = fields.pop("quality")
        return fields | dict(quality)


def evaluate(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    *,
    config: HvdConfig,
    num_processes: int,
) -> list[Evaluation]:
    """Evaluations for each file, and their means. All predictors are judged on the same drafts.

    Sessions that any of the predictors was trained on only fill the shared cache; a line on stderr
    says so. A file without other sessions is left out.

    config: how the suffix cache drafts, and an additional predictor to judge. If the predictors
        that ship were trained for other settings, they are still judged, but the given predictor
        decides which drafts are verified.

    Raises ValueError, in one line, for traces or a predictor that cannot be used, or if nothing is
    left to judge.
    """
    cache_mode = config.cache_mode
    predictors = shipped_predictors(cache_mode)
    deciding = config
    if config.predictor is not None:
        # Policy payoff accepts predictors of both kinds.
        given = AcceptancePredictor.of_config(config.for_policy("payoff"))
        predictors = {"given": given, **predictors}
        if dict(predictors["default"].settings) == feature_settings(config):
            deciding = config.model_copy(update={"predictor": None})
    trained_on = trained_sessions(predictors)
    tell_trained_on(recordings, trained_on)
    walks: list[RecordingWalk] = []
    evaluations = []
    for at, settings in judging_walks(deciding, without=trained_on).items():
        walks = walk_recordings(
            recordings, tokenizer, settings, label=at, num_processes=num_processes
        )
        evaluations += judge(walks, predictors, cache_mode=cache_mode, at=at)
    if not evaluations:
        raise nothing_to_judge([walk.excluding(trained_on) for walk in walks])
    return evaluations


def nothing_to_judge(walks: Sequence[RecordingWalk]) -> ValueError:
    """The error if no draft was found. walks: of the sessions that are judged."""
    if not fingerprints_of(walks):
        return ValueError(NOTHING_LEFT)
    has_cycles = any(walk.totals().num_cycles for walk in walks)
    return ValueError(NO_DRAFT if has_cycles else NOTHING_DECODED)


def trained_sessions(predictors: Mapping[str, AcceptancePredictor]) -> frozenset[str]:
    """Fingerprints of the sessions that any of the predictors was trained on."""
    return frozenset[str]().union(*(p.trained_sessions for p in predictors.values()))


def judging_walks(config: HvdConfig, *, without: frozenset[str]) -> dict[str, WalkSettings]:
    """Settings of the walks whose drafts are judged, by Evaluation.at.

    config: its predictor decides which drafts are verified at cycle starts.
    without: fingerprints of sessions that are not judged.
    """
    on_policy = config.for_policy("payoff", threshold=PAPER_THRESHOLD, calibrate=False)
    every_position = config.for_policy("model", calibrate=False)
    return {
        "cycle": WalkSettings(on_policy, without=without),
        "position": WalkSettings(every_position, model_drafter=ModelDrafter(0), without=without),
    }


def judge(
    walks: Sequence[RecordingWalk],
    predictors: Mapping[str, AcceptancePredictor],
    *,
    cache_mode: CacheMode,
    at: str,
) -> list[Evaluation]:
    """Judges predictors and the frequency score on the drafts of walks. Drafts are left out if a
    cut text hides whether they were worth their verification.

    A family's figures are computed from the drafts of all its files together, equally thinned
    (WalkSettings.max_rows). The mean is over the families. The mean's calibration error is that of
    the mean reliability curve, which averages each tenth of the drafts over the families.
    """
    rows = {walk: found for walk in walks if (found := walk.judged_rows()) is not None}
    evaluations = []
    for name in (*predictors, "frequency"):
        predictor = predictors.get(name)
        judged = {walk: judged_by(found, predictor) for walk, found in rows.items()}
        for walk, quality in qualities(judged):
            file, family = (MEAN, "") if walk is None else (walk.name, walk.family)
            evaluations.append(Evaluation(file, family, cache_mode, name, at, quality))
    return evaluations


def qualities(
    judged: Mapping[RecordingWalk, Judgement],
) -> list[tuple[RecordingWalk | None, PayoffQuality]]:
    """The quality on each walk, and last the mean over the families, whose walk is None; see
    judge."""
    members: dict[str, list[RecordingWalk]] = {}
    for walk in judged:
        members.setdefault(walk.family, []).append(walk)
    families = {
        family: Judgement.concatenate(
            [judged[walk].every(stride) for walk, stride in zip(walks, strides(walks), strict=True)]
        )
        for family, walks in members.items()
    }
    found: list[tuple[RecordingWalk | None, PayoffQuality]] = [
        (walk, _quality(judgement)) for walk, judgement in judged.items()
    ]
    if families:
        error = _mean_calibration_error([*families.values()])
        mean = _mean({family: _quality(judgement) for family, judgement in families.items()})
        found.append((None, replace(mean, calibration_error=error)))
    return found


def judged_by(rows: TrainingRows, predictor: AcceptancePredictor | None) -> Judgement:
    """A predictor's judgement of drafts. None: the frequency score's."""
    if predictor is None:
        scores = rows.features[:, FEATURE_NAMES.index("score")]
        return Judgement(scores, None, rows.accepted_lens)
    prediction = rows.predict(predictor)
    probs = prediction.prob_accepted(WORTH_LEN)
    return Judgement(prediction.accepted_lens, probs, rows.accepted_lens)


def _quality(judgement: Judgement) -> PayoffQuality:
    return payoff_quality(judgement, threshold=PAPER_THRESHOLD)


def _mean(families: Mapping[str, PayoffQuality]) -> PayoffQuality:
    """The mean of each figure over the families that have it. num_drafts is the sum."""
    figures = {
        name: mean_over_families((of, getattr(quality, name)) for of, quality in families.items())
        for name in PayoffQuality.__dataclass_fields__
    }
    figures["num_drafts"] = sum(quality.num_drafts for quality in families.values())
    return PayoffQuality(**figures)  # type: ignore[arg-type]


def _mean_calibration_error(families: Sequence[Judgement]) -> float | None:
    curves = []
    for judgement in families:
        if judgement.probs is None:
            return None
        curves.append(reliability_curve(judgement.probs, judgement.accepted_lens >= WORTH_LEN))
    # A family with fewer drafts than there are points has no curve.
    curves = [curve for curve in curves if len(curve) == NUM_BINS]
    if not curves:
        return None
    means = np.mean([[point[:2] for point in curve] for curve in curves], axis=0)
    return float(np.abs(means[:, 0] - means[:, 1]).max())
