"""Which of SGLang's requests are held, and for how long."""

from __future__ import annotations

import copy
from array import array

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hvd.allocation import DrafterChoices, StepAllocator, StepCosts
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import TokenClasses
from sglang_hvd.plugin.requests.held_requests import HeldRequests
from sglang_hvd.plugin.requests.marks import figures_of
from sglang_hvd.plugin.requests.metrics import ServerMetrics
from sglang_hvd.step_clock import StepClock
from sglang_hvd.suffix_cache import SuffixCache
from tests.payoff.made_up import constant_survival

VOCAB_SIZE = 100

COSTS = StepCosts(
    about="made up",
    batch_sizes=(1, 8),
    widths=(1, 8),
    verify=((5.0, 6.0), (5.0, 6.0)),
    draft_round=(500.0, 500.0),
    draft_extend=((0.0, 0.0), (0.0, 0.0)),
)


def held_requests(
    metrics: ServerMetrics | None = None, *, report_cycles: bool = False, allocates: bool = False
) -> HeldRequests:
    """allocates: by costs, of which those of the model drafter are too high for it."""
    config = HvdConfig(policy="allocate" if allocates else "cache")
    allocator = StepAllocator(COSTS, widths=(1, 8), drafters=[DrafterChoices((7,), (3,))])
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=constant_survival(0.9) if allocates else None,
        token_classes=TokenClasses.from_strings(map(str, range(VOCAB_SIZE))) if allocates else None,
        num_model_steps=3,
        num_model_nodes=7,
        verify_width=8,
        allocator=allocator if allocates else None,
    )
    return HeldRequests(
        drafter,
        stream=None,
        metrics=metrics,
        clock=StepClock(),
        report_cycles=report_cycles,
        recorder=None,
        vocab_size=VOCAB_SIZE,
    )


def request(rid: str, prompt: list[int], *, extra_key: str | None = None) -> Req:
    sampling = SamplingParams(temperature=0, max_new_tokens=4)
    sampling.normalize(None)
    return Req(rid, "", array("q", prompt), sampling, extra_key=extra_key)


def prefill(held: HeldRequests, *reqs: Req) -> None:
    for req in reqs:  # as SGLang counts, of which each result adds what it committed
        req.kv.kv_committed_len = len(req.origin_input_ids) + len(req.output_ids)
    held.record_prefill(reqs, None, torch.full((len(reqs),), 3))


def test_requests_that_end_with_their_prefill_are_let_go_by_the_next() -> None:
    held = held_requests()
    running = request("running", [1, 2])
    prefill(held, running)
    for number in range(50):
        req = request(str(number), [1, 2])
        prefill(held, req)
        req.output_ids.append(3)
        req.finished_reason = FINISH_LENGTH(1)
        assert len(held) <= 3  # the one that runs, this one and the one before
    running.output_ids.append(3)
    [plan] = held.plan([running], [2])
    assert plan.source == "plain"
    assert held.describe()["num_resyncs"] == 0


def test_what_a_step_committed_is_known_in_the_next() -> None:
    held = held_requests()
    reqs = [request("a", [1, 2, 3, 4, 1, 2]), request("b", [7, 8, 9, 7])]
    prefill(held, *reqs)  # 3 follows both
    first = held.plan(reqs, [6, 4])
    drafts = [plan.cache_draft for plan in first]
    assert drafts[0] is not None
    assert drafts[0].token_ids.tolist()[:2] == [4, 1]
    # Rows of four tokens, of which two and one were committed.
    token_ids = torch.tensor([4, 1, 99, 99, 5, 99, 99, 99])
    held.record_verify(reqs, token_ids, torch.tensor([2, 1], dtype=torch.int32), None)
    held.plan(reqs, [8, 5])  # it would start them anew, had it other tokens
    state = held.describe()
    assert state["num_resyncs"] == 0
    assert state["num_accepted_drafts"]["cache"] == 1


def test_a_count_that_differs_once_is_right_again_from_then_on() -> None:
    held = held_requests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    prefill(held, req)
    held.plan([req], [6])
    held.record_verify([req], torch.tensor([4, 9, 9]), torch.tensor([1], dtype=torch.int32), None)
    req.output_ids.append(3)  # under overlap scheduling it lacks what was verified last
    held.plan([req], [8])
    assert held.describe()["num_resyncs"] == 1
    held.record_verify([req], torch.tensor([1, 2, 9]), torch.tensor([2], dtype=torch.int32), None)
    req.output_ids.append(4)
    [plan] = held.plan([req], [10])
    assert held.describe()["num_resyncs"] == 1
    draft = plan.cache_draft
    assert draft is not None
    assert draft.token_ids.tolist()[:2] == [3, 4]  # from the tokens since
    end(held, req, [5, 1, 2])
    assert held.describe()["num_shared_tokens"] == 5


