"""The sampling parameters of a request that matter to HVD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang.srt.sampling.sampling_params import TOP_K_ALL

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

# What SGLang accumulates from token to token, with the value that has no effect.
_PENALTIES = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


def has_penalties(params: SamplingParams) -> bool:
    """Whether what is sampled depends on where cycles end: under speculation SGLang accumulates
    once per cycle. Then only the model drafter's own cycles give EAGLE3's output."""
    return bool(_changes(params, _PENALTIES))


def recorded(params: SamplingParams) -> Mapping[str, float]:
    """The parameters that a trace keeps: those that the request set, and all others that decide
    which token is sampled."""
    changes = _changes(params, {"min_p": 0.0, **_PENALTIES})
    if params.top_k == 1:  # how SGLang writes a temperature of 0
        return {"temperature": 0.0, **changes}
    # SGLang accepts true as 1; a trace holds numbers.
    asked = {"temperature": float(params.temperature), "top_p": float(params.top_p), **changes}
    return asked if params.top_k == TOP_K_ALL else {**asked, "top_k": int(params.top_k)}


def _changes(params: SamplingParams, neutral: Mapping[str, float]) -> dict[str, float]:
    return {
        name: float(getattr(params, name))
        for name, value in neutral.items()
        if getattr(params, name) != value
    }
