"""Payoff: how many tokens of a cache draft the target model will accept, predicted beforehand."""

from sglang_hvd.payoff.features import FEATURE_NAMES, DecodeState, build_features
from sglang_hvd.payoff.history import RequestHistory
from sglang_hvd.payoff.predictor import DEFAULT_PREDICTORS, PayoffPredictor
from sglang_hvd.payoff.token_classes import TokenClasses

__all__ = [
    "DEFAULT_PREDICTORS",
    "FEATURE_NAMES",
    "DecodeState",
    "PayoffPredictor",
    "RequestHistory",
    "TokenClasses",
    "build_features",
]
