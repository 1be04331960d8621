"""Payoff: how many tokens of a cache draft the target model will accept, predicted beforehand."""

from sglang_hvd.payoff.calibration import (
    FallbackChange,
    OnlineCalibration,
    OriginFigures,
)
from sglang_hvd.payoff.features import FEATURE_NAMES, PAPER_FEATURES, POSITION_FEATURES
from sglang_hvd.payoff.model_payoff import (
    SIZE_EFFECT,
    ModelDrafts,
    ModelFigures,
    ModelPayoff,
    ModelReaches,
)
from sglang_hvd.payoff.predictor import DEFAULT_PREDICTORS, PayoffPredictor, Prediction
from sglang_hvd.payoff.token_classes import TokenClasses
from sglang_hvd.payoff.tracker import DraftFeatures, RequestTracker

__all__ = [
    "DEFAULT_PREDICTORS",
    "FEATURE_NAMES",
    "PAPER_FEATURES",
    "POSITION_FEATURES",
    "SIZE_EFFECT",
    "DraftFeatures",
    "FallbackChange",
    "ModelDrafts",
    "ModelFigures",
    "ModelPayoff",
    "ModelReaches",
    "OnlineCalibration",
    "OriginFigures",
    "PayoffPredictor",
    "Prediction",
    "RequestTracker",
    "TokenClasses",
]
