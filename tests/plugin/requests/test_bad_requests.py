"""Requests that would end the server are refused, and processors that fail end their request."""

from __future__ import annotations

import json
import math
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hvd.plugin.requests.bad_requests import apply_processor, check_on_arrival

VOCAB_SIZE = 16
MODEL: Any = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=2)
DISALLOWED = DisallowedTokensLogitsProcessor.to_str()


def _request(params: dict[str, Any] | None = None, **fields: Any) -> TokenizedGenerateReqInput:
    """A request as SGLang would send it to its scheduler."""
    params = dict(params or {})
    min_new_tokens = params.pop("min_new_tokens", 0)
    sampling_params = SamplingParams(**params)
    sampling_params.normalize(None)
    sampling_params.min_new_tokens = min_new_tokens  # which needs a tokenizer to be normalized
    return TokenizedGenerateReqInput(
        **{
            "rid": "a",
            **{"input_text": "a", "input_ids": array("q", [1, 2]), "input_embeds": None},
            **{"mm_inputs": None, "token_type_ids": None, "sampling_params": sampling_params},
            **{"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0},
            **{"token_ids_logprob": None, "stream": False, **fields},
        }
    )


def _nested(levels: int) -> dict[str, Any]:
    inner: Any = 10**30
    for number in range(levels - 1):
        inner = [inner] if number % 2 else {"a": inner}
    return {"a": inner}


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({}, {}),
        ({"logit_bias": {"3": -math.inf, "4": 1}, "stop_token_ids": [-1, 16]}, {}),
        ({"min_new_tokens": 1, "stop_token_ids": [0, 15]}, {}),
        ({"custom_params": 5}, {}),
        ({"custom_params": _nested(99), "temperature": np.float32(0.5)}, {}),
        (
            {"custom_params": {"token_ids": [0, 15]}, "max_new_tokens": np.int64(3)},
            {"custom_logit_processor": DISALLOWED},
        ),
        ({}, {"top_logprobs_num": VOCAB_SIZE, "logprob_start_len": 100}),
        (
            {},
            {
                "input_ids": array("q", [15, 16]),
                **{"lora_id": "adapter", "lora_name": "given by lora_path"},
            },
        ),
        ({}, {"input_ids": array("q"), "input_embeds": [[0.5, 1]]}),
    ],
)
def test_requests_that_the_model_can_serve_pass(
    params: dict[str, Any], fields: dict[str, Any]
) -> None:
    check_on_arrival(_request(params, **fields), MODEL)


def test_min_p_is_refused_where_tokens_are_sampled_with_seeds() -> None:
    request = _request({"min_p": 0.1})
    check_on_arrival(request, MODEL)
    with pytest.raises(ValueError, match="min_p does not work with --enable-deterministic"):
        check_on_arrival(request, MODEL, is_deterministic=True)
    check_on_arrival(_request({}), MODEL, is_deterministic=True)


@pytest.mark.parametrize(
    ("params", "fields", "fault"),
    [
        ({"ignore_eos": "yes"}, {}, "ignore_eos: Expected `bool`, got `str`"),
        ({}, {"stream": 5}, "stream: Expected `bool`, got `int`"),
        (
            {},
            {"lora_id": "adapter"},
            "lora_id is for SGLang's own use: name the adapter by lora_path",
        ),
        ({}, {"session_params": SessionParams(id="a", replace=True)}, "replace needs the rid"),
        ({}, {"priority": 2**70}, "can't serialize ints"),
        ({"custom_params": _nested(101)}, {}, "custom_params are nested deeper than 100 levels"),
        ({}, {"top_logprobs_num": [1]}, "top_logprobs_num: Expected `int`, got `array`"),
        ({}, {"return_hidden_states": []}, "return_hidden_states: Expected `bool"),
        ({}, {"input_ids": array("q")}, "the prompt is empty"),
        ({}, {"input_ids": array("q", [1, 16])}, "input_ids must be from 0 to 15, got 16"),
        ({}, {"input_ids": array("q", [-1])}, "input_ids must be from 0 to 15, got -1"),
        (
            {"stop_token_ids": [16], "min_new_tokens": 1},
            {},
            "stop_token_ids must be from 0 to 15, got 16",
        ),
        ({}, {"top_logprobs_num": 17}, "top_logprobs_num must be from 0 to 16, got 17"),
        ({}, {"logprob_start_len": -2}, "logprob_start_len must be from -1 to .*, got -2"),
        ({"logit_bias": {"3": math.nan}}, {}, "logit_bias of token 3 must be from .* got nan"),
        ({"logit_bias": {"3": 3e38}}, {}, "logit_bias of token 3 must be from"),
        ({"top_k": 2**31}, {}, "top_k must be from 1 to 2147483647, got 2147483648"),
        ({"temperature": 1e300}, {}, "temperature must be from 1e-06 to 1e\\+30, got 1e\\+300"),
        ({"repetition_penalty": 1e-40}, {}, "repetition_penalty must be from 1e-06 to"),
        (
            {"custom_params": {"token_ids": [16]}},
            {"custom_logit_processor": DISALLOWED},
            "custom_params: token_ids must be from 0 to 15, got 16",
        ),
        (
            {"custom_params": {"token_ids": "all"}},
            {"custom_logit_processor": DISALLOWED},
            "custom_params: token_ids must be a list of integers",
        ),
        ({"logit_bias": {str(i): -math.inf for i in range(16)}}, {}, "leaves no token"),
        ({}, {"custom_logit_processor": "{"}, "custom_logit_processor cannot be read: JSON"),
        (
            {},
            {"custom_logit_processor": json.dumps({"callable": "80"})},
            "custom_logit_processor cannot be read: UnpicklingError",
        ),
    ],
)
def test_requests_that_would_end_the_server_are_refused_in_one_line(
    params: dict[str, Any], fields: dict[str, Any], fault: str
) -> None:
    request = _request(params, **fields)
    with pytest.raises(ValueError, match=fault) as refusal:
        check_on_arrival(request, MODEL)
    assert "\n" not in str(refusal.value)


