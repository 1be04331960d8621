"""Requests that would end the server, because SGLang's scheduler or sampler raises on them.

They are refused with one line before they reach the scheduler. A custom logit processor that raises
ends its own request, and no other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from fastapi import HTTPException
from sglang.srt.managers.detokenizer_manager import DETOKENIZER_MAX_STATES
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, enc_hook, msgpack_decode
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req

# Bytes or objects that no client sends in JSON, and that the scheduler takes as they are.
_NOT_CHECKED = (
    "input_ids",
    "input_embeds",
    "mm_inputs",
    "positional_embed_overrides",
    "time_stats",
)
# Logits are multiplied with, divided by and added to numbers of this size, and stay finite.
_SMALLEST, _LARGEST = 1e-6, 1e30
_MAX_DEPTH = 100  # of custom_params


def check_on_arrival(
    request: TokenizedGenerateReqInput, model: ModelConfig, *, is_deterministic: bool = False
) -> None:
    """Raises ValueError, in one line, for a request that would end the server. An empty custom
    logit processor is taken for none.

    Args:
        request: as the scheduler would receive it.
        model: the target model's config.
        is_deterministic: the server samples with seeds.
    """
    vocab_size = model.vocab_size
    params = request.sampling_params
    _check_depth(params.custom_params)
    _check_types(request)
    if params.top_k == 1:  # greedy, whatever min_p is
        params.min_p = 0.0
    if is_deterministic and params.min_p > 0:
        raise ValueError(
            "min_p does not work with --enable-deterministic-inference, which samples with seeds: "
            f"leave it out, got {params.min_p}"
        )
    session = request.session_params
    if session is not None and session.replace and session.rid is None:
        raise ValueError("session_params: replace needs the rid of the request that it replaces")
    if request.lora_id is not None and request.lora_name is None:
        raise ValueError("lora_id is for SGLang's own use: name the adapter by lora_path")
    overrides = request.positional_embed_overrides
    if not isinstance(overrides, PositionalEmbeds | None):
        raise ValueError("positional_embed_overrides are for programs that use SGLang's engine")
    if request.input_embeds is not None:
        _check_embeds(request.input_embeds, model.hidden_size)
    elif request.mm_inputs is None:
        _check_prompt(request, vocab_size)
    if params.min_new_tokens > 0:  # whose penalty marks the stop tokens by their numbers
        _check_range("stop_token_ids", params.stop_token_ids or (), 0, vocab_size - 1)
    _check_range("top_k", [params.top_k], 1, 2**31 - 1)
    for name in ("temperature", "repetition_penalty"):  # the logits are divided by them
        value = getattr(params, name)
        if not _SMALLEST <= value <= _LARGEST:
            raise ValueError(f"{name} must be from {_SMALLEST:g} to {_LARGEST:g}, got {value}")
    _check_range("top_logprobs_num", [request.top_logprobs_num], 0, vocab_size)
    _check_range("logprob_start_len", [request.logprob_start_len], -1, 2**31 - 1)
    if params.logit_bias is not None:
        _check_logit_bias(params.logit_bias, vocab_size)
    if request.custom_logit_processor:
        _check_processor(request.custom_logit_processor, params.custom_params, vocab_size)
    else:
        # SGLang would read an empty one if another request of the batch has a processor.
        request.custom_logit_processor = None


def check_num_samples(request: GenerateReqInput) -> None:
    """Raises ValueError for more samples than SGLang's detokenizer has room for: SGLang would make
    them all, until there is no memory left."""
    params = request.sampling_params or {}
    for each in params if isinstance(params, list) else [params]:
        num_samples = each.get("n")
        if isinstance(num_samples, int) and num_samples > DETOKENIZER_MAX_STATES:
            raise ValueError(f"n must be at most {DETOKENIZER_MAX_STATES}, got {num_samples}")


@contextmanager
def errors_of_clients() -> Iterator[None]:
    """What SGLang raises here is the fault of a request. SGLang answers a ValueError with 400."""
    try:
        yield
    except (ValueError, HTTPException):
        raise
    except Exception as error:  # of any type, for a value whose type SGLang does not check
        raise ValueError(f"a value of the request is wrong: {one_line(error)}") from error


def _check_types(request: TokenizedGenerateReqInput) -> None:
    """SGLang does not check the types of most fields before it sends them to the scheduler."""
    params = msgspec.structs.replace(request.sampling_params, custom_params=None)
    fields = {**dict.fromkeys(_NOT_CHECKED), "sampling_params": params}
    try:
        msgpack_decode(_encoder.encode(msgspec.structs.replace(request, **fields)))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(_with_field_names(str(error))) from error


def _as_number(value: Any) -> Any:
    # A program that uses SGLang's engine may give numbers of numpy or torch.
    return value.item() if isinstance(value, np.generic | torch.Tensor) else enc_hook(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_number)


def _with_field_names(fault: str) -> str:
    """Names the field that msgspec gives by its place, as in "Expected `int`, got `str` - at
    `$[8][0]`"."""
    what, is_placed, place = fault.partition(" - at ")
    places = [int(number) for number in re.findall(r"\[(\d+)\]", place)]
    if not is_placed or not places:
        return f"a value of the request cannot be sent to the scheduler: {fault}"
    # The first item of the array says which struct it is.
    name = TokenizedGenerateReqInput.__struct_fields__[places[0] - 1]
    if name == "sampling_params" and len(places) > 1:
        name = SamplingParams.__struct_fields__[places[1]]
    return f"{name}: {what}"


