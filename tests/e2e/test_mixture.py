"""Requests of all kinds at once: each greedy one gets what plain serving gives it alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from tests.e2e.conftest import SMALL_TREE, Server, StartServer, request_body
from tests.e2e.test_overlap import INTERPRETED

NUM_REQUESTS = 120
SCHEMA = json.dumps(
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
)
# What a request asks for, and how often.
KINDS: Sequence[tuple[Mapping[str, Any], int]] = (
    ({}, 8),
    ({"stop": ["\n"]}, 2),
    ({"stop": [" the", '",']}, 1),
    ({"ignore_eos": True}, 2),
    ({"regex": "[a-z ]{3,30}"}, 1),
    ({"json_schema": SCHEMA}, 1),
    ({"return_logprob": True}, 1),
    ({"extra_key": "another tenant"}, 2),
    ({"frequency_penalty": 0.5}, 1),
    ({"temperature": 0.8}, 2),
    ({"temperature": 1.2, "n": 2}, 1),
    ({"stream": True}, 3),  # the client disconnects before the end
)


@pytest.fixture(scope="module")
def bodies(prompts: list[str]) -> list[dict[str, Any]]:
    random = Random(3)
    kinds, weights = zip(*KINDS, strict=True)
    drawn = []
    for params in random.choices(kinds, weights, k=NUM_REQUESTS):
        prompt = random.choice(prompts)
        if random.random() < 0.2:  # not a whole message, and mostly short
            prompt = prompt[-random.randint(1, 200) :]
        length = random.choice([1, 2, 3, 8, 40, 100])
        drawn.append(request_body(prompt, **{"max_new_tokens": length, **params}))
    return drawn


@pytest.fixture(scope="module")
def expected(start_server: StartServer, bodies: list[dict[str, Any]]) -> list[Any]:
    # With overlap SGLang's own penalties come one token late.
    plain = start_server("--disable-overlap-schedule")
    return [_outcome(plain, body) if _is_comparable(body) else None for body in bodies]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in turn", "running ahead"])
def test_requests_of_all_kinds_at_once(
    is_ahead: bool,
    start_hvd: Callable[..., Server],
    running_ahead: tuple[str, ...],
    bodies: list[dict[str, Any]],
    expected: list[Any],
) -> None:
    server = start_hvd(
        "allocate",
        *(running_ahead if is_ahead else ()),
        *("--max-running-requests", "8", "--chunked-prefill-size", "128", "--enable-metrics"),
        # Too few KV slots, and the scheduler promises too many: some requests are retracted.
        *("--max-total-tokens", "2200", "--schedule-conservativeness", "0.05"),
        drafting=SMALL_TREE,
        environment=INTERPRETED if is_ahead else None,
    )
    # Steps that run ahead are interpreted, and slow.
    num_asked = NUM_REQUESTS // 3 if is_ahead else NUM_REQUESTS
    with ThreadPoolExecutor(24) as pool:
        outcomes = list(pool.map(lambda body: _outcome(server, body), bodies[:num_asked]))
    for outcome, body, expectation in zip(outcomes, bodies, expected, strict=False):
        if _is_comparable(body):
            assert outcome == expectation, body
    server.wait_until_idle()
    state = server.hvd_state()
    assert state["num_resyncs"] == 0
    assert (state["num_steps_ahead"] > 0) == is_ahead
    assert all(state["num_cycles"][source] > 0 for source in ("cache", "model"))


def _is_comparable(body: Mapping[str, Any]) -> bool:
    """Whether plain serving gives the same. Sampled output differs."""
    return body["sampling_params"]["temperature"] == 0 and "stream" not in body


def _outcome(server: Server, body: Mapping[str, Any]) -> Any:
    if "stream" in body:
        with contextlib.closing(server.stream(body)) as response:
            response.readline()
        return None
    answer = server.process.post("/generate", body)
    if isinstance(answer, list):  # n > 1
        return len(answer)
    return answer["text"], answer["output_ids"], answer["meta_info"]["finish_reason"]
