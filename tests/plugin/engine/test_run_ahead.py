"""Which steps run ahead of the tokens of the step before them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.server_args import ServerArgs

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.engine.catch_up import CatchUp
from sglang_hvd.plugin.engine.run_ahead import RunAhead
from sglang_hvd.plugin.startup.verify_widths import check_run_ahead
from sglang_hvd.replay.core.single_cycles import single_plans
from sglang_hvd.step_clock import Stage
from tests.plugin.requests.served_requests import ServedRequests, read_results, request


@pytest.mark.parametrize(
    ("has_overlap", "narrowest", "plans_wait", "can"),
    [
        (True, 1, False, True),
        (False, 1, False, False),
        (True, 2, False, False),
        (True, 1, True, False),
    ],
)
def test_a_server_that_cannot_run_ahead_does_not_start(
    has_overlap: bool, narrowest: int, plans_wait: bool, can: bool
) -> None:
    cfg, widths = SimpleNamespace(disable_overlap_schedule=not has_overlap), (narrowest, 8)
    if can:
        check_run_ahead(HvdConfig(run_ahead=True), cfg, widths, plans_wait=plans_wait)
    else:
        with pytest.raises(ValueError, match="--hvd-set run_ahead=true needs a verify width of 1"):
            check_run_ahead(HvdConfig(run_ahead=True), cfg, widths, plans_wait=plans_wait)
    check_run_ahead(HvdConfig(), cfg, widths, plans_wait=plans_wait)


def test_sglang_turns_overlap_scheduling_off_beside_its_arguments() -> None:
    """They hold what was asked for."""
    args = ServerArgs(model_path="none", device="cuda")
    overrides.declare_resolution(args, "a test", disable_overlap_schedule=True)
    config = HvdConfig(policy="allocate", run_ahead=True)
    check_run_ahead(config, args, (1,))
    with pytest.raises(ValueError, match="overlap scheduling"):
        check_run_ahead(config, overrides.resolved_view(args), (1,))


def in_a_run() -> tuple[ServedRequests, Req]:
    """A request whose next step may run ahead."""
    served, req = ServedRequests(allocates=True), request("a", [1, 2])
    served.prefill(req)
    served.plan([req], [2])
    served.verify([4])
    read_results([req], [3], is_prefill=True)
    return served, req


@pytest.mark.parametrize(
    ("is_decode", "has_grammar", "catches_up"),
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True)],
)
def test_a_step_waits_if_it_is_no_plain_decode_step(
    is_decode: bool, has_grammar: bool, catches_up: bool
) -> None:
    served, req = in_a_run()
    nothing: Any = None
    catch_up = CatchUp(nothing, DraftExtend.AFTER_DRAFTS, max_nodes=8, costs=nothing, clock=nothing)
    catch_up._max_missing = 1000 if catches_up else 0
    batch: Any = SimpleNamespace(
        reqs=[req],
        has_grammar=has_grammar,
        forward_mode=SimpleNamespace(is_decode=lambda: is_decode),
    )
    rule = RunAhead(served.drafter, served.held, served.launched, catch_up)
    plan = rule.step_plan(batch, gives_lengths=True)
    assert (plan is not None) is (is_decode and not has_grammar and not catches_up)
    assert plan is None or plan.gives_lengths


def test_after_a_plain_step_the_next_runs_ahead_until_drafts_pay() -> None:
    served = ServedRequests(allocates=True)
    req = request("a", [1, 2, 4, 5, 6, 7, 8, 10])
    assert not served.plan_ahead([req])  # nobody knows it yet
    served.prefill(req)
    assert not served.plan_ahead([req])  # nothing was decoded yet
    [plan] = single_plans(served.plan([req], [8]))
    assert plan.source == "plain"
    assert served.step is not None
    assert served.step.num_context == 9
    served.verify([9])
    read_results([req], [3], is_prefill=True)
    # What each step commits is known when the next but one is launched. 2 to 8 follow on 1.
    for token, before, cached in ((1, 9, 9), (2, 1, 10)):
        assert served.plan_ahead([req])
        step = served.step
        assert step.runs_ahead
        assert step.cached_lens.tolist() == [cached]
        assert step.num_context == cached + 1
        [plan] = single_plans(step.drafts)
        assert (plan.source, plan.num_nodes) == ("plain", 0)
        served.verify([token])
        read_results([req], [before])
    assert not served.plan_ahead([req])
    [plan] = single_plans(served.plan([req], [11]))
    draft = plan.cache_draft
    assert draft is not None
    assert draft.token_ids.tolist()[:3] == [4, 5, 6]
    state = served.describe()
    assert (state["num_resyncs"], state["num_steps_ahead"]) == (0, 2)
    assert state["num_cycles"]["plain"] == 3


def test_a_prefill_in_between_does_not_end_a_run() -> None:
    served = ServedRequests(allocates=True)
    first, second = request("a", [1, 2]), request("b", [7, 8, 9, 10])
    served.prefill(first)
    served.plan([first], [2])
    served.verify([4])
    read_results([first], [3], is_prefill=True)
    assert served.plan_ahead([first])
    served.verify([5])
    read_results([first], [4])
    served.prefill(second)  # while the step before still ran
    read_results([first], [5])
    assert served.plan_ahead([first, second])
    assert served.step.cached_lens.tolist() == [4, 4]  # of the second the token is on its way
    assert served.step.num_context == 10
    served.verify([6, 6])
    read_results([second], [3], is_prefill=True)
    assert served.plan_ahead([first, second])
    assert served.step.cached_lens.tolist() == [5, 5]
    served.verify([11, 12])
    read_results([first, second], [6, 6])
    served.plan([first, second], [6, 6])
    assert served.describe()["num_resyncs"] == 0
    assert served.describe()["num_steps_ahead"] == 3


def test_requests_of_which_none_was_decoded_do_not_begin_ahead() -> None:
    served = ServedRequests(allocates=True)
    first, second = request("a", [1, 2]), request("b", [7, 8])
    served.prefill(first)
    served.plan([first], [2])
    served.verify([4])
    read_results([first], [3], is_prefill=True)
    served.end(first, [4])
    served.prefill(second)
    assert not served.plan_ahead([second])


def test_requests_whose_verification_needs_their_output_do_not_run_ahead() -> None:
    served = ServedRequests(allocates=True)
    first, penalised = request("a", [1, 2]), request("b", [7, 8])
    served.prefill(first)
    served.plan([first], [2])
    served.verify([4])
    penalised.sampling_params.frequency_penalty = 0.1
    read_results([first], [3], is_prefill=True)
    served.prefill(penalised)
    read_results([first], [4])
    assert not served.plan_ahead([first, penalised])
    read_results([penalised], [3], is_prefill=True)
    served.plan([first, penalised], [3, 2])
    assert served.step is not None
    assert served.step.held.penalised_rows.tolist() == [1]


@pytest.mark.parametrize(
    ("asked", "runs_ahead", "source"),
    [
        ("off", True, "plain"),
        ({"policy": "model"}, False, "model"),
        ({"policy": "cache"}, False, "cache"),
    ],
)
def test_only_requests_whose_drafts_are_fixed_keep_the_others_from_running_ahead(
    asked: object, runs_ahead: bool, source: str
) -> None:
    served = ServedRequests(allocates=True)
    first, second = request("a", [1, 2]), request("b", [7, 3, 8, 7])
    second.sampling_params.custom_params = {"hvd": asked}
    served.prefill(first)
    served.plan([first], [2])
    served.verify([4])
    read_results([first], [3], is_prefill=True)
    served.prefill(second)
    read_results([first], [4])
    assert served.plan_ahead([first, second]) is runs_ahead
    if runs_ahead:
        return
    read_results([second], [3], is_prefill=True)
    assert served.plan([first, second], [3, 4]).sources[1] == source


def test_what_a_run_found_holds_though_a_prefill_came_between() -> None:
    for follows in (True, False):
        served = ServedRequests(allocates=True)
        req, other = request("a", [1, 2, 4, 5, 6, 7, 8, 10]), request("b", [20, 21])
        served.prefill(req)
        served.plan([req], [8])
        served.verify([1 if follows else 9])
        read_results([req], [3], is_prefill=True)
        assert served.plan_ahead([req])
        served.verify([2 if follows else 11])
        read_results([req], [1 if follows else 9])
        served.prefill(other)  # commits the run's tokens: 4, 5, ... might have followed them
        read_results([req], [2 if follows else 11])
        assert served.plan_ahead([req, other]) is not follows


def test_a_request_that_ends_in_a_run_has_its_tokens_and_not_those_after() -> None:
    served = ServedRequests(allocates=True)
    reqs = [request(rid, [1, 2]) for rid in "ab"]
    served.prefill(*reqs)
    served.plan(reqs, [2, 2])
    served.verify([20, 30])
    read_results(reqs, [3, 3], is_prefill=True)
    assert served.plan_ahead(reqs)
    served.verify([21, 31])
    read_results(reqs, [20, 30])
    reqs[0].finished_reason = FINISH_LENGTH(2)
    served.launched.note_finished("a")  # seen once the step after was launched
    assert served.describe()["num_shared_tokens"] == 2
    assert served.plan_ahead(reqs[1:])
    assert served.step.cached_lens.tolist() == [4]
    served.verify([32])
    read_results(reqs[1:], [31])
    served.end(reqs[1], [32])
    assert served.describe()["num_resyncs"] == 0
    assert served.describe()["num_shared_tokens"] == 2 + 4
    assert served.describe()["num_requests"] == 0


def test_lengths_that_are_not_sglangs_are_not_run_ahead_by() -> None:
    served = ServedRequests(allocates=True)
    req = request("a", [1, 2])
    served.prefill(req)
    served.plan([req], [2])
    served.verify([4])
    read_results([req], [3], is_prefill=True)
    req.kv.kv_committed_len += 1
    assert not served.plan_ahead([req])
    served.plan([req], [4])  # one divergence, which counts once
    assert served.describe()["num_resyncs"] == 1


def test_a_step_that_runs_ahead_has_no_gap() -> None:
    """The tokens of the step before the last arrive while the last one still runs."""
    served = ServedRequests(allocates=True, begins_gaps=True)
    req = request("a", [1, 2, 4, 5, 6, 7, 8, 10])
    clock = served.clock

    def launch() -> int:
        """The number of new gaps."""
        clock.begin_step()
        for stage in Stage:
            clock.reach(stage)
        return len(clock.new_gaps())

    served.prefill(req)
    served.plan([req], [8])
    assert launch() == 1
    served.verify([9])
    read_results([req], [3], is_prefill=True)
    for token, before in ((1, 9), (2, 1)):
        assert served.plan_ahead([req])
        assert launch() == 0
        served.verify([token])
        read_results([req], [before])
    served.plan([req], [11])
    assert launch() == 1


def test_a_prefill_begins_no_gap() -> None:
    """It is launched when the tokens of the step before it are read."""
    served = ServedRequests(allocates=True, begins_gaps=True)
    req = request("a", list(range(10)))
    served.prefill(req)
    req.output_ids.append(3)
    served.plan([req], [10])
    served.verify([11])
    served.clock.end_step()
    served.prefill(request("b", [5, 6]))
    served.clock.begin_step()
    for stage in Stage:
        served.clock.reach(stage)
    served.clock.end_step()
    assert served.clock.describe()["gap"] == {"num_gaps": 0}
