"""Overlap scheduling, and the attention path of a GPU with full masks, in Triton's interpreter.

The interpreter runs the GPU code of SGLang and HVD on the CPU, 100 to 1,000 times slower. Graphs
are replayed without CUDA, through SGLang's own graph runners (patches/README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.costs import StepCosts
from sglang_hvd.view.cycles import Cycle
from tests.e2e.conftest import CHAIN, SMALL_TREE, assert_same_alone_and_together, mixing

INTERPRETED = {"TRITON_INTERPRET": "1"}
REPLAYED = {**INTERPRETED, "SGL_KERNEL_CPU_REPLAYED_GRAPHS": "1"}
# SGLang splits a request's KV in eight, and each split is a program to interpret: two are enough.
# The tokens that it generates to warm up are left out.
TRITON = (
    *("--attention-backend", "triton", "--triton-attention-num-kv-splits", "2"),
    "--skip-server-warmup",
)


@pytest.mark.parametrize(
    "policy",
    [
        "allocate",
        # test_retraction.py has overlap scheduling with this one in every run.
        pytest.param("payoff", marks=pytest.mark.slow),
        pytest.param("cache", marks=pytest.mark.slow),
    ],
)
def test_output_is_that_of_plain_serving_under_overlap_scheduling(
    policy: str,
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    untimed: Callable[[str], tuple[str, ...]],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd(policy, *mixing(policy), *untimed(policy), environment=INTERPRETED)
    assert server.process.get("/server_info")["disable_overlap_schedule"] is False
    assert_same_alone_and_together(server, expected, prompts)
    state = server.hvd_state()
    assert state["num_requests"] == 0
    # Every step was planned from exactly the tokens that SGLang had committed.
    assert state["num_resyncs"] == 0
    assert state["num_cycles"]["cache"] + state["num_cycles"]["both"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--hvd-set", "postpone_extend=always"), marks=pytest.mark.slow),
        ("--hvd-set", "postpone_extend=plain", "--enable-metrics"),
        pytest.param(
            ("--hvd-set", "postpone_extend=never", "--chunked-prefill-size", "64"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["postponed", "as on a GPU", "chunked"],
)
def test_steps_that_run_ahead_give_the_same_output(
    flags: tuple[str, ...],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    running_ahead: tuple[str, ...],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd("allocate", *running_ahead, *flags, environment=INTERPRETED)
    assert_same_alone_and_together(server, expected, prompts)
    state = server.hvd_state()
    assert state["runs_ahead"]
    assert state["num_requests"] == 0
    assert state["num_resyncs"] == 0
    num_steps = state["steps"]["num_steps"]
    assert 0.2 * num_steps < state["num_steps_ahead"] < num_steps
    assert state["num_steps_by_width"]["1"] > state["num_steps_ahead"]
    if "--enable-metrics" in flags:
        server.wait_until_idle()  # /metrics then shows the last steps too
        lines = server.process.get("/metrics").splitlines()
        assert f"sglang:hvd_steps_ahead_total {state['num_steps_ahead']}.0" in lines
    # With a draft-extend after every step, the draft KV never lags.
    assert (state["num_catch_ups"] > 0) == (state["draft_extend"] != "every_step")
    # Steps stop running ahead where a draft pays, and the model drafter is still tried.
    cycles = state["num_cycles"]
    assert cycles["cache"] > 0
    assert state["num_accepted_drafts"]["cache"] > 2 * cycles["cache"]
    assert state["num_model_draft_rounds"] > 0
    # A cycle or a prefill committed every token.
    num_tokens = sum(map(len, expected)) + sum(map(len, expected[1::4]))
    num_requests = len(expected) + len(expected[1::4])
    committed = sum(cycles.values()) + sum(state["num_accepted_drafts"].values())
    assert committed >= num_tokens - num_requests
    # A report has the cycles of steps that ran ahead, too.
    server.flush_cache()
    answer = server.generate(prompts[0], custom_params={"hvd": {"report_cycles": True}})
    assert answer["output_ids"] == expected[0]
    at = 1
    for cycle in map(Cycle.from_report, answer["meta_info"]["hvd"][0]["cycles"]):
        assert cycle.at == at
        assert cycle.source == "plain" or not cycle.ran_ahead
        assert cycle.ms is not None
        assert cycle.ms > 0
        at += cycle.accepted + 1
    assert at >= len(expected[0])


def test_a_long_run_ahead_waits_to_catch_up(
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    tmp_path: Path,
) -> None:
    costs = tmp_path / "costs.yaml"
    # No draft pays.
    costs.write_text(
        "{about: made up, batch_sizes: [1, 16], widths: [1, 2], verify: [[5, 900], [6, 900]], "
        "draft_round: [900, 900], draft_extend: [[1, 1], [1, 1]], wait: [1, 2]}"
    )
    params = {"max_new_tokens": 160, "ignore_eos": True}
    expected = plain_ids(prompts[:2], **params)
    server = start_hvd(
        *("allocate", "--hvd-costs", str(costs), "--hvd-set", "run_ahead=true"),
        *("--hvd-set", "postpone_extend=plain"),
        environment=INTERPRETED,
    )
    answers = server.generate_all(prompts[:2], concurrency=2, **params)
    assert [answer["output_ids"] for answer in answers] == expected
    state = server.hvd_state()
    assert state["num_resyncs"] == 0
    # From the ninth of some 160 steps on, the draft KV catches up after every 64.
    assert state["num_catch_ups"] == 2
    assert 150 < state["num_steps_ahead"] <= state["steps"]["num_steps"] - 3


def test_stops_inside_a_draft_under_overlap_scheduling(
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    long_prompt: str,
) -> None:
    server = start_hvd("payoff", *mixing("payoff"), environment=INTERPRETED)
    [output_ids] = plain_ids([long_prompt])
    for stop in output_ids[6:40:9]:
        server.flush_cache()
        answer = server.generate(long_prompt, stop_token_ids=[stop])
        end = output_ids.index(stop) + 1
        assert answer["output_ids"] == output_ids[:end]
        # The scheduler sees the finish one launch late. Nothing after the stop may be cached.
        assert server.hvd_state()["num_shared_tokens"] == end
    assert server.hvd_state()["num_requests"] == 0


@pytest.mark.slow  # up to 105 s of CPU; graphs of steps that run ahead are tested in every run
@pytest.mark.parametrize(
    ("drafting", "draft_round", "verify_width", "narrow_widths", "wide_width", "batch_sizes"),
    [
        # Graphs of two requests: two replay them, one is padded to two, and three run without.
        # Rounds are so expensive that drafts differ in their number of steps.
        (SMALL_TREE, 2.5, 16, [2, 8], None, [2]),
        # Three are padded to four. The widest verification is for two requests, as are its graphs.
        (CHAIN, 2.0, 8, [2, 4], 12, [2, 4]),
    ],
    ids=["tree", "chain"],
)
def test_widths_and_draft_steps_with_backends_and_graphs_of_their_own(
    drafting: tuple[str, ...],
    draft_round: float,
    verify_width: int,
    narrow_widths: list[int],
    wide_width: int | None,
    batch_sizes: list[int],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    varying_costs: Path,
    tmp_path: Path,
) -> None:
    costs = StepCosts.load(varying_costs)
    rounds = (draft_round, draft_round + 0.2)
    table = tmp_path / "costs.yaml"
    table.write_text(costs.model_copy(update={"draft_round": rounds}).to_yaml())
    copying = [prompts[0], prompts[4], prompts[8]]
    params = {"max_new_tokens": 20}
    expected = plain_ids(copying, **params)
    server = start_hvd(
        *("allocate", "--hvd-costs", str(table), *TRITON),
        *("--hvd-verify-width", str(verify_width), "--hvd-set", f"narrow_widths={narrow_widths}"),
        *(() if wide_width is None else ("--hvd-set", f"wide_width={wide_width}")),
        *("--cuda-graph-bs-decode", *map(str, batch_sizes)),
        drafting=drafting,
        environment=REPLAYED,
    )
    answers = [server.generate(copying[0], **params)]
    server.flush_cache()
    answers += server.generate_all(copying, concurrency=3, **params)
    assert [answer["output_ids"] for answer in answers] == [expected[0], *expected]
    state = server.hvd_state()
    assert "HVD: drafts of 2 steps take" in server.process.log  # logged of graphs only
    beside_base = [*narrow_widths, *([] if wide_width is None else [wide_width])]
    assert state["width_memory_gb"].keys() == {str(width) for width in beside_base}
    assert state["draft_steps_memory_gb"].keys() == {"1", "2"}
    steps = state["num_steps_by_width"]
    assert len([num for num in steps.values() if num]) >= 2
    assert wide_width is None or steps[str(wide_width)] > 0
    assert len(state["num_drafts_by_steps"]) >= 2, state["num_drafts_by_steps"]
    assert state["num_accepted_drafts"]["cache"] + state["num_accepted_drafts"]["both"] > 0
    assert state["num_accepted_drafts"]["model"] > 0


@pytest.mark.parametrize("policy", ["payoff", pytest.param("both", marks=pytest.mark.slow)])
def test_full_masks_with_triton_attention(
    policy: str,
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    copying = [prompts[0], prompts[4]]  # a file and a tool call
    params = {"max_new_tokens": 20}
    expected = plain_ids(copying, **params)
    server = start_hvd(
        *(policy, *mixing(policy), *TRITON, "--hvd-verify-width", "16"),
        drafting=SMALL_TREE,
        environment=INTERPRETED,
    )
    answers = server.generate_all(copying, concurrency=2, **params)
    assert [answer["output_ids"] for answer in answers] == expected
    accepted = server.hvd_state()["num_accepted_drafts"]
    assert accepted["cache"] + accepted["both"] > 0
    assert accepted["model"] > 0


def test_graphs_of_steps_that_run_ahead(
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    running_ahead: tuple[str, ...],
) -> None:
    """With full masks, and text lengths that the attention backend reads on the host."""
    copying = [prompts[0], prompts[4], prompts[8]]
    params = {"max_new_tokens": 16}
    expected = plain_ids(copying, **params)
    server = start_hvd(
        *("allocate", *running_ahead, *TRITON),
        # The interpreter captures each width and batch size for many seconds.
        *("--hvd-verify-width", "8", "--hvd-set", "narrow_widths=[1]"),
        *("--cuda-graph-bs-decode", "4"),  # three are padded to four
        drafting=SMALL_TREE,
        environment=REPLAYED,
    )
    answers = server.generate_all(copying, concurrency=3, **params)
    assert [answer["output_ids"] for answer in answers] == expected
    state = server.hvd_state()
    assert state["num_steps_ahead"] > 0
    assert state["num_steps_by_width"]["8"] > 0
    assert state["num_resyncs"] == 0
