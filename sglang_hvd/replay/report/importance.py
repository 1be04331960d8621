"""Permutation importance: how much worse a predictor gets when some of its inputs are shuffled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor
from sglang_hvd.replay.core.training_rows import TrainingRows
from sglang_hvd.replay.training.evaluate import judged_by
from sglang_hvd.replay.training.quality import payoff_quality

# Prefixes of feature names by group. A feature belongs to the first group that fits.
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

_MAX_DRAFTS, _SEED = 2000, 42  # of the sample that it is measured on
_REPEATS, _FEATURE_REPEATS = 5, 2  # permutations of a group, and of a single feature


def _group_of(feature: str) -> str:
    groups = [group for group, prefixes in _PREFIXES.items() if feature.startswith(prefixes)]
    assert groups, f"{feature} is in no group of features"
    return groups[0]


FEATURE_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name in FEATURE_NAMES if _group_of(name) == group) for group in _PREFIXES
}


@dataclass(frozen=True, slots=True)
class Drop:
    """The loss of average precision when some inputs are permuted.

    drop: mean over the permutations. It is below 0 if average precision rose.
    deviation: standard deviation over the permutations.
    """

    name: str
    num_features: int
    drop: float
    deviation: float


@dataclass(frozen=True, slots=True)
class Importance:
    """Permutation importance of a predictor's inputs.

    num_drafts: size of the sample that it was measured on.
    average_precision: with all inputs in place.
    groups: the groups of FEATURE_GROUPS and the inputs of each token, most important first.
    features: the most important single features.
    """

    num_drafts: int
    average_precision: float
    groups: tuple[Drop, ...]
    features: tuple[Drop, ...]


def permutation_importance(
    rows: TrainingRows, predictor: AcceptancePredictor, *, num_features: int = 15
) -> Importance | None:
    """Compares average precision before and after some inputs are permuted between drafts.

    num_features: how many single features to return.

    Returns None if no draft of the sample reaches the threshold: there is no precision to lose.
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
