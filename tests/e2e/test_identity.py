"""Greedy output is token for token that of plain serving, whatever drafted it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CHAIN, assert_same_alone_and_together, mixing

LONG_CHAIN = ("--speculative-num-steps", "6", "--speculative-eagle-topk", "1")
LONG_TREE = (
    *("--speculative-num-steps", "5", "--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "24"),
)
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
        state = server.hvd_state()
        assert len([num for num in state["num_steps_by_width"].values() if num]) > 1
        assert state["costs"]["num_timed_steps"] > 0
    else:
        assert used == SOURCES[policy]


def _assert_same_as_plain(server: Any, expected: list[list[int]], prompts: list[str]) -> None:
    assert_same_alone_and_together(server, expected, prompts)
    state = server.hvd_state()
    assert state["num_requests"] == 0
    assert state["num_resyncs"] == 0
    assert 0 < state["steps"]["host_share"] < 1


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("payoff", ()),
        ("payoff", mixing("payoff")),
        ("frequency", ()),
        ("cache", ()),
        ("cache", WIDE),
        ("cache", PAPER),
        ("frequency", PAPER),
        ("payoff", ("--hvd-verify-width", "48", *mixing("payoff"))),
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
@pytest.mark.parametrize("policy", ["allocate", "payoff", "frequency", "cache", "model"])
def test_every_policy_with_a_model_chain_and_pages(
    policy: str,
    page_size: str,
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd(policy, *mixing(policy), "--page-size", page_size, drafting=CHAIN)
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
    server = start_hvd(policy, *mixing(policy), shape="qwen3")
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
    server = start_hvd(policy, *mixing(policy), "--chunked-prefill-size", "64")
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


def test_the_model_drafter_runs_for_some_of_a_batch(
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd("payoff", *mixing("payoff"))
    _assert_same_as_plain(server, expected, prompts)
    state = server.hvd_state()
    assert 0 < state["num_partial_draft_rounds"] < state["num_model_draft_rounds"]


@pytest.mark.parametrize("drafting", [CHAIN, LONG_CHAIN], ids=["3 steps", "6 steps"])
def test_both_drafts_of_a_model_chain_in_one_tree(
    drafting: tuple[str, ...],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd("both", drafting=drafting)
    _assert_same_as_plain(server, expected, prompts)
    _assert_sources(server, "both")


@pytest.mark.parametrize("drafting", [LONG_TREE, LONG_CHAIN], ids=["tree", "chain"])
def test_widths_sources_and_draft_steps_that_change_in_every_step(
    drafting: tuple[str, ...],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    varying_costs: Path,
) -> None:
    expected = plain_ids(prompts)
    # 24 nodes, and in steps of one or two requests more than twice as many: SGLang would not keep
    # room for these by itself.
    server = start_hvd(
        *("allocate", "--hvd-costs", str(varying_costs)),
        *("--hvd-verify-width", "24", "--hvd-wide-width", "64"),
        drafting=drafting,
    )
    _assert_same_as_plain(server, expected, prompts)
    state = server.hvd_state()
    assert state["num_steps_by_width"]["64"] > 0
    assert len([num for num in state["num_steps_by_width"].values() if num]) >= 4
    assert {source for source, num in state["num_cycles"].items() if num} >= {"cache", "both"}
    assert state["num_partial_draft_rounds"] > 0
    assert len(state["num_drafts_by_steps"]) >= 2
    assert state["costs"]["about"] == "made up"


@pytest.mark.parametrize("drafting", [LONG_TREE, CHAIN], ids=["tree", "chain"])
def test_a_postponed_draft_extend_leaves_the_same_draft_kv(
    drafting: tuple[str, ...],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    cycles = {}
    for postpones in ("true", "false"):
        server = start_hvd(
            "frequency",  # its gate does not depend on what was accepted before
            *("--hvd-postpone-extend", postpones, "--hvd-report-cycles", "true"),
            # Nothing passes from one request to another, so that they may run together: not
            # drafts, and not the KV cache of a reply, which lacks what its end lacked.
            *("--hvd-shared-cache-tokens", "0", "--hvd-session-cache-tokens", "0"),
            "--disable-radix-cache",
            drafting=drafting,
        )
        cycles[postpones] = []
        for concurrency in (1, 8):
            answers = server.generate_all(prompts, concurrency=concurrency)
            assert [answer["output_ids"] for answer in answers] == expected
            cycles[postpones].append([a["meta_info"]["hvd"][0]["cycles"] for a in answers])
        state = server.hvd_state()
        assert (state["num_catch_ups"] > 0) == (postpones == "true")
        # Enough to postpone; how many there are depends on the machine that trained the models.
        assert state["num_cycles"]["cache"] > state["num_cycles"]["model"] / 8
    assert cycles["true"] == cycles["false"]
