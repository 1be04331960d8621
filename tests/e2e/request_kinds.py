"""Requests as data: every parameter alone and in combinations, over every API of SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
)

from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from tests.e2e.conftest import request_body

# Tokens of the demo models' vocabulary.
START_OF_MESSAGE, END_OF_MESSAGE, NEW_LINE, THE, DOT = 1, 2, 201, 275, 16
MAX_TOKENS = 28
CONTEXT = 4096

SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["accepted", "rejected"]},
        "mark": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["verdict", "mark"],
    "additionalProperties": False,
}
EBNF = 'root ::= item ", " item ", " item\nitem ::= "one" | "two" | "three hundred"'

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A request and what of its answer plain serving settles.

    is_drawn: its tokens are drawn at random without a seed, so only their number can be compared.
    """

    name: str
    path: str
    body: Params
    is_drawn: bool = False

    def as_plain_serving_tells(self) -> Kind:
        """What plain serving is asked. Its streams for Ollama lack the text of the last chunk, so
        that it is asked for the whole reply."""
        if not self.path.startswith("/api"):
            return self
        return replace(self, body={**self.body, "stream": False})


def thinking_budget() -> str:
    """SGLang's thinking budget with tokens that the demo models have, as a request gives it.

    An assistant's message begins the thinking, and " the" ends it.
    """

    # A class that a module does not name is sent as code, as that of any client is.
    class DemoThinkingBudget(ThinkingBudgetLogitProcessor):
        THINKING_START_TOKEN_ID = START_OF_MESSAGE
        THINKING_END_TOKEN_ID = THE
        NEW_LINE_TOKEN_ID = NEW_LINE

    return str(DemoThinkingBudget.to_str())


@cache
def processors() -> dict[str, Params]:
    """Parameters of requests with a custom logit processor, by its name."""
    ngram = {"ngram_size": 3, "window_size": 60}
    return {
        "thinking budget": {
            "custom_logit_processor": thinking_budget(),
            "custom_params": {"thinking_budget": 6},
        },
        "no repeated n-gram": {
            "custom_logit_processor": DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
            "custom_params": {**ngram, "whitelist_token_ids": [NEW_LINE]},
        },
        "disallowed tokens": {
            "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
            "custom_params": {"token_ids": [NEW_LINE, THE, DOT]},
        },
    }


