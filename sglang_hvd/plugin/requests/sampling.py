"""The sampling parameters of a request that matter to HVD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.sampling.sampling_params import TOP_K_ALL

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

# What SGLang accumulates from token to token, with the value that has no effect.
_PENALTIES = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


@dataclass(frozen=True, slots=True)
class Penalties:
    """What a request asks for that depends on the tokens of its output.

    end_ids: the tokens that min_new_tokens forbids.
    """

    frequency: float
    presence: float
    repetition: float
    min_new_tokens: int
    end_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """How the tokens of a request are sampled, as far as it differs between requests.

    penalties: None for a request without any.
    """

    is_greedy: bool
    has_logit_bias: bool
    has_processor: bool
    penalties: Penalties | None

    @classmethod
    def of(cls, req: Req) -> SamplingKind:
        """Of a request as SGLang has it."""
        params = req.sampling_params
        penalties = None
        if any(getattr(params, name) != value for name, value in _PENALTIES.items()):
            penalties = Penalties(
                params.frequency_penalty,
                params.presence_penalty,
                params.repetition_penalty,
                params.min_new_tokens,
                _end_ids(req) if params.min_new_tokens > 0 else frozenset(),
            )
        return cls(
            is_greedy=params.top_k <= 1,
            has_logit_bias=params.logit_bias is not None,
            has_processor=req.custom_logit_processor is not None,
            penalties=penalties,
        )

    @property
    def needs_output(self) -> bool:
        """Whether a verification needs the tokens of the output so far."""
        return self.penalties is not None or self.has_processor


def _end_ids(req: Req) -> frozenset[int]:
    """The tokens that end a text, as SGLang's BatchedMinNewTokensPenalizer has them."""
    ids = (req.sampling_params.stop_token_ids or set()) | (req.eos_token_ids or set())
    if req.tokenizer is not None:
        ids = (
            ids | set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
        )
    return frozenset(ids - {None})


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