def _check_depth(custom_params: object) -> None:
    """Python cannot send values that are nested as deep as it can call functions."""
    level: list[object] = [custom_params]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"custom_params are nested deeper than {_MAX_DEPTH} levels")


def _check_prompt(request: TokenizedGenerateReqInput, vocab_size: int) -> None:
    token_ids = np.asarray(request.input_ids if request.input_ids is not None else (), np.int64)
    if not token_ids.size:
        if request.session_params is None or request.session_params.id is None:
            raise ValueError("the prompt is empty: it needs at least one token")
        return  # SGLang checks it together with the tokens of the session
    if request.lora_id is None:  # adapters can have tokens of their own
        _check_range("input_ids", [token_ids.min(), token_ids.max()], 0, vocab_size - 1)


def _check_embeds(embeds: list[list[float]], hidden_size: int) -> None:
    lengths = {len(row) for row in embeds}
    if lengths != {hidden_size}:
        raise ValueError(
            f"input_embeds must be rows of {hidden_size} numbers, got "
            f"{len(embeds)} rows of {sorted(lengths)}"
        )


def _check_range(name: str, values: Sequence[int] | set[int], first: int, last: int) -> None:
    for value in values:
        if not first <= value <= last:
            raise ValueError(f"{name} must be from {first} to {last}, got {value}")


def _check_logit_bias(logit_bias: Mapping[str, float], vocab_size: int) -> None:
    num_banned = 0
    for token_id, bias in logit_bias.items():
        num_banned += bias == -math.inf
        if not (bias == -math.inf or -_LARGEST <= bias <= _LARGEST):
            raise ValueError(
                f"logit_bias of token {token_id} must be from {-_LARGEST:g} to {_LARGEST:g} or "
                f"-Infinity, got {bias}"
            )
    if num_banned == vocab_size:
        raise ValueError("logit_bias leaves no token: it is -Infinity for the whole vocabulary")


def _check_processor(serialized: str, custom_params: Any, vocab_size: int) -> None:
    try:
        processor = CustomLogitProcessor.from_str(serialized)
    except Exception as error:  # a client's code; that client gets the error
        raise ValueError(f"custom_logit_processor cannot be read: {one_line(error)}") from error
    if not callable(processor):
        raise ValueError("custom_logit_processor cannot be called: give what its to_str() returns")
    if isinstance(processor, DisallowedTokensLogitsProcessor):
        # On a GPU it would write outside the logits, which nothing can catch.
        token_ids = custom_params.get("token_ids") if isinstance(custom_params, dict) else None
        if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
            raise ValueError("custom_params: token_ids must be a list of integers")
        _check_range("custom_params: token_ids", token_ids, 0, vocab_size - 1)


