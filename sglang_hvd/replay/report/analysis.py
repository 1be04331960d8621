"""The figures of an analysis of recorded generations (paper, sections 5.1 to 5.3).

The JSON file of `sglang-hvd analyze` has these fields as its keys. Shares lie in 0..1. Lengths are
in tokens and do not count the bonus token.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sglang_hvd.config import CacheMode
from sglang_hvd.replay.report.importance import Importance
from sglang_hvd.replay.training.evaluate import Evaluation

RECALLS = tuple(step / 20 for step in range(1, 21))  # of PrecisionRecall.at_recall


@dataclass(frozen=True, slots=True)
class About:
    """What was analysed.

    files: files with sessions that were judged.
    num_sessions: sessions that were judged.
    num_trained_sessions: sessions that only filled the shared cache, because a predictor was
        trained on them.
    num_model_accepted: assumed accepted tokens of each cycle that verifies the model drafter's
        draft; the model drafter does not run.
    predictor: name of its file. predictor_fingerprint identifies the content.
    """

    traces: str
    files: tuple[str, ...]
    num_sessions: int
    num_trained_sessions: int
    tokenizer: str
    cache_mode: CacheMode
    policy: str
    threshold: float
    num_model_accepted: int
    predictor: str
    predictor_fingerprint: str


@dataclass(frozen=True, slots=True)
class Structure:
    """Requests of a family, or of one of its files, and how often their drafts can be used.

    file: None for the whole family.
    prompt_tokens_median, prompt_tokens_p90, output_tokens_median: per request.
    repeated_share: share of the prompts' runs of four tokens that occur earlier in the same prompt.
    class_shares: share of the prompts' tokens in each of the paper's token classes.
    copied_shares: share of the output's tokens that equal the first token of the cache draft at
        their place, by the draft's origin: "prompt", "output" (the request's own) or "finished"
        (requests). In the paper's cache mode "own" stands for the first two.
    copied_run_share: share of the places where the next six tokens of the cache draft are right.
    proposed_share: share of the cycles that had a cache draft.
    cache_share: share of the cycles that verified a cache draft.
    """

    family: str
    file: str | None
    num_requests: int
    prompt_tokens_median: float | None
    prompt_tokens_p90: float | None
    output_tokens_median: float
    repeated_share: float | None
    class_shares: Mapping[str, float | None]
    copied_shares: Mapping[str, float]
    copied_run_share: float
    proposed_share: float
    cache_share: float

    @property
    def copied_share(self) -> float:
        return sum(self.copied_shares.values())


@dataclass(frozen=True, slots=True)
class Payoffs:
    """Accepted lengths of a family's cache drafts.

    mean_accepted: mean accepted length.
    survival: shares of the drafts with at least 1, 2, ... 31 accepted tokens.
    oracle_share: share of the drafts that reach the threshold of six tokens.
    verified_*: figures of the drafts that the payoff policy verified: their mean, and the shares
        with 0 to 2, 3 to 5, and at least 6 accepted tokens. None if it verified none.

    Where texts were cut, the means and survival are Kaplan and Meier's estimates, up to the longest
    length that was seen.
    """

    family: str
    num_drafts: int
    mean_accepted: float
    oracle_share: float
    survival: tuple[float, ...]
    num_verified: int
    verified_mean_accepted: float | None
    verified_low_share: float | None
    verified_marginal_share: float | None
    verified_high_share: float | None


@dataclass(frozen=True, slots=True)
class PrecisionRecall:
    """Precision over recall on the drafts of all families together.

    at_recall: the highest precision at a recall of at least .05, .1, ... 1.
    precision, recall: of the predictor's decisions.
    """

    predictor: str
    average_precision: float
    precision: float | None
    recall: float | None
    at_recall: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Drafts with a prediction p in low <= p < high, where None stands for no limit.

    predicted: mean prediction.
    real: share of the drafts that reach the threshold, or mean accepted length.
    """

    low: float | None
    high: float | None
    predicted: float
    real: float
    num_drafts: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted and real values on the drafts of all families together.

    of: "probability" that at least six tokens are accepted, or accepted "length" in tokens. The
        probability of the frequency score is the suffix cache's own estimate for the sixth token.
    """

    predictor: str
    of: str
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """All figures of an analysis.

    quality: at each cycle of the payoff policy (at: "cycle") and at each token of the outputs
        ("position"), for each family (as file) and on average over families. All other figures are
        taken at cycles.
    curves: empty if no draft reaches the threshold.
    importance: None if no sampled draft reaches the threshold.
    """

    about: About
    structure: tuple[Structure, ...]
    payoffs: tuple[Payoffs, ...]
    quality: tuple[Evaluation, ...]
    curves: tuple[PrecisionRecall, ...]
    calibration: tuple[Calibration, ...]
    importance: Importance | None

    def as_json(self) -> dict[str, object]:
        """The figures for json.dumps. The keys are the fields of these classes."""
        return asdict(self) | {"quality": [row.row() for row in self.quality]}

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.family for row in self.structure))
