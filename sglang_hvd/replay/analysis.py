"""What an analysis of recorded generations found: the figures of the paper's sections 5.1 to 5.3.

The JSON file of `sglang-hvd analyze` has these fields as its keys. Shares lie in 0..1; lengths are
in tokens, the bonus token not counted.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sglang_hvd.config import CacheMode
from sglang_hvd.replay.importance import Importance
from sglang_hvd.replay.training.evaluate import Evaluation

MARGINAL_LEN = 3  # from here to WORTH_LEN a verified draft did not pay, but nearly
RECALLS = tuple(step / 20 for step in range(1, 21))  # of PrecisionRecall.at_recall


@dataclass(frozen=True, slots=True)
class About:
    """What was analysed.

    predictor: its file's name; predictor_fingerprint names its content.
    files: those with sessions that were judged, num_sessions of them. The num_trained_sessions
        others, which a predictor was trained on, only filled the shared cache.
    num_model_accepted: accepted tokens of each cycle that verifies the model drafter's draft, which
        is not run.
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
    """Requests of a family, or of one of its files, and what the payoff policy makes of them.

    file: None for the whole family.
    prompt_tokens_median, prompt_tokens_p90, output_tokens_median: per request.
    repeated_share: share of the prompts' runs of four tokens that came before in the same prompt.
    class_shares: share of the prompts' tokens in each of the paper's token classes.
    copied_shares: share of the output's tokens that are the first of the cache draft at their
        place, by where the draft is from: "prompt", "output" (the request's own) or "finished"
        (requests); "own" stands for the first two in the paper's cache mode.
    copied_run_share: share of the places where the cache draft has the next six tokens right.
    proposed_share, cache_share: share of the cycles that had a cache draft, that verified one.
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
    """Accepted lengths of a family's cache drafts, bonus token not counted.

    mean_accepted, survival: the mean, and the share with at least 1, 2, ... 31 accepted tokens;
        where texts were cut, estimates (Kaplan and Meier's), up to the longest that was seen.
    oracle_share: share that reaches the threshold of six tokens.
    verified_*: figures of the drafts that the payoff policy verified, among them the shares with 0
        to 2, 3 to 5, and at least 6 accepted tokens; None if it verified none.
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

    at_recall: the highest precision with a recall of at least .05, .1, ... 1.
    precision, recall: those of the predictor's decisions.
    """

    predictor: str
    average_precision: float
    precision: float | None
    recall: float | None
    at_recall: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Drafts whose prediction is in low <= p < high; None: no limit.

    predicted, real: mean prediction, and the share or mean length that came true.
    """

    low: float | None
    high: float | None
    predicted: float
    real: float
    num_drafts: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted against real, on the drafts of all families together.

    of: "probability" that at least six tokens are accepted, or accepted "length" in tokens. The
        frequency score's probability is the suffix cache's own estimate for the sixth token.
    """

    predictor: str
    of: str
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """All figures of an analysis. Those of quality are judged at each cycle of the payoff policy
    (at: "cycle") and at each token of the outputs ("position"), by family (as file) and in the mean
    over families; all others at cycles.

    curves, importance: empty and None if no draft reaches the threshold.
    """

    about: About
    structure: tuple[Structure, ...]
    payoffs: tuple[Payoffs, ...]
    quality: tuple[Evaluation, ...]
    curves: tuple[PrecisionRecall, ...]
    calibration: tuple[Calibration, ...]
    importance: Importance | None

    def as_json(self) -> dict[str, object]:
        """The figures as json.dumps takes them; the keys are the fields of the values."""
        return asdict(self) | {"quality": [row.row() for row in self.quality]}

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.family for row in self.structure))
