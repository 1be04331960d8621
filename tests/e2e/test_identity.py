"""Greedy output equals plain serving's token by token, whatever drafted it."""

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
# Cache drafts of up to 64 tokens, and a model drafter's tree of 16 nodes.
WIDE = ("--hvd-verify-width", "65")
PAPER = ("--hvd-set", "cache_mode=paper")
# The sources of the drafts that the tests' requests must verify under each policy.
SOURCES = {
    "payoff": {"cache", "model"},
    "frequency": {"cache", "model"},
    "cache": {"cache", "plain"},
    "model": {"model"},
    "both": {"both", "model"},
}


def _assert_sources(server: Any, policy: str) -> None:
    used = {source for source, count in server.hvd_state()["num_cycles"].items() if count}
    if policy == "allocate":  # which source pays depends on the machine
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


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("payoff", ()),
        ("payoff", mixing("payoff")),
        ("frequency", ()),
        ("cache", ()),
        ("cache", WIDE),
        ("cache", PAPER),
        pytest.param("frequency", PAPER, marks=pytest.mark.slow),
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
    if flags == mixing("payoff"):  # the model drafter runs for some requests of a batch
        state = server.hvd_state()
        assert 0 < state["num_partial_draft_rounds"] < state["num_model_draft_rounds"]


@pytest.mark.parametrize("page_size", [pytest.param("1", marks=pytest.mark.slow), "16"])
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


@pytest.mark.slow  # HVD does not depend on the target's architecture
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
    # 24 nodes, and in steps of one or two requests more than twice as many, for which SGLang would
    # not keep room by itself.
    server = start_hvd(
        *("allocate", "--hvd-costs", str(varying_costs)),
        *("--hvd-verify-width", "24", "--hvd-set", "wide_width=64"),
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


@pytest.mark.parametrize(
    ("postpones", "drafting"),
    [
        pytest.param("always", LONG_TREE, id="always, tree"),
        pytest.param("plain", CHAIN, id="plain, chain"),
        pytest.param("always", CHAIN, id="always, chain", marks=pytest.mark.slow),
        pytest.param("plain", LONG_TREE, id="plain, tree", marks=pytest.mark.slow),
    ],
)
def test_a_postponed_draft_extend_leaves_the_same_draft_kv(
    postpones: str,
    drafting: tuple[str, ...],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    tmp_path: Path,
) -> None:
    expected = plain_ids(prompts)
    costs = tmp_path / "costs.yaml"
    # Steps without drafts and with the model drafter's take turns. Draft-extend is free: with a
    # price, postponing it would change which steps have drafts.
    costs.write_text(
        "{about: made up, batch_sizes: [1, 16], widths: [1, 2, 32], draft_once: [3, 3], "
        "draft_round: [1, 1], verify: [[5, 7, 9], [6, 9, 16]], "
        "draft_extend: [[0, 0, 0], [0, 0, 0]]}"
    )
    policy_of: dict[str, tuple[str, ...]] = {
        "always": ("frequency",),  # its gate does not depend on what was accepted before
        "plain": ("allocate", "--hvd-costs", str(costs)),
    }
    cycles = {}
    for mode in (postpones, "never"):
        server = start_hvd(
            *policy_of[postpones],
            *("--hvd-set", f"postpone_extend={mode}", "--hvd-report-cycles", "true"),
            # Nothing passes from one request to another, so that they may run together: no drafts,
            # and no KV cache of a reply, whose end would lack what was postponed.
            *("--hvd-shared-cache-tokens", "0", "--hvd-set", "session_cache_tokens=0"),
            "--disable-radix-cache",
            drafting=drafting,
        )
        cycles[mode] = []
        # Policy allocate plans a batch as a whole, and chance decides which requests share one.
        for concurrency in (1, 8) if postpones == "always" else (1,):
            answers = server.generate_all(prompts, concurrency=concurrency)
            assert [answer["output_ids"] for answer in answers] == expected
            cycles[mode].append([_decisions(answer) for answer in answers])
        state = server.hvd_state()
        assert (state["num_catch_ups"] > 0) == (mode == postpones)
        # Enough steps postpone. How many do depends on the machine that trained the models.
        num_cycles = state["num_cycles"]
        num_postponed = num_cycles["cache" if postpones == "always" else "plain"]
        assert num_postponed > num_cycles["model"] / 8
        assert num_cycles["model"] > 5
    assert cycles[postpones] == cycles["never"]


def _decisions(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer's cycles without the time, and what depends on the other requests."""
    others = {"ms", "requests", "width"}
    cycles = answer["meta_info"]["hvd"][0]["cycles"]
    return [{key: cycle[key] for key in cycle.keys() - others} for cycle in cycles]