@cache
def parameters() -> dict[str, Sequence[Params]]:
    """Values of each parameter of /generate, by its name. All leave greedy decoding greedy."""
    return {
        "nothing": [{}],
        "presence_penalty": [{"presence_penalty": p} for p in (0.6, 2.0, -0.8)],
        "frequency_penalty": [{"frequency_penalty": p} for p in (0.4, 1.7, -0.3)],
        "repetition_penalty": [{"repetition_penalty": p} for p in (1.15, 1.6, 0.8)],
        "min_new_tokens": [{"min_new_tokens": n} for n in (1, 9, MAX_TOKENS)],
        "max_new_tokens": [{"max_new_tokens": n} for n in (0, 1, 2, 7)],
        "logit_bias": [
            {"logit_bias": {str(NEW_LINE): 4.0, str(THE): 2.5}},
            {"logit_bias": {str(NEW_LINE): -100.0, str(DOT): -100.0}},
            {"logit_bias": {str(END_OF_MESSAGE): 6.0}},
        ],
        "min_p": [{"min_p": p} for p in (0.1, 0.9)],
        "top_p": [{"top_p": p} for p in (0.3, 0.95)],
        "top_k": [{"top_k": 7}, {"temperature": 1.0, "top_k": 1}],
        "stop": [{"stop": "\n"}, {"stop": [" the", "en"]}, {"stop": ["never in it"]}],
        "stop_token_ids": [{"stop_token_ids": [NEW_LINE]}, {"stop_token_ids": [THE, DOT]}],
        "stop_regex": [{"stop_regex": r"[aeiou]{2}"}, {"stop_regex": [r"\d\d", r"\)"]}],
        "ignore_eos": [{"ignore_eos": True}],
        "no_stop_trim": [
            {"no_stop_trim": True, "stop": ["\n", " the"]},
            {"no_stop_trim": True, "stop_token_ids": [NEW_LINE, DOT]},
            {"no_stop_trim": True},
        ],
        "skip_special_tokens": [
            {"skip_special_tokens": False},
            {"skip_special_tokens": False, "ignore_eos": True},
        ],
        "spaces_between_special_tokens": [
            {"spaces_between_special_tokens": False, "skip_special_tokens": False}
        ],
        "regex": [{"regex": r"[a-z ]{3,25}\."}, {"regex": r"(yes|no|maybe)( indeed)?"}],
        "json_schema": [{"json_schema": json.dumps(SCHEMA)}],
        "ebnf": [{"ebnf": EBNF}],
        "n": [{"n": 2}],
        "sampling_seed": [{"sampling_seed": 17}],
        "custom_params": [
            {"custom_params": {"another plugin": {"deep": 1}, "list": [1, None, "x"]}}
        ],
        "custom_logit_processor": list(processors().values()),
        "return_logprob": [
            {"return_logprob": True},
            {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
            {"return_logprob": True, "token_ids_logprob": [THE, END_OF_MESSAGE]},
        ],
    }


# At most one of each group is in a request. What a grammar forbids, a processor or min_new_tokens
# may leave as the only token. In which order plain serving applies additive penalties and
# repetition_penalty differs between its processes, without overlap scheduling.
_ONE_OF = (
    {"regex", "json_schema", "ebnf", "custom_logit_processor"},
    {"regex", "json_schema", "ebnf", "min_new_tokens"},
    {"regex", "json_schema", "ebnf", "ignore_eos"},  # test_every_parameter.py has what differs
    {"presence_penalty", "repetition_penalty"},
    {"frequency_penalty", "repetition_penalty"},
)
# What changes logits; a combination has some of these, and some of the others.
_CHANGING = {
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_new_tokens"),
    *("logit_bias", "regex", "json_schema", "ebnf", "custom_logit_processor"),
}
# Values under which tokens are drawn at random.
_DRAWN: Mapping[str, Sequence[Any]] = {
    "temperature": (0.4, 0.8, 1.0, 1.4),
    "top_p": (0.6, 0.9, 1.0),
    "top_k": (2, 5, 40, -1),
    "min_p": (0.0, 0.05, 0.3),
}


def combination(random: Random) -> dict[str, Any]:
    """Draw values of two to six parameters. "n", which multiplies answers, is not among them."""
    changing = sorted(_CHANGING)
    others = sorted(parameters().keys() - _CHANGING - {"nothing", "n", "max_new_tokens"})
    drawn: dict[str, Any] = {"max_new_tokens": random.randint(8, 2 * MAX_TOKENS)}
    names = random.sample(changing, random.randint(1, 3))
    for name in names + random.sample(others, random.randint(1, 3)):
        value = random.choice(parameters()[name])  # some values set several parameters
        asked = drawn.keys() | value.keys()
        if any(len(group & asked) > 1 for group in _ONE_OF):
            continue
        if "custom_params" in drawn.keys() & value.keys():
            continue  # a processor needs its own
        drawn |= value
    if "min_new_tokens" in drawn:
        drawn["min_new_tokens"] = random.randint(1, drawn["max_new_tokens"])
    return drawn


def drawn_sampling(random: Random) -> dict[str, Any]:
    """Draw parameters under which tokens are drawn at random."""
    return {
        name: random.choice(values)
        for name, values in _DRAWN.items()
        if name == "temperature" or random.random() < 0.5
    }


def mixed_requests(seed: int, count: int, *, share_drawn: float) -> list[dict[str, Any]]:
    """Draw parameters of so many requests. That share of them is sampled, with seeds of their own;
    the others are greedy."""
    random = Random(seed)
    requests = []
    for _ in range(count):
        params = combination(random)
        if random.random() < share_drawn:
            params |= {"top_k": -1} | drawn_sampling(random)
            params["sampling_seed"] = random.choice([0, 1, 42, -5, 2**40 + random.randint(0, 99)])
        requests.append(params)
    return requests


def alone_and_combined() -> dict[str, Params]:
    """Each parameter alone, and twenty random combinations, by name; all greedy."""
    alone = {
        f"{name} {number}": params
        for name, values in parameters().items()
        for number, params in enumerate(values)
    }
    random = Random(53)
    return alone | {f"combination {number}": combination(random) for number in range(20)}


@cache
def questions() -> list[str]:
    """First messages of users, of all families in turn, none of them long."""
    sessions = [demo_sessions(family, count=12, seed=5) for family in FAMILIES]
    return [
        session.turns[0].user
        for of_each in zip(*sessions, strict=True)
        for session in of_each
        if len(session.turns[0].user) < 260
    ]


def prompt_of(question: str) -> str:
    """The question as the demo models' chat template renders it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def all_kinds() -> list[Kind]:
    """All kinds of requests. Each has a cache key of its own, so that none finds another's text."""
    kinds: list[Kind] = []
    for number, (name, path, body) in enumerate(_requests()):
        question = questions()[number % len(questions())]
        body = _with_input(path, dict(body), question)
        _isolate(path, body, key=f"kind {number}")
        is_drawn = name.startswith("drawn")
        kinds.append(Kind(f"{number}: {path}: {name}", path, body, is_drawn))
    return kinds


def _with_input(path: str, body: dict[str, Any], question: str) -> dict[str, Any]:
    """Add the question to a body that says nothing of an input, where the API wants it."""
    prompt = prompt_of(question)
    if path == "/generate":
        is_told = body.keys() & {"text", "input_ids", "sampling_params"}
        return body if is_told else request_body(prompt, **{"max_new_tokens": MAX_TOKENS, **body})
    if path == "/v1/completions":
        return {"model": "default", "prompt": prompt, "temperature": 0, **_short(body)}
    message = {"role": "user", "content": question}
    if path in ("/v1/chat/completions", "/v1/messages"):
        return {"model": "default", "messages": [message], "temperature": 0, **_short(body)}
    if path == "/v1/responses":
        return {"model": "default", "input": question, "temperature": 0, "store": False, **body}
    if path == "/api/chat":
        return {"model": "default", "messages": [message], **body}
    assert path == "/api/generate"
    return {"model": "default", "prompt": prompt, "raw": True, **body}


def _short(body: Params) -> Params:
    return body if "max_completion_tokens" in body else {"max_tokens": MAX_TOKENS, **body}


def _isolate(path: str, body: dict[str, Any], *, key: str) -> None:
    if path.startswith("/api") or path == "/v1/messages":
        return  # these cannot say
    prompts = body.get("text") or body.get("input_ids") or body.get("prompt")
    is_batch = isinstance(prompts, list) and isinstance(prompts[0], str | list)
    # Prompts of one batch would find one another, depending on which is prefilled first.
    body["extra_key"] = [f"{key}, {i}" for i in range(len(prompts))] if is_batch else key


def _requests() -> Iterator[tuple[str, str, Params]]:
    """Name, path and the body without its input."""
    yield from _generate()
    yield from _batches()
    yield from _refused()
    for path, limit in (("/v1/completions", "max_tokens"), ("/v1/chat/completions", "max_tokens")):
        for name, body in _openai(path, limit):
            yield name, path, body
    yield from _other_apis()


def _generate() -> Iterator[tuple[str, str, Params]]:
    for name, params in alone_and_combined().items():
        yield name, "/generate", params
    random = Random(7)
    for name, values in parameters().items():
        yield f"stream, {name}", "/generate", {**random.choice(values), "stream": True}
    for interval in (1, 3, 50):
        yield (
            f"stream, interval {interval}",
            "/generate",
            {"stream": True, "stream_interval": interval},
        )
    logprobs = [
        {"logprob_start_len": start, "top_logprobs_num": top, "token_ids_logprob": ids}
        for start in (-1, 0, 5)
        for top, ids in ((0, None), (1, None), (5, [THE]), (0, [NEW_LINE, DOT]))
    ]
    for number, params in enumerate(logprobs):
        yield f"logprobs {number}", "/generate", {"return_logprob": True, **params}
    first = {"return_logprob": True, "top_logprobs_num": 3}
    for name in ("presence_penalty", "repetition_penalty", "logit_bias", "min_new_tokens"):
        for number, params in enumerate(parameters()[name]):
            yield f"logprobs, {name} {number}", "/generate", {**first, **params}
    for name, params in processors().items():
        yield f"logprobs, {name}", "/generate", {**first, **params}
    for change in (
        {"return_text_in_logprobs": True},
        {"stream": True},
        # With 0 tokens, plain serving's answer depends on the batch: test_requests.py has it.
        {"max_new_tokens": 2, "logprob_start_len": 0},
        {"max_new_tokens": 1, "logprob_start_len": 2},
        {"n": 2},
        {"stop": ["\n"]},
        {"regex": "[a-c]{2,9}"},
    ):
        yield f"logprobs, {change}", "/generate", {**first, **change}
    drawn = Random(11)
    for number in range(12):
        sampling = drawn_sampling(drawn) | {"ignore_eos": True, "n": 1 + number % 2}
        yield f"drawn {number}", "/generate", sampling
    penalised = {"temperature": 1.0, "presence_penalty": 1.0, "ignore_eos": True}
    yield "drawn, penalties", "/generate", penalised
    for name, params in processors().items():
        yield f"drawn, {name}", "/generate", {"temperature": 0.9, "ignore_eos": True, **params}
    for n in (2, 3):
        yield f"n {n}, stream", "/generate", {"n": n, "stream": True}
        yield f"n {n}, penalty", "/generate", {"n": n, "frequency_penalty": 1.0}


def _batches() -> Iterator[tuple[str, str, Params]]:
    texts = [prompt_of(question) for question in questions()[3:6]]
    ids = [[START_OF_MESSAGE, 40 + i, 50, 60 + i, NEW_LINE] for i in range(3)]
    short: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
    different = [
        {**short, "presence_penalty": 1.0},
        {**short, "min_new_tokens": 9, "repetition_penalty": 1.4},
        {**short, "stop": ["\n"]},
    ]
    for name, body in {
        "one of input_ids": {"input_ids": ids[0], "sampling_params": short},
        "one token": {"input_ids": [5], "sampling_params": short},
        "texts": {"text": texts, "sampling_params": short},
        "input_ids": {"input_ids": ids, "sampling_params": short},
        "parameters of each": {"text": texts, "sampling_params": different},
        "n": {"text": texts[:2], "sampling_params": {**short, "n": 2}},
        "stream": {"text": texts, "sampling_params": different, "stream": True},
        "logprobs of some": {
            "text": texts,
            "sampling_params": different,
            "return_logprob": [True, False, True],
            "top_logprobs_num": [2, 0, 0],
        },
        "a processor of one": {
            "text": texts[:2],
            "sampling_params": [
                {**short, "custom_params": processors()["thinking budget"]["custom_params"]},
                short,
            ],
            "custom_logit_processor": [
                processors()["thinking budget"]["custom_logit_processor"],
                None,
            ],
        },
        "both inputs": {"text": "a", "input_ids": ids[0], "sampling_params": short},
        "no parameters but greedy": {"text": texts[0], "sampling_params": {"temperature": 0}},
    }.items():
        yield f"batch, {name}", "/generate", body


def _refused() -> Iterator[tuple[str, str, Params]]:
    """Requests that get an error."""
    for params in (
        {"temperature": -0.5},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"top_k": -7},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 2.5},
        {"min_new_tokens": -1},
        {"min_new_tokens": 50, "max_new_tokens": 5},
        {"max_new_tokens": -3},
        {"logit_bias": {"2048": 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"sampling_seed": "seven"},
        {"sampling_seed": 2**63},
        {"regex": "a+", "json_schema": "{}"},
        {"stop": [str(i) for i in range(33)]},
        {"stop_regex": "a" * 300},
        {"unheard_of": 1},
        {"n": 0},
    ):
        yield f"refused, {params!s:.60}", "/generate", params
    for name, body in {
        "too long": {"input_ids": [5] * (CONTEXT + 10), "sampling_params": {}},
        "no input": {"sampling_params": {}},
    }.items():
        yield f"refused, {name}", "/generate", body


