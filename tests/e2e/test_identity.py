"""Greedy output is token for token that of plain serving, whatever drafted it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# Low enough that cache and model drafts mix within one batch.
MIXING = ("--hvd-threshold", "1.5")
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
# Cache drafts of up to 64 tokens, verified beside a model drafter's tree of 16 nodes.
WIDE = ("--hvd-verify-width", "65")
PAPER = ("--hvd-cache-mode", "paper")
# What the requests of the tests must have verified under each policy.
SOURCES = {
    "payoff": {"cache", "model"},
    "frequency": {"cache", "model"},
    "cache": {"cache", "plain"},
    "model": {"model"},
    "both": {"both", "model"},
}


def _assert_sources(server: Any, policy: str) -> None:
    used = {source for source, count in server.hvd_state()["num_cycles"].items() if count}
    if policy == "allocate":  # what pays depends on the machine
        assert len(used) > 1
    else:
        assert used == SOURCES[policy]


def _assert_same_as_plain(
    server: Any, expected: list[list[int]], prompts: list[str], **params: Any
) -> None:
    for concurrency in (1, 16):
        server.flush_cache()  # else the second round is one long cache draft
        answers = server.generate_all(prompts, concurrency=concurrency, **params)
        assert [answer["output_ids"] for answer in answers] == expected
    state = server.hvd_state()
    assert state["num_requests"] == 0
    assert state["num_resyncs"] == 0
    assert 0 < state["steps"]["host_share"] < 1


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("payoff", ()),
        ("payoff", MIXING),
        ("frequency", ()),
        ("cache", ()),
        ("cache", WIDE),
        ("cache", PAPER),
        ("frequency", PAPER),
        ("payoff", ("--hvd-verify-width", "48", *MIXING)),
        ("model", ()),
        ("both", ()),
        ("both", WIDE),
        ("allocate", ()),
        ("allocate", WIDE),
    ],
)
def test_every_policy_with_a_model_tree(
    policy: str,
    flags: tuple[str, ...],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd(policy, *flags)
    _assert_same_as_plain(server, expected, prompts)
    _assert_sources(server, policy)


@pytest.mark.parametrize("page_size", ["1", "16"])
@pytest.mark.parametrize("policy", ["allocate", "payoff", "frequency", "cache", "model", "both"])
def test_every_policy_with_a_model_chain_and_pages(
    policy: str,
    page_size: str,
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd(policy, *MIXING, "--page-size", page_size, drafting=CHAIN)
    _assert_same_as_plain(server, expected, prompts)
    _assert_sources(server, policy)


@pytest.mark.parametrize("policy", ["allocate", "payoff", "frequency", "cache", "model"])
def test_a_qwen3_target(
    policy: str,
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts, shape="qwen3")
    server = start_hvd(policy, *MIXING, shape="qwen3")
    _assert_same_as_plain(server, expected, prompts)
    _assert_sources(server, policy)


@pytest.mark.parametrize("policy", ["payoff", "cache"])
def test_chunked_prefill(
    policy: str,
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd(policy, *MIXING, "--chunked-prefill-size", "64")
    _assert_same_as_plain(server, expected, prompts)


def test_prefix_cache_hits_and_a_flush_between_requests(
    start_hvd: Callable[..., Any], plain_ids: Callable[..., list[list[int]]], prompts: list[str]
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd("payoff")
    for _ in range(2):
        answers = [server.generate(prompt) for prompt in prompts]
        assert [answer["output_ids"] for answer in answers] == expected
    assert answers[-1]["meta_info"]["cached_tokens"] > 0
    server.flush_cache()
    answer = server.generate(prompts[-1])
    assert answer["output_ids"] == expected[-1]
    assert answer["meta_info"]["cached_tokens"] == 0
