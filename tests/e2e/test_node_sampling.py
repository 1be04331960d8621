"""Every parameter that changes logits or sampling acts on each token as in plain serving, whatever
was drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
CHAIN += ("--speculative-num-draft-tokens", "4")
# With overlap SGLang's penalties come one token late.
PLAIN = ("--disable-overlap-schedule",)

ALONE: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 40},
    {"min_new_tokens": 60, "frequency_penalty": -0.3},
    {"logit_bias": {"5": 4.0, "17": -3.0}},
    {"min_p": 0.3, "temperature": 1.0, "top_k": 1},
    {"repetition_penalty": 0.8, "logit_bias": {"9": 2.5}},
]


def random_params(rng: random.Random) -> dict[str, Any]:
    """A combination of parameters. Repetition penalties stand without the other two: in which order
    plain serving applies them is different in each of its processes."""
    params: dict[str, Any] = {"max_new_tokens": rng.randint(1, 96)}
    if rng.random() < 0.3:
        params["repetition_penalty"] = rng.choice([0.7, 1.1, 1.5])
    else:
        if rng.random() < 0.6:
            params["frequency_penalty"] = rng.uniform(-1, 1.5)
        if rng.random() < 0.6:
            params["presence_penalty"] = rng.uniform(-1, 1.5)
    if rng.random() < 0.5:
        params["min_new_tokens"] = rng.randint(0, params["max_new_tokens"])
    if rng.random() < 0.5:
        params["logit_bias"] = {str(rng.randrange(200)): rng.uniform(-5, 5) for _ in range(5)}
    return params


COMBINED = [random_params(random.Random(seed)) for seed in range(20)]


@pytest.fixture(params=["allocate", "payoff", "both", "cache", "chain"])
def server(
    request: pytest.FixtureRequest,
    start_hvd: Callable[..., Any],
    untimed: Callable[[str], tuple[str, ...]],
) -> Iterator[Any]:
    policy = request.param
    if policy == "chain":
        yield start_hvd("payoff", "--hvd-threshold", "1.5", drafting=CHAIN)
    else:
        threshold = ("--hvd-threshold", "1.5") if policy == "payoff" else ()
        yield start_hvd(policy, *threshold, *untimed(policy))


@pytest.mark.parametrize("at_once", [1, 16])
def test_greedy_replies_equal_plain_servings(
    at_once: int, server: Any, start_server: Callable[..., Any], prompts: list[str]
) -> None:
    kinds = [*ALONE, *COMBINED]
    asked = [(prompts[i % len(prompts)], kind) for i, kind in enumerate(kinds)]
    expected = _replies(start_server(*PLAIN), asked, at_once=16)
    server.flush_cache()
    for _ in ("cold", "warm"):
        assert _replies(server, asked, at_once=at_once) == expected


def _replies(
    server: Any, asked: list[tuple[str, dict[str, Any]]], *, at_once: int
) -> list[list[int]]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda one: server.generate(one[0], **one[1]), asked)
        return [answer["output_ids"] for answer in answers]


SEEDED = ("--enable-deterministic-inference", "--attention-backend", "torch_native")


def seeded_params(rng: random.Random) -> dict[str, Any]:
    params = {**random_params(rng), "temperature": rng.choice([0.0, 0.6, 1.0, 1.7])}
    params["sampling_seed"] = rng.randrange(2**31)
    if rng.random() < 0.4:
        params["top_k"] = rng.randint(2, 40)
    if rng.random() < 0.4:
        params["top_p"] = rng.uniform(0.5, 0.99)
    return params


def test_a_seed_gives_plain_servings_reply(
    start_hvd: Callable[..., Any], start_server: Callable[..., Any], prompts: list[str]
) -> None:
    rng = random.Random(1)
    asked = [(prompts[i % len(prompts)], seeded_params(rng)) for i in range(200)]
    expected = _replies(start_server(*PLAIN, *SEEDED), asked, at_once=1)
    server = start_hvd("payoff", "--hvd-threshold", "1.5", *SEEDED, drafting=CHAIN)
    server.flush_cache()
    for at_once in (16, 1):  # cold, then warm
        assert _replies(server, asked, at_once=at_once) == expected
    accepted = server.hvd_state()["num_accepted_drafts"]
    assert accepted["cache"] > 0
    assert accepted["model"] > 0
