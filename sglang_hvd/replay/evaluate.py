"""`sglang-hvd evaluate`: judges a predictor on recorded generations, beside the one that ships, the
paper's and the frequency score."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from sglang_hvd.config import PAPER_THRESHOLD, WORTH_LEN, CacheMode, HvdConfig
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor
from sglang_hvd.payoff.predictor import feature_settings, shipped_predictors
from sglang_hvd.payoff.training_rows import TrainingRows
from sglang_hvd.replay.metrics import (
    NUM_BINS,
    Judgement,
    PayoffQuality,
    mean_over_families,
    payoff_quality,
    reliability_curve,
)
from sglang_hvd.replay.model_drafter import ModelDrafter
from sglang_hvd.replay.recordings import MEAN, Recording
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.replay.trained_on import NOTHING_DECODED, NOTHING_LEFT, tell_trained_on
from sglang_hvd.replay.walk import (
    RecordingWalk,
    WalkSettings,
    fingerprints_of,
    strides,
    walk_recordings,
)

NO_DRAFT = "no cycle of the traces had a cache draft: give more or longer traces"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A predictor on the drafts of a file, or its mean over the families (file: "mean").

    at: "cycle": at the starts of the cycles of serving with the default predictor and the paper's
        threshold, the only places where a gate acts. "position": at every token of the outputs, as
        the paper counts.
    """

    file: str
    family: str
    cache_mode: CacheMode
    predictor: str
    at: str
    quality: PayoffQuality

    def row(self) -> dict[str, object]:
        """The row of the JSON file."""
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
    """Rows per file and in the mean. All predictors are judged on the same drafts.

    Sessions that one of the predictors was trained on fill the shared cache and are not judged,
    which is said on stderr. A file without other sessions is left out.

    config: how the suffix cache drafts, and a predictor to judge too. If the predictors that ship
        were trained for other settings, they are judged all the same, and the given one decides
        what is verified.

    Raises ValueError, in one line, for traces or a predictor that cannot be used, or if nothing is
    left to judge.
    """
    cache_mode = config.cache_mode
    predictors = shipped_predictors(cache_mode)
    deciding = config
    if config.predictor is not None:
        # Policy payoff takes predictors of both kinds.
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
    """What is said of walks of the sessions that are judged, if none had a draft."""
    if not fingerprints_of(walks):
        return ValueError(NOTHING_LEFT)
    has_cycles = any(walk.totals().num_cycles for walk in walks)
    return ValueError(NO_DRAFT if has_cycles else NOTHING_DECODED)


def trained_sessions(predictors: Mapping[str, AcceptancePredictor]) -> frozenset[str]:
    """Fingerprints of the sessions that any of the predictors was trained on."""
    return frozenset[str]().union(*(p.trained_sessions for p in predictors.values()))


def judging_walks(config: HvdConfig, *, without: frozenset[str]) -> dict[str, WalkSettings]:
    """The walks whose drafts predictors are judged on, by where these stand (see Evaluation).

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
    """Judges predictors, and the frequency score, on the drafts of walks, but for those of which a
    cut text does not tell whether they were worth their verification.

    A family's figures are those of all its files' drafts together, where files of which a part of
    the drafts was kept (WalkSettings.max_rows) count like others. The mean is over families.
    The mean's calibration error is that of the mean reliability curve: predicted and real share of
    each tenth of the drafts, averaged over families.
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
    """The figures of each walk, and last their mean over the families, with None for a walk; see
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
    """What a predictor says of the drafts; None: what the frequency score says."""
    if predictor is None:
        scores = rows.features[:, FEATURE_NAMES.index("score")]
        return Judgement(scores, None, rows.accepted_lens)
    prediction = rows.predict(predictor)
    return Judgement(
        prediction.accepted_lens, prediction.prob_accepted(WORTH_LEN), rows.accepted_lens
    )


def _quality(judgement: Judgement) -> PayoffQuality:
    return payoff_quality(judgement, threshold=PAPER_THRESHOLD)


def _mean(families: Mapping[str, PayoffQuality]) -> PayoffQuality:
    """The mean of each figure over the families that have it; num_drafts is the sum."""
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