def test_an_empty_processor_is_none() -> None:
    request = _request(custom_logit_processor="")
    check_on_arrival(request, MODEL)
    assert request.custom_logit_processor is None


class _Bans:
    """Bans the token that the parameters name, and fails as they ask."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> Any:
        for row, params in enumerate(custom_param_list):
            logits[row, params["token"]] = -math.inf
            if params.get("fails"):
                raise KeyError("of a client\nand more")
            if "all" in params:
                logits[row] = params["all"]
        gives = {params.get("gives") for params in custom_param_list}
        return None if "none" in gives else logits[:, :2] if "few" in gives else logits


def _req(finished: bool = False) -> Any:
    return SimpleNamespace(to_finish=None, finished=lambda: finished)


@pytest.mark.parametrize(
    ("failing", "fault"),
    [
        ({"token": 1, "fails": True}, "KeyError: 'of a client"),
        ({}, "KeyError: 'token'"),
        (None, "TypeError"),
        ({"token": 99}, "IndexError"),
        ({"token": 1, "gives": "none"}, "ValueError: it returned NoneType for logits of shape"),
        ({"token": 1, "gives": "few"}, "ValueError: it returned "),
        ({"token": 1, "all": math.nan}, "ValueError: it returned NaN, or -inf for all tokens"),
        ({"token": 1, "all": -math.inf}, "ValueError: it returned NaN, or -inf for all tokens"),
    ],
)
def test_a_processor_that_fails_ends_its_request_alone(failing: Any, fault: str) -> None:
    logits = torch.arange(20.0).reshape(5, 4)
    before = logits.clone()
    good, bad, other = _req(), _req(), _req()
    params = [{"token": 1}, failing, failing, {"token": 2}, {"token": 3}]
    rows = [good, bad, bad, other, other]
    result, failed = apply_processor(_Bans(), logits, params, rows)
    assert failed == [1, 2]
    expected = before.clone()
    for row, token in ((0, 1), (3, 2), (4, 3)):
        expected[row, token] = -math.inf
    assert torch.equal(result, expected)
    assert torch.equal(logits, before)
    assert good.to_finish is None
    assert other.to_finish is None
    assert isinstance(bad.to_finish, FINISH_ABORT)
    message = bad.to_finish.to_json()["message"]
    assert message.startswith(f"custom_logit_processor failed: {fault}")
    assert bad.to_finish.to_json()["status_code"] == 400
    assert "\n" not in message


def test_a_request_goes_on_if_its_processor_fails_on_drafts() -> None:
    first, second = _req(), _req()
    params = [{"token": 0}, {"token": 1, "fails": True}, {"token": 2}, {"token": 3}, {}]
    rows = [first, first, first, second, second]
    result, failed = apply_processor(_Bans(), torch.zeros(5, 4), params, rows)
    assert failed == [1, 4]
    banned = [[row] if row not in failed else [] for row in range(3)] + [[3], []]
    assert [torch.nonzero(row.isneginf()).flatten().tolist() for row in result] == banned
    assert [first.to_finish, second.to_finish] == [None, None]


def test_requests_of_one_processor_may_differ() -> None:
    # SGLang's own processor asserts that all its requests disallow the same tokens.
    reqs = [_req(), _req()]
    params = [{"token_ids": [0]}, {"token_ids": [1, 2]}]
    processor = DisallowedTokensLogitsProcessor()
    result, failed = apply_processor(processor, torch.zeros(2, 4), params, reqs)
    assert failed == []
    assert result.isneginf().tolist() == [[True] + [False] * 3, [False, True, True, False]]
    assert [req.to_finish for req in reqs] == [None, None]


def test_an_infinite_logit_is_a_certain_token() -> None:
    params = [{"token": 0, "all": torch.tensor([5.0, math.inf, math.nan, 0])}]
    req = _req()
    result, _ = apply_processor(_Bans(), torch.zeros(1, 4), params, [req])
    assert result.tolist() == [[-math.inf, 0, -math.inf, -math.inf]]
    assert req.to_finish is None


def test_a_request_that_has_ended_stays_as_it_ended() -> None:
    req = _req(finished=True)
    apply_processor(_Bans(), torch.zeros(1, 4), [{}], [req])
    assert req.to_finish is None
