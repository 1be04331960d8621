"""What a predictor reads: how much worse it gets when some of its inputs are mixed up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor
from sglang_hvd.payoff.training_rows import TrainingRows
from sglang_hvd.replay.evaluate import judged_by
from sglang_hvd.replay.metrics import payoff_quality

# Which prefixes of feature names belong to which group; the first that fits counts.
_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "what the votes propose": ("votes_",),
    "the draft's own probabilities": ("score", "logit_prob_", "draft_len"),
    "how right the cache was lately": (
        *("agreed", "moving_share", "log_committed", "committed_", "log_run"),
        "recent_",
    ),
    "whether a copy goes on": ("is_place_", "place_shift"),
    "how often drafts had its tokens right": ("own_logit_right", "logit_right"),
    "the texts before draft and source": ("aligned", "in_common"),
    "where in its line it begins": (
        *("log_since_", "covers_line", "exceeds_line", "log_beyond_line", "latest_", "log_first_"),
    ),
    "what else has votes": ("logit_other_", "log_others_"),
    "tokens where the draft begins": ("before_", "token_"),
    "kinds of tokens in the draft": (
        *("whitespace", "punctuation", "line_break", "bracket", "delimiter"),
    ),
    "length of prompt and output": ("log_prompt_len", "log_generated_len", "relative_position"),
    "the match": (
        *("match_len", "in_", "log_match_len", "log_age", "log_occurrences", "log_agreeing"),
        *("share_agreeing", "agreement", "mean_agreement"),
    ),
}
_POSITIONS = "each token of the draft"

# Of the drafts that are given.
_MAX_DRAFTS, _SEED = 2000, 42
# How often a group is permuted, and a single feature.
_REPEATS, _FEATURE_REPEATS = 5, 2


def _group_of(feature: str) -> str:
    groups = [group for group, prefixes in _PREFIXES.items() if feature.startswith(prefixes)]
    assert groups, f"{feature} is in no group of features"
    return groups[0]


# Every feature is in one group.
FEATURE_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name in FEATURE_NAMES if _group_of(name) == group) for group in _PREFIXES
}


@dataclass(frozen=True, slots=True)
class Drop:
    """What average precision loses without some inputs.

    drop: mean over the repeats; below 0 where it gained.
    deviation: standard deviation over the repeats.
    """

    name: str
    num_features: int
    drop: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Importance:
    """Permutation importance of a predictor's inputs.

    num_drafts: in the sample that it was measured on.
    average_precision: with all inputs in place.
    groups: all of them, the most important first. The group of each token's own inputs stands
        beside those of FEATURE_GROUPS.
    features: the most important single ones.
    """

    num_drafts: int
    average_precision: float
    groups: tuple[Drop, ...]
    features: tuple[Drop, ...]


def permutation_importance(
    rows: TrainingRows, predictor: AcceptancePredictor, *, num_features: int = 15
) -> Importance | None:
    """Measures again after the values of some inputs were dealt out, together, to other drafts.

    num_features: single features to return.

    Returns None if no draft of the sample reaches the threshold: then there is no precision to
    lose.
    """
    rows = rows.sample(_MAX_DRAFTS, _SEED)
    baseline = _average_precision(rows, predictor)
    if baseline is None:
        return None
    random = np.random.default_rng(_SEED)

    def drop_of(name: str, columns: Sequence[int], repeats: int) -> Drop:
        losses = []
        for _ in range(repeats):
            order = random.permutation(len(rows))
            if columns:
                features = rows.features.copy()
                features[:, columns] = rows.features[order][:, columns]
                permuted = replace(rows, features=features)
            else:
                permuted = replace(rows, positions=rows.positions[order])
            measured = _average_precision(permuted, predictor)
            assert measured is not None, "the same labels as before"
            losses.append(baseline - measured)
        return Drop(name, len(columns), float(np.mean(losses)), float(np.std(losses)))

    groups = [
        drop_of(group, [FEATURE_NAMES.index(name) for name in names], _REPEATS)
        for group, names in FEATURE_GROUPS.items()
    ]
    num_own = rows.positions.shape[2]
    groups.append(replace(drop_of(_POSITIONS, [], _REPEATS), num_features=num_own))
    features = [
        drop_of(name, [column], _FEATURE_REPEATS) for column, name in enumerate(FEATURE_NAMES)
    ]
    return Importance(
        len(rows), baseline, _most_important(groups), _most_important(features)[:num_features]
    )


def _most_important(drops: Sequence[Drop]) -> tuple[Drop, ...]:
    return tuple(sorted(drops, key=lambda drop: -drop.drop))


def _average_precision(rows: TrainingRows, predictor: AcceptancePredictor) -> float | None:
    return payoff_quality(judged_by(rows, predictor), threshold=WORTH_LEN).average_precision