def test_a_request_that_is_gone_leaves_the_others_their_tokens() -> None:
    held = held_requests()
    reqs = [request(rid, [1, 2, 3, 4, 1, 2]) for rid in "abc"]
    prefill(held, *reqs)
    held.plan(reqs, [6] * 3)
    token_ids = torch.tensor([4, 1, 2, 9, 9, 9, 4, 3, 9])
    held.record_verify(reqs, token_ids, torch.tensor([3, 1, 2], dtype=torch.int32), None)
    reqs[1].output_ids.extend([3, 9])
    reqs[1].finished_reason = FINISH_LENGTH(2)
    held.note_finished("b")
    held.plan([reqs[0], reqs[2]], [9, 8])
    assert held.describe()["num_resyncs"] == 0


def test_a_prompt_that_is_no_text_of_the_vocabulary_is_never_drafted_from() -> None:
    held = held_requests()
    for beyond in (-1, VOCAB_SIZE, 2**31, 2**40):
        req = request(str(beyond), [3, beyond, 3, beyond])
        prefill(held, req)
        req.output_ids.append(3)
        [plan] = held.plan([req], [4])
        assert plan.source == "plain"
        end(held, req, [7])
    assert held.describe()["num_request_tokens"] == 0


@pytest.mark.parametrize("number", [-1, VOCAB_SIZE, 2**31, -(2**63)])
def test_numbers_that_a_sampler_gives_for_nan_end_one_request_only(number: int) -> None:
    held = held_requests()
    first, second = (request(rid, [1, 2, 3, 4, 1, 2]) for rid in "ab")
    held.record_prefill([first, second], None, torch.tensor([number, 3]))
    held.plan([first, second], [6, 6])
    tokens = torch.tensor([number, 5, 9, 9, 4, number, 9, 9])
    held.record_verify([first, second], tokens, torch.tensor([2, 2], dtype=torch.int32), None)
    held.plan([first, second], [8, 8])
    end(held, first, [number, 5])
    assert held.describe()["num_shared_tokens"] == 0
    assert held.describe()["num_resyncs"] == 0
    assert len(held) == 1


def test_a_text_that_sglang_cut_off_where_it_met_nan_is_not_kept() -> None:
    held = held_requests()
    req = request("a", [1, 2])
    req.vocab_size, req.eos_token_ids = VOCAB_SIZE, {7}
    prefill(held, req)
    req.output_ids.extend([3, -1])
    req.update_finish_state(new_accepted_len=1)
    assert req.output_ids[-1] == 7
    held.note_finished("a")
    assert held.describe()["num_shared_tokens"] == 0


def test_a_prompt_whose_only_token_is_the_last_is_not_taken_in() -> None:
    held = held_requests()
    req = request("a", [1, 2])
    req.sampling_params.max_new_tokens = 1
    prefill(held, req)
    assert len(held) == 0


def test_a_request_that_is_aborted_while_it_waits_is_let_go() -> None:
    held = held_requests()
    retracted, running = request("a", [1, 2]), request("b", [1, 2])
    prefill(held, retracted, running)
    held.let_go(retracted)
    held.let_go(request("never started", [1, 2]))
    assert len(held) == 1
    running.output_ids.append(3)
    held.plan([running], [2])
    assert held.describe()["num_resyncs"] == 0


@pytest.mark.parametrize("key", ["\ud800", "plain", "日本", "long" * 10_000])
def test_a_key_may_be_any_string(key: str) -> None:
    held = held_requests()
    req = request("a", [1, 2], extra_key=key)
    prefill(held, req)
    assert len(held) == 1


def test_salts_and_keys_that_read_alike_together_are_kept_apart() -> None:
    held = held_requests()
    for salt, key in (("ab", "c"), ("a", "bc"), ("", "abc")):
        req = request(f"{salt} {key}", [1, 2], extra_key=key)
        req.cache_salt = salt
        prefill(held, req)
        end(held, req, [3])
    assert held.describe()["num_namespaces"] == 3


def test_what_stands_behind_a_stop_is_not_kept() -> None:
    held = held_requests()
    req = request("a", [1, 2])
    prefill(held, req)
    req.finished_len = 2
    end(held, req, [3, 5, 6, 7])
    assert held.describe()["num_shared_tokens"] == 2