# The requests of the batch that runs, in the order of its rows. None on a server without HVD.
_running: ContextVar[Sequence[Req] | None] = ContextVar("_running", default=None)


@contextmanager
def running(reqs: Sequence[Req]) -> Iterator[None]:
    """While a batch of these requests runs, `running_requests` gives them."""
    token = _running.set(reqs)
    try:
        yield
    finally:
        _running.reset(token)


def running_requests() -> Sequence[Req] | None:
    """The requests of the batch that runs, one per row; None on a server without HVD."""
    return _running.get()


def apply_processor(
    processor: Any,
    logits: torch.Tensor,
    custom_params: list[Any],
    reqs: Sequence[Req],
) -> tuple[torch.Tensor, list[int]]:
    """What a custom logit processor makes of the logits. If it fails on the first row of a request,
    the request ends with the error.

    Args:
        logits: float[rows, vocab_size]; not changed.
        custom_params: of the request of each row.
        reqs: the request of each row. The rows of a request are neighbours: the first is what plain
            serving has, the others are nodes of a tree.

    Returns:
        The logits, and the rows on which it failed. They stay as they were. Plain serving may never
        come to the text of such a node, so it must not be accepted.
    """
    try:
        return _usable(processor(logits.clone(), custom_params), logits), []
    except Exception as error:  # noqa: BLE001 (a client's code; that client gets the error)
        if len(reqs) == 1:
            end_request(reqs[0], f"custom_logit_processor failed: {one_line(error)}")
            return logits, [0]
    # It may fail on one row only, or because rows differ.
    starts = [row for row, req in enumerate(reqs) if row == 0 or req is not reqs[row - 1]]
    if len(starts) == 1:
        return _apply_by_row(processor, logits, custom_params, reqs[0])
    parts, failed = [], []
    for start, end in zip(starts, [*starts[1:], len(reqs)], strict=True):
        own = slice(start, end)
        part, rows = apply_processor(processor, logits[own], custom_params[own], reqs[own])
        parts.append(part)
        failed += [start + row for row in rows]
    return torch.cat(parts), failed


def _apply_by_row(
    processor: Any, logits: torch.Tensor, custom_params: list[Any], req: Req
) -> tuple[torch.Tensor, list[int]]:
    """As apply_processor, for the rows of one request."""
    result, failed = logits.clone(), []
    for row, params in enumerate(custom_params):
        one = logits[row : row + 1]
        try:
            result[row] = _usable(processor(one.clone(), [params]), one)[0]
        except Exception as error:  # noqa: BLE001 (a client's code; that client gets the error)
            failed.append(row)
            if row == 0:
                end_request(req, f"custom_logit_processor failed: {one_line(error)}")
    return result, failed


def end_request(
    req: Req,
    message: str,
    status: HTTPStatus = HTTPStatus.BAD_REQUEST,
    kind: str = "BadRequestError",
) -> None:
    """Ends a request that runs after its step: the client gets the status with the message."""
    if not req.finished():
        req.to_finish = FINISH_ABORT(message, status, kind)


def one_line(error: Exception) -> str:
    """The kind of the error and the first line of its text."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__


def _usable(result: Any, logits: torch.Tensor) -> torch.Tensor:
    """The result with the type of the logits. Raises ValueError for one that ends the sampler."""
    if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
        shape = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"it returned {shape} for logits of shape {list(logits.shape)}")
    result = result.to(logits)
    # Infinite logits are certain. As such they can be sampled, too.
    is_certain = result == math.inf
    certain = torch.where(is_certain, 0.0, -math.inf).to(logits)
    result = torch.where(is_certain.any(dim=-1, keepdim=True), certain, result)
    if not torch.logsumexp(result.float(), dim=-1).isfinite().all():
        raise ValueError("it returned NaN, or -inf for all tokens")
    return result
