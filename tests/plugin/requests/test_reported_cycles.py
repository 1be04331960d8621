"""The cycles of a request are reported if it asks for them, and nothing is computed otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req

from sglang_hvd.drafter.cycle_reports import cycle_of
from sglang_hvd.plugin.hooks.responses import HvdOutputStreamer
from sglang_hvd.plugin.requests.marks import figures_of
from sglang_hvd.types import DraftPlans, HostDrafts, MatchOrigin
from sglang_hvd.view.cycles import Cycle
from tests.plugin.requests.served_requests import ServedRequests, read_results, request

REPEATS = [1, 2, 3, 4, 1, 2]


def asking(rid: str, prompt: list[int] = REPEATS) -> Req:
    """A request that asks for a report, and repeats its prompt unless another is given."""
    req = request(rid, prompt)
    req.sampling_params.custom_params = {"hvd": {"report_cycles": True}}
    return req


def reported(req: Req) -> list[Cycle]:
    figures = figures_of(req)
    assert figures is not None
    return [Cycle.from_report(cycle) for cycle in figures["cycles"]]


def test_a_request_that_asks_has_its_cycles() -> None:
    served = ServedRequests()
    asked, other = asking("a"), request("b", REPEATS)
    served.prefill(asked, other)
    for req in (asked, other):
        req.output_ids.append(3)
    served.plan([asked, other], [6, 6])
    served.verify([4, 1, 9, 4, 8, 9], [3, 1])
    served.end(asked, [4, 1, 9])
    served.end(other, [4])
    [cycle] = reported(asked)
    assert cycle == Cycle(
        at=1,
        source="cache",
        origin="prompt",
        match=3,
        found=cycle.found,
        cache=cycle.found,
        model=0,
        steps=0,
        accepted=2,
        cache_right=2,
        model_right=None,
        expected=None,
        if_cache=None,
        if_model=None,
        if_both=None,
        width=8,
        requests=2,
        ms=None,
        ran_ahead=False,
    )
    assert cycle.found >= 2
    assert "cycles" not in (figures_of(other) or {})


def test_policy_allocate_says_what_it_expected() -> None:
    served = ServedRequests(allocates=True)
    req = asking("a")
    served.prefill(req)
    req.output_ids.append(3)
    plans = served.plan([req], [6])
    assert plans.expected is not None
    served.verify([4, 1], [2])
    served.end(req, [4, 1])
    [cycle] = reported(req)
    assert cycle.expected == pytest.approx(plans.expected.verified[0], abs=1e-3)
    assert cycle.if_both is not None
    assert cycle.if_cache is not None
    assert cycle.if_both > cycle.if_cache > 0


def test_nothing_is_computed_unless_a_request_asks() -> None:
    served = ServedRequests(allocates=True)
    other, asked = request("b", REPEATS), asking("a")
    served.prefill(other)
    other.output_ids.append(3)
    assert served.plan([other], [6]).expected is None
    served.verify([4])
    served.prefill(asked)
    for req in (other, asked):
        req.output_ids.append(3)
    assert served.held.has_reporting
    assert served.plan([other, asked], [7, 6]).expected is not None
    served.verify([1, 4], [1, 1])
    asked.finished_reason = FINISH_LENGTH(1)  # it ends, and no hook tells
    other.output_ids.append(1)
    assert served.plan([other], [8]).expected is None
    assert not served.held.has_reporting


def test_a_request_that_is_aborted_while_it_waits_asks_no_more() -> None:
    served = ServedRequests()
    req = asking("a")
    served.prefill(req)
    assert served.held.has_reporting
    served.held.drop(req)
    assert not served.held.has_reporting


def test_a_step_lasts_from_the_tokens_before_to_its_own() -> None:
    times: Iterator[float] = iter([])
    now = [10.0]
    served = ServedRequests(now=lambda: next(times, now[0]))
    req = asking("a")
    served.prefill(req)
    req.output_ids.append(3)
    served.clock.begin_step()
    served.plan([req], [6])
    served.verify([4])
    now[0] = 10.25
    served.clock.begin_step()  # the next step begins before the tokens of the last are there
    now[0] = 10.5
    served.plan([req], [7])
    served.verify([1])
    now[0] = 10.75
    served.end(req, [4, 1])
    assert [cycle.ms for cycle in reported(req)] == [500.0, 250.0]


def test_a_stream_has_its_figures_at_the_end() -> None:
    served = ServedRequests()
    streamed, whole = asking("a"), asking("b")
    streamed.stream = True
    served.prefill(streamed, whole)

    def shown() -> list[list[Any]]:
        build: Any = HvdOutputStreamer.build_additional_customized_info
        values: list[list[Any]] = build(None, [streamed, whole])["hvd"]
        return values

    assert shown() == [[], []]
    for req in (streamed, whole):
        req.output_ids.append(3)
    served.plan([streamed, whole], [6, 6])
    served.verify([4, 1, 4, 1], [2, 2])
    served.launched.commit()
    assert shown() == [[], []]
    served.end(streamed, [4, 1])
    served.end(whole, [4, 1])
    [of_stream], [of_whole] = shown()
    assert of_stream == of_whole == figures_of(whole)
    assert len(of_stream["cycles"]) == 1


def report_after_another(report_cycles: bool, first: list[int]) -> Cycle:
    """The one cycle of a request that does not verify what it finds, after a request that
    received `first`."""
    served = ServedRequests(report_cycles=report_cycles, allocates=True, payoff=0.01)
    before = request("before", [50])
    served.prefill(before)
    before.output_ids.append(3)
    served.drafter.extend(served.held.of_rid("before")[0].key, np.array(first, np.int32))
    served.end(before, first)
    req = asking("a", [7, 8, 9])
    served.prefill(req)
    req.output_ids.append(3)
    served.plan([req], [3])
    served.verify([12])
    served.end(req, [12])
    [cycle] = reported(req)
    return cycle


def test_a_report_that_a_client_asks_for_tells_nothing_of_what_others_received() -> None:
    received, other = [7, 8, 9, 3, 12, 13, 14, 15, 16], [60, 61, 62, 63, 64, 65, 66, 67, 68]
    of_operator = report_after_another(True, received)
    assert (of_operator.origin, of_operator.cache) == ("shared", 0)
    assert of_operator.found > 0
    assert of_operator.match == 4
    assert of_operator.if_cache is not None
    assert of_operator.if_both is not None
    of_client = report_after_another(False, received)
    assert (of_client.origin, of_client.match, of_client.found) == (None, None, 0)
    assert (of_client.if_cache, of_client.if_both) == (None, None)
    assert replace(of_client, ms=None) == replace(report_after_another(False, other), ms=None)


def test_a_cycle_that_ran_ahead_says_so() -> None:
    served = ServedRequests(report_cycles=True, allocates=True)
    req = request("a", [1, 2])
    served.prefill(req)
    served.plan([req], [2])
    served.verify([4])
    read_results([req], [3], is_prefill=True)
    assert served.plan_ahead([req])
    served.verify([5])
    served.end(req, [4, 5])
    assert [cycle.ran_ahead for cycle in reported(req)] == [False, True]


def test_what_is_expected_is_computed_for_those_that_ask_alone() -> None:
    served = ServedRequests(allocates=True)
    asked, other = asking("a"), request("b", REPEATS)
    served.prefill(other, asked)
    for req in (asked, other):
        req.output_ids.append(3)
    expected = served.plan([other, asked], [6, 6]).expected
    assert expected is not None
    assert np.isnan(expected.model).tolist() == [True, False]


def plans_of(
    token_ids: Sequence[int], parents: Sequence[int], *, num_model_nodes: int
) -> DraftPlans:
    """Of one request that verifies this cache draft, and one of the model drafter."""
    nothing = DraftPlans.plain(1)
    matches = np.zeros((1, nothing.drafts.matches.shape[1]), np.float32)
    matches[0, [0, 2, 3]] = 7, len(token_ids), MatchOrigin.SHARED
    host = HostDrafts(
        np.array([token_ids], np.int32),
        np.array([parents], np.int32),
        np.array([len(token_ids)], np.int32),
        np.array([True]),
        matches,
    )
    return DraftPlans(
        drafts=host,
        num_model_nodes=np.array([num_model_nodes], np.int32),
        model_sizes=nothing.model_sizes,
        model_steps=np.array([3], np.int32),
        predicted=None,
        chain_lens=nothing.chain_lens,
        chain_predicted=nothing.chain_predicted,
        model_predicted=nothing.model_predicted,
        host_sources=np.array([len(token_ids) > 0], np.uint8),
        drafter=2,
    )


@pytest.mark.parametrize(
    ("committed", "num_model_accepted", "rights"),
    [
        ([4, 5, 6, 9], 3, (3, 3)),  # both have all
        ([4, 7, 9], 1, (2, 1)),  # the branch of the cache alone
        ([4, 8, 9], 2, (1, 2)),  # the model drafter's goes on where the cache is wrong
        ([5, 9], 1, (0, 1)),
        ([9], 0, (0, 0)),
    ],
)
def test_each_draft_of_a_tree_has_its_own_right_tokens(
    committed: list[int], num_model_accepted: int, rights: tuple[int, int]
) -> None:
    # 4 is followed by 5 or 7, and 5 by 6.
    plans = plans_of([4, 5, 7, 6], [-1, 0, 0, 1], num_model_nodes=7)
    cycle = cycle_of(
        *(plans, 0, committed, num_model_accepted),
        **{"source": "both", "at": 3, "width": 16, "num_requests": 1, "ms": 1.23456},
    )
    assert (cycle.cache_right, cycle.model_right) == rights
    assert (cycle.origin, cycle.match, cycle.found, cycle.steps) == ("shared", 7, 4, 3)
    assert (cycle.accepted, cycle.ms) == (len(committed) - 1, 1.235)
    assert len(cycle.token_sources) == len(committed)


def test_a_model_draft_alone_has_all_accepted_tokens_right() -> None:
    plans = plans_of([], [], num_model_nodes=7)
    cycle = cycle_of(
        *(plans, 0, [4, 5, 9], -1),
        **{"source": "model", "at": 3, "width": 16, "num_requests": 1, "ms": None},
    )
    assert (cycle.cache_right, cycle.model_right) == (None, 2)
    assert (cycle.origin, cycle.match, cycle.found) == (None, None, 0)