def test_metrics_tell_of_what_is_held() -> None:
    held = held_requests(ServerMetrics())

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang:hvd_{name}", labels)

    assert (value("num_requests"), value("resyncs_total")) == (0, 0)
    first, second = request("a", [1, 2]), request("b", [4, 5, 6])
    prefill(held, first, second)
    for req in (first, second):
        req.output_ids.append(3)
    held.plan([first, second], [2, 7])  # of the second SGLang has four tokens more than was seen
    held.publish()
    assert (value("num_requests"), value("resyncs_total")) == (2, 1)
    assert value("cache_tokens", kind="request") == 3 + 4
    end(held, first, [7])
    held.publish()
    assert value("num_requests") == 1
    assert [value("cache_tokens", kind=kind) for kind in ("request", "shared")] == [4, 2]
    assert value("cache_bytes") == held.describe()["num_cache_bytes"]


def test_a_prompt_that_goes_on_has_no_token_yet() -> None:
    held = held_requests()
    whole, part = request("a", [1, 2]), request("b", [5, 6, 7, 5, 6])
    held.record_prefill([whole, part], part, torch.tensor([3, 99]))
    held.record_prefill([part], None, torch.tensor([7]))
    whole.output_ids.append(3)
    part.output_ids.append(7)
    _, plan = held.plan([whole, part], [2, 5])
    assert plan.cache_draft is not None
    assert plan.cache_draft.token_ids.tolist()[:2] == [5, 6]
    assert held.describe()["num_resyncs"] == 0


def verified(held: HeldRequests, req: Req) -> None:
    """A step that commits 4, 1 of a request for which 4 was drafted; the host has not read it."""
    prefill(held, req)
    req.output_ids.append(3)
    held.plan([req], [6])
    tokens = torch.tensor([4, 1, 99, 99])
    held.record_verify([req], tokens, torch.tensor([2], dtype=torch.int32), None)


def test_the_last_step_of_a_request_counts_when_it_ends() -> None:
    held = held_requests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(held, req)
    end(held, req, [4, 1])
    assert figures_of(req)["num_cache_accepted_drafts"] == 1
    assert held.describe()["num_shared_tokens"] == 3


def test_a_request_that_comes_back_from_a_retraction_keeps_its_figures() -> None:
    held = held_requests(report_cycles=True)
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(held, req)
    # It is retracted while that step is on its way: SGLang drops the step's tokens.
    prefill(held, req)
    assert len(held) == 1
    req.output_ids.append(3)
    held.plan([req], [7])
    held.record_verify([req], torch.tensor([9, 9]), torch.tensor([1], dtype=torch.int32), None)
    end(held, req, [9])
    figures = figures_of(req)
    assert figures is not None
    assert figures["cycles"] == [("cache", 1), ("cache", 0)]
    assert (figures["num_cache_cycles"], figures["num_cache_accepted_drafts"]) == (2, 1)
    assert figures["num_target_tokens"] == 4  # of two prefills, and a bonus token of each cycle
    assert held.describe()["num_resyncs"] == 0


@pytest.mark.parametrize("by_length", [True, False])
def test_a_request_that_ends_with_its_prefill_behind_a_retraction_is_kept(by_length: bool) -> None:
    held = held_requests(report_cycles=True)
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(held, req)
    if by_length:
        req.output_ids.extend([4, 1])  # else it is retracted while that step is on its way
    prefill(held, req)
    req.output_ids.append(3)
    req.finished_reason = FINISH_LENGTH(4) if by_length else FINISH_MATCHED_TOKEN(3)
    held.note_finished_at_prefill(req)
    assert len(held) == 0
    figures = figures_of(req)
    assert figures is not None
    assert figures["cycles"] == [("cache", 1)]
    assert figures["num_target_tokens"] == 3  # of two prefills and a bonus token
    assert held.describe()["num_shared_tokens"] == len(req.output_ids)
    held.note_finished_at_prefill(req)  # it is not known any more


def test_a_request_that_ends_with_its_first_prefill_is_not_kept() -> None:
    held = held_requests()
    req = request("a", [1, 2])
    prefill(held, req)
    req.output_ids.append(3)
    req.finished_reason = FINISH_MATCHED_TOKEN(3)
    held.note_finished_at_prefill(req)
    assert figures_of(req) is None
    held.drop_ended()
    assert len(held) == 0
    assert held.describe()["num_shared_tokens"] == 0


