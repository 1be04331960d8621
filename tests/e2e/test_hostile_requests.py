"""Requests that would end a server get a 400 with one line, and others are answered as before."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from tests.e2e.conftest import HANGS_AFTER_S, Server, request_body

IDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def server(start_hvd: Callable[..., Server]) -> Server:
    flags = ("--hvd-threshold", "1.5", "--enable-custom-logit-processor")
    return start_hvd("payoff", *flags)


def _ask(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the text of the answer."""
    request = urllib.request.Request(
        server.process.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=HANGS_AFTER_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _generate(params: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 4, "temperature": 0, **(params or {})}
    return {"input_ids": IDS, "sampling_params": params, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {
        **{"model": "default", "messages": [{"role": "user", "content": "hello"}]},
        **{"max_tokens": 4, "temperature": 0, **fields},
    }


# What ends a server without HVD, as fields of /generate, and the answer of one with HVD.
KILLERS: list[tuple[dict[str, Any], str]] = [
    *(
        ({**_generate(), "input_ids": ids}, fault)
        for ids, fault in (
            ([-1], "input_ids must be from 0 to 2047, got -1"),
            ([2048], "input_ids must be from 0 to 2047, got 2048"),
            ([2**63 - 1], "input_ids must be from 0 to 2047"),
            ([[]], "the prompt is empty"),
            ([[5], []], "the prompt is empty"),
            ([[5], [99999]], "input_ids must be from 0 to 2047, got 99999"),
        )
    ),
    *(
        ({"text": text, "sampling_params": {"max_new_tokens": limit}}, "the prompt is empty")
        for text in ("", [""], ["", "a"])
        for limit in (0, 4)
    ),
    *(
        (
            _generate({"stop_token_ids": [token_id], "min_new_tokens": 2}),
            f"stop_token_ids must be from 0 to 2047, got {token_id}",
        )
        for token_id in (-1, 2048, 2**31, 2**63)
    ),
    *(
        (_generate(return_logprob=True, **fields), fault)
        for fields, fault in (
            ({"top_logprobs_num": 2049}, "top_logprobs_num must be from 0 to 2048, got 2049"),
            ({"top_logprobs_num": 2**63}, "top_logprobs_num must be from 0 to 2048"),
            ({"top_logprobs_num": []}, "top_logprobs_num: Expected `int`, got `array`"),
            ({"top_logprobs_num": [1, 2]}, "top_logprobs_num: Expected `int`, got `array`"),
            ({"logprob_start_len": -2}, "logprob_start_len must be from -1 to"),
            ({"logprob_start_len": -(2**63)}, "logprob_start_len must be from -1 to"),
            ({"logprob_start_len": [1]}, "logprob_start_len: Expected `int`, got `array`"),
        )
    ),
    *(
        (_generate(**fields), fault)
        for fields, fault in (
            ({"sampling_params": {"n": 10**9}}, "n must be at most 65536, got 1000000000"),
            ({"sampling_params": {"stop_regex": "("}}, "a value of the request is wrong: "),
            ({"watermark": {"enabled": True}}, "requires the server to enable --enable-watermark"),
            ({"return_hidden_states": []}, "return_hidden_states: Expected `bool"),
            ({"lora_id": ["a"]}, "lora_id: Expected `str | null`, got `array`"),
            ({"positional_embed_overrides": {}}, "positional_embed_overrides are for programs"),
            ({"custom_logit_processor": "x"}, "custom_logit_processor cannot be read"),
            ({"custom_logit_processor": ["a", "b"]}, "custom_logit_processor: Expected `str"),
        )
    ),
]


def test_requests_that_would_end_the_server_get_a_400(server: Server, prompts: list[str]) -> None:
    few = prompts[:6]
    expected = [answer["output_ids"] for answer in server.generate_all(few, concurrency=1)]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.generate, prompt) for prompt in few]
        refused = [pool.submit(_ask, server, "/generate", body) for body, _ in KILLERS]
        good += [pool.submit(server.generate, prompt) for prompt in few]
    for (body, fault), answer in zip(KILLERS, refused, strict=True):
        status, text = answer.result()
        assert status == 400, (body, text)
        message = json.loads(text)["error"]["message"]
        assert fault in message
        assert "\n" not in message
    assert [answer.result()["output_ids"] for answer in good] == expected * 2
    assert server.hvd_state()["num_requests"] == 0


def test_an_empty_prompt_continues_a_session_that_has_tokens(server: Server) -> None:
    session = json.loads(_ask(server, "/open_session", {"capacity_of_str_len": 1000})[1])
    body = {**_generate(session_params={"id": session}), "input_ids": []}
    status, text = _ask(server, "/generate", body)
    assert status == 400
    assert "must contain input tokens" in text
    status, text = _ask(server, "/generate", {**body, "input_ids": IDS})
    answer = json.loads(text)
    parent = {"id": session, "rid": answer["meta_info"]["id"]}
    status, text = _ask(server, "/generate", {**body, "session_params": parent})
    whole = server.generate([*IDS, *answer["output_ids"]], max_new_tokens=4)
    assert json.loads(text)["output_ids"] == whole["output_ids"]
    # SGLang forgets all requests of the session while it counts them.
    replacing = _generate(session_params={"id": session, "replace": True})
    status, text = _ask(server, "/generate", replacing)
    assert status == 400
    assert "replace needs the rid of the request that it replaces" in text


