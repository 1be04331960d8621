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


def asks_for_cycles(params: SamplingParams) -> bool:
    """Whether the request asks for a report of its cycles; see check_custom_params."""
    asked = _asked_of_hvd(params.custom_params)
    return isinstance(asked, dict) and asked.get("report_cycles") is True


def check_custom_params(custom_params: object) -> None:
    """Checks what a request asks of HVD: custom_params {"hvd": {"report_cycles": true}}. Whatever
    does not ask HVD is not ours to check.

    Raises ValueError, in one line, for a wrong type or an unknown key.
    """
    asked = _asked_of_hvd(custom_params)
    if asked is None:
        return
    if not isinstance(asked, dict):
        raise ValueError(
            f'custom_params: "hvd" must be an object such as {{"report_cycles": true}}, got '
            f"{asked!r:.100}"
        )
    unknown = sorted(map(repr, asked.keys() - {"report_cycles"}))
    if unknown:
        raise ValueError(
            f'custom_params: "hvd" has the key report_cycles only, got {", ".join(unknown):.100}'
        )
    if not isinstance(asked.get("report_cycles", False), bool):
        raise ValueError(
            f"custom_params: report_cycles must be true or false, got "
            f"{asked['report_cycles']!r:.100}"
        )


def _asked_of_hvd(custom_params: object) -> object:
    """The value of the key "hvd"; None without one. SGLang does not check the type of either."""
    return custom_params.get("hvd") if isinstance(custom_params, dict) else None


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