def test_embeddings_are_no_prompt_to_draft_from() -> None:
    held = held_requests()
    req = request("a", [1] * 6)  # what SGLang puts in the place of the ids
    req.input_embeds = [[0.5]] * 6
    prefill(held, req)
    assert held.describe()["num_request_tokens"] == 0
    req.output_ids.append(1)
    [plan] = held.plan([req], [6])
    assert plan.source == "plain"


def test_a_request_for_which_there_is_no_memory_at_all_is_let_go() -> None:
    held = held_requests()
    req = request("a", [1, 2])
    req.kv.req_pool_idx = 0
    prefill(held, req)
    # An abort of a running request comes with its next result.
    req.to_finish = FINISH_ABORT()
    assert held.describe()["num_requests"] == 1
    req.kv.req_pool_idx = None
    assert held.describe()["num_requests"] == 0


def test_a_flush_takes_the_last_step_in_first() -> None:
    held = held_requests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(held, req)
    held.flush()
    assert held.describe()["num_accepted_drafts"]["cache"] == 1


def test_a_copy_of_a_request_is_another_one() -> None:
    held = held_requests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    prefill(held, req)
    other = copy.copy(req)
    prefill(held, other)
    assert len(held) == 2
    req.output_ids.append(3)
    held.plan([req, other], [6, 6])
    assert held.describe()["num_resyncs"] == 0


@pytest.mark.parametrize(
    ("params", "source"),
    [
        ({}, "cache"),
        ({"frequency_penalty": 0.1}, "plain"),
        ({"presence_penalty": -0.1}, "plain"),
        ({"repetition_penalty": 1.1}, "plain"),
        ({"min_new_tokens": 1}, "plain"),
    ],
)
def test_requests_whose_penalties_follow_the_cycles_verify_no_cache_draft(
    params: dict[str, float], source: str
) -> None:
    held = held_requests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    for name, value in params.items():
        setattr(req.sampling_params, name, value)
    prefill(held, req)
    req.output_ids.append(3)
    [plan] = held.plan([req], [6])
    assert plan.source is source


def verify_plain(held: HeldRequests, reqs: list[Req], tokens: list[int]) -> None:
    """A step of these that commits a token of each."""
    ones = torch.ones(len(reqs), dtype=torch.int32)
    held.record_verify(reqs, torch.tensor(tokens), ones, None)


def take_in(reqs: list[Req], tokens: list[int], *, is_prefill: bool = False) -> None:
    """SGLang takes in the result of a step, when it has launched the next one."""
    for req, token in zip(reqs, tokens, strict=True):
        req.output_ids.append(token)
        req.kv.kv_committed_len += not is_prefill


def test_behind_a_step_without_drafts_the_next_runs_ahead_until_drafts_pay() -> None:
    held = held_requests(allocates=True)
    req = request("a", [1, 2, 4, 5, 6, 7, 8, 10])
    assert not held.runs_ahead([req])  # nobody knows it yet
    prefill(held, req)
    assert not held.runs_ahead([req])  # nothing was decoded yet
    [plan] = held.plan([req], [8])
    assert plan.source == "plain"
    assert held.num_context == 9
    verify_plain(held, [req], [9])
    take_in([req], [3], is_prefill=True)
    # What each step commits is known when the next but one is launched. 2 to 8 follow on 1.
    for token, before, cached in ((1, 9, 9), (2, 1, 10)):
        assert held.runs_ahead([req])
        assert held.is_ahead
        assert held.cached_lens([req]) == [cached]
        assert held.num_context == cached + 1
        [plan] = held.plan([req], None)
        assert (plan.source, plan.num_nodes) == ("plain", 0)
        verify_plain(held, [req], [token])
        assert not held.is_ahead
        take_in([req], [before])
    assert not held.runs_ahead([req])
    [plan] = held.plan([req], [11])
    draft = plan.cache_draft
    assert draft is not None
    assert draft.token_ids.tolist()[:3] == [4, 5, 6]
    state = held.describe()
    assert (state["num_resyncs"], state["num_steps_ahead"]) == (0, 2)
    assert state["num_cycles"]["plain"] == 3