def test_a_stream_of_such_a_request_has_one_event(server: Server) -> None:
    status, text = _ask(server, "/generate", {**_generate(), "input_ids": [2048], "stream": True})
    error, done = [line for line in text.splitlines() if line]
    assert (status, done) == (200, "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 400


_NUMBERS = (-1, 0, 1, 5, 2047, 2048, 2**31, -(2**31), 2**63, -(2**63), 10**30, 0.5, -0.5, 1e300)
_OTHERS: tuple[Any, ...] = (
    "",
    "x",
    "(",
    "{}",
    "\x00",
    None,
    True,
    False,
    [],
    [1],
    [[1]],
    ["a", ""],
    {},
    {"a": 1},
)
_VALUES = (*_NUMBERS, *_OTHERS)
_SAMPLING = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "stream_interval"),
    *("sampling_seed", "stop", "stop_token_ids", "stop_regex", "json_schema", "regex", "ebnf"),
    *("structural_tag", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias"),
    *("custom_params", "beam_width", "watermark", "spaces_between_special_tokens"),
)
_FIELDS = (
    *("text", "input_ids", "input_embeds", "return_logprob", "logprob_start_len", "stream"),
    *("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "session_params"),
    *("return_hidden_states", "return_routed_experts", "lora_path", "lora_id", "priority"),
    *("custom_logit_processor", "positional_embed_overrides", "extra_key", "cache_salt"),
    *("return_sampling_mask", "return_prompt_token_ids", "rid", "session_id", "routed_dp_rank"),
    *("return_flat_raw_top_logprobs", "require_reasoning", "max_thinking_tokens", "bootstrap_room"),
)


def _hostile(rng: random.Random) -> dict[str, Any]:
    """A request of /generate with some fields of any value, among them ones that go together."""

    def value(name: str) -> Any:
        if name in ("stop_token_ids", "token_ids_logprob", "input_ids") and rng.random() < 0.5:
            return [rng.choice(_NUMBERS[:10])]
        if name == "logit_bias" and rng.random() < 0.7:
            return {str(rng.choice(_NUMBERS[:6])): rng.choice(_NUMBERS)}
        chosen = rng.choice(_VALUES)
        # A request without a limit would take long.
        return 4 if name == "max_new_tokens" and chosen in (None, 2047, 2048) else chosen

    params = {name: value(name) for name in rng.sample(_SAMPLING, rng.randrange(3))}
    fields = {name: value(name) for name in rng.sample(_FIELDS, rng.randrange(3))}
    if rng.random() < 0.3:
        fields["return_logprob"] = True
    return _generate({"ignore_eos": True, **params}, **fields)


def test_a_server_answers_any_request(server: Server, prompts: list[str]) -> None:
    rng = random.Random(0)
    hostile = [_hostile(rng) for _ in range(300)]
    few = prompts[:6]
    expected = [answer["output_ids"] for answer in server.generate_all(few, concurrency=1)]
    with ThreadPoolExecutor(8) as pool:
        answers, good = [], []
        for number, body in enumerate(hostile):
            answers.append(pool.submit(_ask, server, "/generate", body))
            if number % 10 == 0:
                good.append(pool.submit(server.generate, few[number // 10 % len(few)]))
    statuses = [answer.result()[0] for answer in answers]
    unexpected = [
        (body, answer.result()[1])
        for body, answer, status in zip(hostile, answers, statuses, strict=True)
        if status not in (200, 400)
    ]
    assert unexpected == []
    assert min(statuses.count(200), statuses.count(400)) > 30
    for number, answer in enumerate(good):
        assert answer.result()["output_ids"] == expected[number % len(few)]
    assert server.hvd_state()["num_requests"] == 0


def _failing_processor() -> str:
    """A processor that makes one token certain, unless its parameters make it fail. It is a local
    class, so that the server need not import this module."""

    class Fails:
        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> Any:
            for row, params in enumerate(custom_param_list):
                if len(params["__req__"].output_ids) >= params.get("fails_after", 99):
                    raise KeyError(params["fails"])
                logits[row] = float("-inf")
                logits[row, params["token"]] = float(params.get("logit", 0))
            return logits

    return str(CustomLogitProcessor.to_str.__func__(Fails))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_processor_that_fails_ends_its_request_alone(
    server: Server, prompts: list[str], temperature: float
) -> None:
    few = prompts[:6]
    expected = [answer["output_ids"] for answer in server.generate_all(few, concurrency=1)]
    processor = _failing_processor()
    faults: dict[str, dict[str, Any]] = {
        "KeyError: 'at once'": {"fails_after": 0, "fails": "at once"},
        "KeyError: 'after one'": {"fails_after": 1, "fails": "after one", "token": 9},
        "KeyError: 'after five'": {"fails_after": 5, "fails": "after five", "token": 9},
        "KeyError: 'token'": {"note": "names no token"},
        "IndexError: ": {"token": 2048},
        "ValueError: it returned NaN, or -inf for all tokens": {"token": 5, "logit": "nan"},
    }

    def ask(params: dict[str, Any]) -> tuple[int, str]:
        params = {"temperature": temperature, "max_new_tokens": 12, "custom_params": params}
        return _ask(server, "/generate", _generate(params, custom_logit_processor=processor))

    with ThreadPoolExecutor(12) as pool:
        good = [pool.submit(server.generate, prompt) for prompt in few]
        bad = {fault: pool.submit(ask, params) for fault, params in faults.items()}
        certain = {token: pool.submit(ask, {"token": token}) for token in (5, 700, 2047)}
        good += [pool.submit(server.generate, prompt, custom_logit_processor="") for prompt in few]
    for fault, answer in bad.items():
        status, text = answer.result()
        message = json.loads(text)["error"]["message"]
        assert status == 400
        assert message.startswith(f"custom_logit_processor failed: {fault}")
        assert "\n" not in message
    for token, answer in certain.items():
        status, text = answer.result()
        assert json.loads(text)["output_ids"] == [token] * 12
    assert [answer.result()["output_ids"] for answer in good] == expected * 2
    assert server.hvd_state()["num_requests"] == 0


def test_a_processor_may_fail_on_texts_that_are_drafted_and_not_reached(
    server: Server, prompts: list[str]
) -> None:
    class Follows:
        """Makes the tokens of a text certain, one by one, and knows no other text."""

        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> Any:
            for row, params in enumerate(custom_param_list):
                text, output = params["text"], list(params["__req__"].output_ids)
                assert output == text[: len(output)] != text, "an unknown text"
                logits[row] = float("-inf")
                logits[row, text[len(output)]] = 0
            return logits

    processor = str(CustomLogitProcessor.to_str.__func__(Follows))
    few = prompts[:6]
    usual = [answer["output_ids"] for answer in server.generate_all(few, concurrency=1)]

    def follow(number: int) -> tuple[list[int], list[int]]:
        # The usual reply, which is drafted, until a token in its middle is another one.
        text = [*usual[number][:9], 700 + number, *usual[number][10:24]]
        params = {"max_new_tokens": len(text), "custom_params": {"text": text}, "ignore_eos": True}
        body = request_body(few[number], custom_logit_processor=processor, **params)
        status, answer = _ask(server, "/generate", body)
        assert status == 200, answer
        return json.loads(answer)["output_ids"], text

    with ThreadPoolExecutor(6) as pool:
        for output_ids, text in pool.map(follow, range(6)):
            assert output_ids == text
    assert server.hvd_state()["num_accepted_drafts"]["cache"] > 0


@pytest.mark.parametrize("serialized", ["{", "{}", '{"callable": "80"}', '{"callable": 1}', "null"])
def test_a_processor_that_cannot_be_read_is_refused(server: Server, serialized: str) -> None:
    status, text = _ask(server, "/generate", _generate(custom_logit_processor=serialized))
    assert (status, text.count("\\n")) == (400, 0)
    assert "custom_logit_processor cannot be read: " in text


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"speculative_accept_threshold_single": 0.5}, "threshold-single below 1: drop it"),
        ({"speculative_accept_threshold_acc": 0.9}, "threshold-acc below 1: drop it"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk: drop it"),
        ({"pp_max_micro_batch_size": 1.5}, "must be an integer, got 1.5"),
    ],
)
def test_settings_that_hvd_refuses_cannot_be_made_while_serving(
    server: Server, settings: dict[str, Any], fault: str
) -> None:
    before = _settings(server)
    status, text = _ask(server, "/set_internal_state", {"server_args": settings})
    assert status == 400
    assert fault in text
    assert "\\n" not in text
    assert _settings(server) == before
    status, _ = _ask(server, "/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 8}})
    assert status == 200


def _settings(server: Server) -> dict[str, Any]:
    state = server.process.get("/server_info")["internal_states"][0]
    names = "speculative_accept_threshold_single", "speculative_accept_threshold_acc"
    return {name: state[name] for name in (*names, "enable_mixed_chunk")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pd_role_switch", {"new_role": "decode"}),
        ("/configure_logging", {"log_requests": True, "log_requests_level": 4}),
        ("/update_weights_from_disk", {"model_path": "nowhere", "load_format": "none"}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "nowhere"}),
    ],
)
def test_what_a_server_does_not_have_cannot_be_set_while_serving(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    status, text = _ask(server, path, body)
    assert status == 400
    assert "\\n" not in text
    assert len(server.generate(IDS, max_new_tokens=4)["output_ids"]) == 4
