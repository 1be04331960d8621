"""Predicts how many tokens of each draft the target model will accept, before it is verified."""

from sglang_hvd.payoff.calibration import (
    FallbackChange,
    OnlineCalibration,
    OriginFigures,
)
from sglang_hvd.payoff.features import FEATURE_NAMES, PAPER_FEATURES, POSITION_FEATURES
from sglang_hvd.payoff.model_predictor import (
    SIZE_EFFECT,
    ModelAcceptance,
    ModelFigures,
    ModelPredictor,
    VerifiedModelDrafts,
)
from sglang_hvd.payoff.predictor import DEFAULT_PREDICTORS, AcceptancePredictor, Prediction
from sglang_hvd.payoff.token_classes import TokenClasses
from sglang_hvd.payoff.tracker import DraftFeatures, RequestTracker

__all__ = [
    "DEFAULT_PREDICTORS",
    "FEATURE_NAMES",
    "PAPER_FEATURES",
    "POSITION_FEATURES",
    "SIZE_EFFECT",
    "AcceptancePredictor",
    "DraftFeatures",
    "FallbackChange",
    "ModelAcceptance",
    "ModelFigures",
    "ModelPredictor",
    "OnlineCalibration",
    "OriginFigures",
    "Prediction",
    "RequestTracker",
    "TokenClasses",
    "VerifiedModelDrafts",
]