def test_a_prefill_in_between_does_not_end_a_run() -> None:
    held = held_requests(allocates=True)
    first, second = request("a", [1, 2]), request("b", [7, 8, 9, 10])
    prefill(held, first)
    held.plan([first], [2])
    verify_plain(held, [first], [4])
    take_in([first], [3], is_prefill=True)
    assert held.runs_ahead([first])
    verify_plain(held, [first], [5])
    take_in([first], [4])
    prefill(held, second)  # while the step before still ran
    take_in([first], [5])
    assert held.runs_ahead([first, second])
    assert held.cached_lens([first, second]) == [4, 4]  # of the second the token is on its way
    assert held.num_context == 10
    verify_plain(held, [first, second], [6, 6])
    take_in([second], [3], is_prefill=True)
    assert held.runs_ahead([first, second])
    assert held.cached_lens([first, second]) == [5, 5]
    verify_plain(held, [first, second], [11, 12])
    take_in([first, second], [6, 6])
    held.plan([first, second], [6, 6])
    assert held.describe()["num_resyncs"] == 0
    assert held.describe()["num_steps_ahead"] == 3


def test_requests_of_which_none_was_decoded_do_not_begin_ahead() -> None:
    held = held_requests(allocates=True)
    first, second = request("a", [1, 2]), request("b", [7, 8])
    prefill(held, first)
    held.plan([first], [2])
    verify_plain(held, [first], [4])
    take_in([first], [3], is_prefill=True)
    end(held, first, [4])
    prefill(held, second)
    assert not held.runs_ahead([second])


def test_requests_bound_to_the_model_drafter_do_not_run_ahead() -> None:
    """Behind a prefill, too: a server with their penalties has EAGLE3's cycles."""
    held = held_requests(allocates=True)
    first, bound = request("a", [1, 2]), request("b", [7, 8])
    prefill(held, first)
    held.plan([first], [2])
    verify_plain(held, [first], [4])
    bound.sampling_params.frequency_penalty = 0.1
    take_in([first], [3], is_prefill=True)
    prefill(held, bound)
    take_in([first], [4])
    assert not held.runs_ahead([first, bound])
    take_in([bound], [3], is_prefill=True)
    plans = list(held.plan([first, bound], [3, 2]))
    assert [plan.source for plan in plans][1] == "model"


def test_what_a_run_found_is_heeded_though_a_prefill_came_between() -> None:
    for follows in (True, False):
        held = held_requests(allocates=True)
        req, other = request("a", [1, 2, 4, 5, 6, 7, 8, 10]), request("b", [20, 21])
        prefill(held, req)
        held.plan([req], [8])
        verify_plain(held, [req], [1 if follows else 9])
        take_in([req], [3], is_prefill=True)
        assert held.runs_ahead([req])
        verify_plain(held, [req], [2 if follows else 11])
        take_in([req], [1 if follows else 9])
        prefill(held, other)  # takes the run's tokens in: 4, 5, ... might have followed them
        take_in([req], [2 if follows else 11])
        assert held.runs_ahead([req, other]) is not follows


def test_a_request_that_ends_in_a_run_has_its_tokens_and_not_those_behind() -> None:
    held = held_requests(allocates=True)
    reqs = [request(rid, [1, 2]) for rid in "ab"]
    prefill(held, *reqs)
    held.plan(reqs, [2, 2])
    verify_plain(held, reqs, [20, 30])
    take_in(reqs, [3, 3], is_prefill=True)
    assert held.runs_ahead(reqs)
    verify_plain(held, reqs, [21, 31])
    take_in(reqs, [20, 30])
    reqs[0].finished_reason = FINISH_LENGTH(2)
    held.note_finished("a")  # seen when the step behind was launched
    assert held.describe()["num_shared_tokens"] == 2
    assert held.runs_ahead(reqs[1:])
    assert held.cached_lens(reqs[1:]) == [4]
    verify_plain(held, reqs[1:], [32])
    take_in(reqs[1:], [31])
    end(held, reqs[1], [32])
    assert held.describe()["num_resyncs"] == 0
    assert held.describe()["num_shared_tokens"] == 2 + 4
    assert held.describe()["num_requests"] == 0


def test_lengths_that_are_not_sglangs_are_not_run_ahead_by() -> None:
    held = held_requests(allocates=True)
    req = request("a", [1, 2])
    prefill(held, req)
    held.plan([req], [2])
    verify_plain(held, [req], [4])
    take_in([req], [3], is_prefill=True)
    req.kv.kv_committed_len += 1
    assert not held.runs_ahead([req])
    assert held.describe()["num_resyncs"] == 1


def end(held: HeldRequests, req: Req, output_ids: list[int]) -> None:
    """The request commits these besides, and ends by its length."""
    req.output_ids.extend(output_ids)
    req.finished_reason = FINISH_LENGTH(len(req.output_ids))
    held.note_finished(req.rid)
