"""Predictors and drafts for tests."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from sglang_hvd._native import NUM_BUCKETS
from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import (
    FEATURE_NAMES,
    PAPER_FEATURES,
    POSITION_FEATURES,
    AcceptancePredictor,
    DraftFeatures,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.payoff.predictor import Kind, feature_settings
from sglang_hvd.replay.core.training_rows import TrainingRows

NUM_OUTPUTS = {"mlp": 1, "survival": NUM_BUCKETS + len(POSITION_FEATURES)}
WIDTHS = {"mlp": len(PAPER_FEATURES), "survival": len(FEATURE_NAMES)}


def linear(weights: Mapping[str, float], bias: float = 0) -> AcceptancePredictor:
    """A predictor of the paper's kind whose payoff is a weighted sum of its features."""
    row = [[weights.get(name, 0.0) for name in PAPER_FEATURES]]
    return AcceptancePredictor(
        kind="mlp",
        mean=np.zeros(len(PAPER_FEATURES), np.float32),
        std=np.ones(len(PAPER_FEATURES), np.float32),
        weights=(np.array(row, np.float32),),
        biases=(np.array([bias], np.float32),),
        settings=feature_settings(HvdConfig()),
        provenance={},
    )


def constant_survival(prob: float) -> AcceptancePredictor:
    """Each token of a draft is accepted with this probability, if those before it are."""
    bias = np.zeros(NUM_OUTPUTS["survival"], np.float32)
    bias[:NUM_BUCKETS] = np.log(prob / (1 - prob))
    return AcceptancePredictor(
        kind="survival",
        mean=np.zeros(len(FEATURE_NAMES), np.float32),
        std=np.ones(len(FEATURE_NAMES), np.float32),
        weights=(np.zeros((len(bias), len(FEATURE_NAMES)), np.float32),),
        biases=(bias,),
        settings=feature_settings(HvdConfig()),
        provenance={},
    )


def random_predictor(
    kind: Kind = "survival", hidden: Sequence[int] = (64, 64), seed: int = 0
) -> AcceptancePredictor:
    random = np.random.default_rng(seed)
    sizes = [WIDTHS[kind], *hidden, NUM_OUTPUTS[kind]]
    shapes = [(num_out, num_in) for num_in, num_out in pairwise(sizes)]
    return AcceptancePredictor(
        kind=kind,
        mean=random.normal(size=sizes[0]).astype(np.float32),
        std=random.uniform(0.5, 2, sizes[0]).astype(np.float32),
        weights=tuple((random.normal(size=s) / s[1] ** 0.5).astype(np.float32) for s in shapes),
        biases=tuple(random.normal(size=s[0]).astype(np.float32) for s in shapes),
        settings=feature_settings(HvdConfig()),
        provenance={"data": "random numbers"},
    )


def random_drafts(num_rows: int, seed: int = 1) -> DraftFeatures:
    random = np.random.default_rng(seed)
    drafts = DraftFeatures.of_size(num_rows)
    drafts.draft_lens[:] = random.integers(0, MAX_DRAFT_LEN + 1, num_rows)
    drafts.features[:] = random.normal(size=drafts.features.shape) * 4
    drafts.positions[:] = random.normal(size=drafts.positions.shape)
    return drafts


def random_rows(num_rows: int, seed: int = 0, longest: int = 12) -> TrainingRows:
    """Each token is accepted with a probability that the first feature, and the token's own first
    input, decide; the last feature never varies."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(num_rows, len(FEATURE_NAMES))).astype(np.float32)
    features[:, -1] = 3
    positions = random.normal(size=(num_rows, longest, len(POSITION_FEATURES)))
    draft_lens = random.integers(1, longest + 1, num_rows).astype(np.int32)
    odds = 1 + features[:, :1] + 2 * positions[:, :, 0]
    is_accepted = random.random((num_rows, longest)) < 1 / (1 + np.exp(-odds))
    num_accepted = np.cumprod(is_accepted, axis=1).sum(axis=1)
    return TrainingRows(
        features=features,
        positions=positions.astype(np.float32),
        draft_lens=draft_lens,
        accepted_lens=np.minimum(num_accepted, draft_lens).astype(np.int32),
        is_verified=np.zeros(num_rows, np.bool_),
        is_worth_known=np.ones(num_rows, np.bool_),
    )