def _openai(path: str, limit: str) -> Iterator[tuple[str, Params]]:
    """What both APIs of OpenAI have in common, and then what only one has."""
    common: dict[str, Sequence[Params]] = {
        "nothing": [{}],
        "stop": [{"stop": ["\n", " the"]}],
        "logit_bias": [{"logit_bias": {str(NEW_LINE): -100.0, str(THE): 3.0}}],
        "presence_penalty": [{"presence_penalty": 1.2}],
        "frequency_penalty": [{"frequency_penalty": 0.9}],
        "repetition_penalty": [{"repetition_penalty": 1.3}],
        "min_tokens": [{"min_tokens": 20}],
        limit: [{limit: 1}, {limit: 9}],
        "top": [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.4}],
        "seed": [{"seed": 5}],
        "ignore_eos": [{"ignore_eos": True}],
        "no_stop_trim": [{"no_stop_trim": True, "stop": ["\n", " the"]}],
        "stop_token_ids": [{"stop_token_ids": [NEW_LINE]}],
        "stop_regex": [{"stop_regex": r"[aeiou]{2}"}],
        "skip_special_tokens": [{"skip_special_tokens": False}],
        "regex": [{"regex": r"[a-z ]{3,25}\."}],
        "ebnf": [{"ebnf": EBNF}],
        "response_format": [
            {"response_format": {"type": "json_object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "verdict", "schema": SCHEMA},
                }
            },
        ],
        "n": [{"n": 2}],
        "processor": list(processors().values()),
        "user": [{"user": "somebody", "custom_params": {"another plugin": 1}}],
    }
    for name, values in common.items():
        for number, body in enumerate(values):
            yield f"{name} {number}", body
        yield f"stream, {name}", {**values[-1], "stream": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    yield "stream, usage", usage
    yield "stream, usage, penalties", {**usage, "presence_penalty": 0.7, "min_tokens": 10}
    yield "drawn", {"temperature": 1.0, "ignore_eos": True, "presence_penalty": 0.4}
    for bad in ({"temperature": -1}, {"top_p": 2}, {"n": 0}, {"logit_bias": {"9999": 1.0}}):
        yield f"refused, {bad}", bad
    if path == "/v1/completions":
        yield "logprobs", {"logprobs": 3}
        yield "logprobs, stream", {"logprobs": 2, "stream": True}
        yield "logprobs, penalty", {"logprobs": 2, "frequency_penalty": 1.0}
        yield "echo", {"echo": True}
        yield "echo, logprobs", {"echo": True, "logprobs": 1}
        yield "suffix", {"suffix": "the end"}
        yield "prompts", {"prompt": [prompt_of(question) for question in questions()[7:9]]}
        yield "token ids", {"prompt": [START_OF_MESSAGE, 40, 50, NEW_LINE]}
        yield "prompts, stream", {"prompt": ["One, two, ", "def get_"], "stream": True}
        yield "min_tokens, stop", {"min_tokens": 15, "stop": ["\n"], "stop_token_ids": [DOT]}
    else:
        logprobs = {"logprobs": True, "top_logprobs": 3}
        yield "logprobs", logprobs
        yield "logprobs, stream", {**logprobs, "stream": True}
        yield "logprobs, penalty", {**logprobs, "presence_penalty": 1.0}
        yield "max_completion_tokens", {"max_completion_tokens": 6}
        question = {"role": "user", "content": "Hello, my name is Karin."}
        begun = {"role": "assistant", "content": "Hello Karin,"}
        yield (
            "continue_final_message",
            {"messages": [question, begun], "continue_final_message": True},
        )
        more = {"role": "user", "content": "Tell me a fun fact."}
        system = {"role": "system", "content": "Be brief."}
        yield "several messages", {"messages": [system, question, begun, more]}
        yield "several messages, stream", {"messages": [question, begun, more], "stream": True}
        yield "no temperature, top_k 1", {"temperature": None, "top_k": 1}
        yield "min_tokens, stop", {"min_tokens": 15, "stop": ["\n"], "stop_token_ids": [DOT]}


def _other_apis() -> Iterator[tuple[str, str, Params]]:
    limit = {"max_output_tokens": MAX_TOKENS}
    for name, body in {
        "nothing": {},
        "top_p": {"top_p": 0.5},
        "instructions": {"instructions": "Be brief."},
        "presence_penalty": {"presence_penalty": 1.0},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "stop": {"stop": ["\n"]},
        "top_k": {"temperature": 1.0, "top_k": 1},
    }.items():
        for is_stream in (False, True):
            yield name, "/v1/responses", {**limit, **body, "stream": is_stream}
    greedy = {"temperature": 0, "num_predict": MAX_TOKENS}
    for path in ("/api/chat", "/api/generate"):
        for options in (greedy, {**greedy, "stop": ["\n"]}, {**greedy, "presence_penalty": 1.0}):
            for is_stream in (False, True):
                yield f"{options}", path, {"options": options, "stream": is_stream}
    for body in ({}, {"stop_sequences": ["\n"]}, {"top_k": 1, "temperature": 1.0}):
        for is_stream in (False, True):
            yield f"{body}", "/v1/messages", {**body, "stream": is_stream}
