"""Which of SGLang's requests are held, for how long, and what is committed of them."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
)

from sglang_hvd.plugin.requests.control import RequestControl
from sglang_hvd.plugin.requests.held_requests import _namespace
from sglang_hvd.plugin.requests.marks import figures_of
from sglang_hvd.plugin.requests.metrics import SERVER_METRICS, Metrics
from sglang_hvd.replay.core.single_cycles import single_plans
from tests.plugin.requests.served_requests import VOCAB_SIZE, ServedRequests, request


def test_requests_that_end_with_their_prefill_are_dropped_by_the_next() -> None:
    served = ServedRequests()
    running = request("running", [1, 2])
    served.prefill(running)
    for number in range(50):
        req = request(str(number), [1, 2])
        served.prefill(req)
        req.output_ids.append(3)
        req.finished_reason = FINISH_LENGTH(1)
        assert len(served.held) <= 3  # the one that runs, this one and the one before
    running.output_ids.append(3)
    [plan] = single_plans(served.plan([running], [2]))
    assert plan.source == "plain"
    assert served.describe()["num_resyncs"] == 0


def test_what_a_step_committed_is_known_in_the_next() -> None:
    served = ServedRequests()
    reqs = [request("a", [1, 2, 3, 4, 1, 2]), request("b", [7, 8, 9, 7])]
    served.prefill(*reqs)  # 3 follows both
    first = served.plan(reqs, [6, 4])
    drafts = [plan.cache_draft for plan in single_plans(first)]
    assert drafts[0] is not None
    assert drafts[0].token_ids.tolist()[:2] == [4, 1]
    # Rows of four tokens, of which two and one were committed.
    served.verify([4, 1, 99, 99, 5, 99, 99, 99], [2, 1])
    served.plan(reqs, [8, 5])  # it would start them again, had it other tokens
    state = served.describe()
    assert state["num_resyncs"] == 0
    assert state["num_accepted_drafts"]["cache"] == 1


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_request_ends_if_its_penalties_lack_tokens(penalty: float) -> None:
    served = ServedRequests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    req.sampling_params.frequency_penalty = penalty
    served.prefill(req)
    served.plan([req], [6])
    served.verify([4, 9, 9], [1])
    req.output_ids.append(3)  # it lacks what was verified last
    served.plan([req], [8])
    assert (req.to_finish is not None) == (penalty > 0)


def test_a_count_that_differs_once_is_right_again_from_then_on() -> None:
    served = ServedRequests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    served.prefill(req)
    served.plan([req], [6])
    served.verify([4, 9, 9], [1])
    req.output_ids.append(3)  # under overlap scheduling it lacks what was verified last
    served.plan([req], [8])
    assert served.describe()["num_resyncs"] == 1
    served.verify([1, 2, 9], [2])
    req.output_ids.append(4)
    [plan] = single_plans(served.plan([req], [10]))
    assert served.describe()["num_resyncs"] == 1
    draft = plan.cache_draft
    assert draft is not None
    assert draft.token_ids.tolist()[:2] == [3, 4]  # from the tokens since
    served.end(req, [5, 1, 2])
    assert served.describe()["num_shared_tokens"] == 5


def test_a_request_that_is_gone_leaves_the_others_their_tokens() -> None:
    served = ServedRequests()
    reqs = [request(rid, [1, 2, 3, 4, 1, 2]) for rid in "abc"]
    served.prefill(*reqs)
    served.plan(reqs, [6] * 3)
    served.verify([4, 1, 2, 9, 9, 9, 4, 3, 9], [3, 1, 2])
    reqs[1].output_ids.extend([3, 9])
    reqs[1].finished_reason = FINISH_LENGTH(2)
    served.launched.note_finished("b")
    served.plan([reqs[0], reqs[2]], [9, 8])
    assert served.describe()["num_resyncs"] == 0


def test_a_prompt_that_is_no_text_of_the_vocabulary_is_never_drafted_from() -> None:
    served = ServedRequests()
    for beyond in (-1, VOCAB_SIZE, 2**31, 2**40):
        req = request(str(beyond), [3, beyond, 3, beyond])
        served.prefill(req)
        req.output_ids.append(3)
        [plan] = single_plans(served.plan([req], [4]))
        assert plan.source == "plain"
        served.end(req, [7])
    assert served.describe()["num_request_tokens"] == 0


@pytest.mark.parametrize("number", [-1, VOCAB_SIZE, 2**31, -(2**63)])
def test_numbers_that_a_sampler_gives_for_nan_end_one_request_only(number: int) -> None:
    served = ServedRequests()
    first, second = (request(rid, [1, 2, 3, 4, 1, 2]) for rid in "ab")
    served.launched.record_prefill([first, second], None, torch.tensor([number, 3]))
    served.plan([first, second], [6, 6])
    served.verify([number, 5, 9, 9, 4, number, 9, 9], [2, 2])
    served.plan([first, second], [8, 8])
    served.end(first, [number, 5])
    assert served.describe()["num_shared_tokens"] == 0
    assert served.describe()["num_resyncs"] == 0
    assert len(served.held) == 1


def test_a_text_that_sglang_cut_off_where_it_met_nan_is_not_kept() -> None:
    served = ServedRequests()
    req = request("a", [1, 2])
    req.vocab_size, req.eos_token_ids = VOCAB_SIZE, {7}
    served.prefill(req)
    req.output_ids.extend([3, -1])
    req.update_finish_state(new_accepted_len=1)
    assert req.output_ids[-1] == 7
    served.launched.note_finished("a")
    assert served.describe()["num_shared_tokens"] == 0


REPEATS = [1, 2, 3, 4, 1, 2]


def ended(served: ServedRequests, rid: str, asked: object, prompt: list[int]) -> Req:
    """A request that has ended with the output 3, 4, 1, 2."""
    req = request(rid, prompt)
    req.sampling_params.custom_params = {"hvd": asked}
    served.prefill(req)
    served.plan([req], [len(prompt)])
    served.verify([4, 1, 2], [3])
    served.end(req, [3, 4, 1, 2])
    return req


@pytest.mark.parametrize(
    ("asked", "kept"), [("off", 4), ({"learn": False}, 0), ({"share": False}, 0)]
)
def test_a_request_says_whether_its_output_is_kept(asked: object, kept: int) -> None:
    served = ServedRequests()
    ended(served, "a", asked, REPEATS)
    assert served.describe()["num_shared_tokens"] == kept


@pytest.mark.parametrize(
    ("asked", "source"),
    [
        (None, "cache"),
        ("off", "plain"),
        ({"max_draft_tokens": 0}, "plain"),
        ({"learn": False}, "cache"),
        ({"share": False}, "plain"),
        ({"namespace": "another"}, "plain"),
        ({"namespace": ""}, "cache"),
    ],
)
def test_a_request_says_whose_output_it_drafts_from(asked: object, source: str) -> None:
    served = ServedRequests()
    ended(served, "a", None, REPEATS)
    req = request("b", [7, 8])  # 3 follows, which is nowhere in its own text
    req.sampling_params.custom_params = {"hvd": asked}
    served.prefill(req)
    assert served.plan([req], [2]).sources == [source]


def test_a_name_never_leads_to_another_salt_or_key() -> None:
    salts = ["", "a", "1:a", "part of :a", "part of "]
    asked = [(salt, key, name) for salt in salts for key in salts for name in salts]
    found = set()
    for salt, key, name in asked:
        req = request("a", [1, 2], extra_key=key or None)
        req.cache_salt = salt or None
        found.add(_namespace(req, RequestControl(namespace=name)))
    assert len(found) == len(asked)


def test_a_prompt_that_is_no_text_is_limited_in_addition_to_what_it_asks() -> None:
    served = ServedRequests(allocates=True)
    for asked, source in ((None, "model"), ("off", "plain"), ({"policy": "cache"}, "plain")):
        req = request(str(asked), [3, VOCAB_SIZE, 3])
        req.sampling_params.custom_params = {"hvd": asked}
        served.prefill(req)
        req.output_ids.append(3)
        assert served.plan([req], [3]).sources == [source]
        served.verify([7])
        served.end(req, [7])


def test_a_prompt_whose_only_token_is_the_last_is_not_held() -> None:
    served = ServedRequests()
    req = request("a", [1, 2])
    req.sampling_params.max_new_tokens = 1
    served.prefill(req)
    assert len(served.held) == 0


def test_a_request_that_is_aborted_while_it_waits_is_dropped() -> None:
    served = ServedRequests()
    retracted, running = request("a", [1, 2]), request("b", [1, 2])
    served.prefill(retracted, running)
    served.held.drop(retracted)
    served.held.drop(request("never started", [1, 2]))
    assert len(served.held) == 1
    running.output_ids.append(3)
    served.plan([running], [2])
    assert served.describe()["num_resyncs"] == 0


@pytest.mark.parametrize("key", ["\ud800", "plain", "日本", "long" * 10_000])
def test_a_key_may_be_any_string(key: str) -> None:
    served = ServedRequests()
    req = request("a", [1, 2], extra_key=key)
    served.prefill(req)
    assert len(served.held) == 1


def test_salts_and_keys_that_read_alike_together_are_kept_apart() -> None:
    served = ServedRequests()
    for salt, key in (("ab", "c"), ("a", "bc"), ("", "abc")):
        req = request(f"{salt} {key}", [1, 2], extra_key=key)
        req.cache_salt = salt
        served.prefill(req)
        served.end(req, [3])
    assert served.describe()["num_namespaces"] == 3


def test_what_stands_after_a_stop_is_not_kept() -> None:
    served = ServedRequests()
    req = request("a", [1, 2])
    served.prefill(req)
    req.finished_len = 2
    served.end(req, [3, 5, 6, 7])
    assert served.describe()["num_shared_tokens"] == 2


def test_metrics_tell_of_what_is_held() -> None:
    served = ServedRequests(Metrics(SERVER_METRICS))

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang:hvd_{name}", labels)

    assert (value("num_requests"), value("resyncs_total")) == (0, 0)
    first, second = request("a", [1, 2]), request("b", [4, 5, 6])
    served.prefill(first, second)
    for req in (first, second):
        req.output_ids.append(3)
    served.plan([first, second], [2, 7])  # of the second SGLang has four tokens more than was seen
    served.publish()
    assert (value("num_requests"), value("resyncs_total")) == (2, 1)
    assert value("cache_tokens", kind="request") == 3 + 4
    served.end(first, [7])
    served.publish()
    assert value("num_requests") == 1
    assert [value("cache_tokens", kind=kind) for kind in ("request", "shared")] == [4, 2]
    assert value("cache_bytes") == served.describe()["num_cache_bytes"]


def test_a_prompt_that_goes_on_has_no_token_yet() -> None:
    served = ServedRequests()
    whole, part = request("a", [1, 2]), request("b", [5, 6, 7, 5, 6])
    served.launched.record_prefill([whole, part], part, torch.tensor([3, 99]))
    served.launched.record_prefill([part], None, torch.tensor([7]))
    whole.output_ids.append(3)
    part.output_ids.append(7)
    _, plan = single_plans(served.plan([whole, part], [2, 5]))
    assert plan.cache_draft is not None
    assert plan.cache_draft.token_ids.tolist()[:2] == [5, 6]
    assert served.describe()["num_resyncs"] == 0


def verified(served: ServedRequests, req: Req) -> None:
    """A step that commits 4, 1 of a request for which 4 was drafted; the host has not read it."""
    served.prefill(req)
    req.output_ids.append(3)
    served.plan([req], [6])
    served.verify([4, 1, 99, 99], [2])


def test_the_last_step_of_a_request_counts_when_it_ends() -> None:
    served = ServedRequests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(served, req)
    served.end(req, [4, 1])
    assert figures_of(req)["num_cache_accepted_drafts"] == 1
    assert served.describe()["num_shared_tokens"] == 3


def test_a_request_that_comes_back_from_a_retraction_keeps_its_figures() -> None:
    served = ServedRequests(report_cycles=True)
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(served, req)
    # It is retracted while that step is on its way: SGLang drops the step's tokens.
    served.prefill(req)
    assert len(served.held) == 1
    req.output_ids.append(3)
    served.plan([req], [7])
    served.verify([9, 9], [1])
    served.end(req, [9])
    figures = figures_of(req)
    assert figures is not None
    assert [(c["at"], c["source"], c["accepted"]) for c in figures["cycles"]] == [
        (1, "cache", 1),
        (2, "cache", 0),
    ]
    assert (figures["num_cache_cycles"], figures["num_cache_accepted_drafts"]) == (2, 1)
    assert figures["num_target_tokens"] == 4  # of two prefills, and a bonus token of each cycle
    assert served.describe()["num_resyncs"] == 0


@pytest.mark.parametrize("by_length", [True, False])
def test_a_request_that_ends_with_its_prefill_after_a_retraction_is_kept(by_length: bool) -> None:
    served = ServedRequests(report_cycles=True)
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(served, req)
    if by_length:
        req.output_ids.extend([4, 1])  # else it is retracted while that step is on its way
    served.prefill(req)
    req.output_ids.append(3)
    req.finished_reason = FINISH_LENGTH(4) if by_length else FINISH_MATCHED_TOKEN(3)
    served.launched.note_finished_at_prefill(req)
    assert len(served.held) == 0
    figures = figures_of(req)
    assert figures is not None
    assert [(c["source"], c["accepted"]) for c in figures["cycles"]] == [("cache", 1)]
    assert figures["num_target_tokens"] == 3  # of two prefills and a bonus token
    assert served.describe()["num_shared_tokens"] == len(req.output_ids)
    served.launched.note_finished_at_prefill(req)  # it is not known any more


def test_a_request_that_ends_with_its_first_prefill_is_not_kept() -> None:
    served = ServedRequests()
    req = request("a", [1, 2])
    served.prefill(req)
    req.output_ids.append(3)
    req.finished_reason = FINISH_MATCHED_TOKEN(3)
    served.launched.note_finished_at_prefill(req)
    assert figures_of(req) is None
    served.held.drop_ended()
    assert len(served.held) == 0
    assert served.describe()["num_shared_tokens"] == 0


def test_embeddings_are_no_prompt_to_draft_from() -> None:
    served = ServedRequests()
    req = request("a", [1] * 6)  # what SGLang puts in the place of the ids
    req.input_embeds = [[0.5]] * 6
    served.prefill(req)
    assert served.describe()["num_request_tokens"] == 0
    req.output_ids.append(1)
    [plan] = single_plans(served.plan([req], [6]))
    assert plan.source == "plain"


def test_a_batch_is_worked_out_once_until_it_may_have_changed() -> None:
    served = ServedRequests()
    reqs = [request("a", [1, 2]), request("b", [1, 2, 3])]
    reqs[1].sampling_params.top_k = 5
    served.prefill(*reqs)
    first = served.held.of_step(reqs, None)
    assert first.slots.tolist() == [req.kv.req_pool_idx for req in reqs]
    assert first.sampled_rows.tolist() == [1]
    assert served.held.of_step(reqs, None) is first
    assert served.held.of_run(reqs) is first
    assert served.held.of_step(reqs[::-1], None).sampled_rows.tolist() == [0]
    # A request that was retracted comes back in another slot.
    reqs[0].kv.req_pool_idx = 1000
    served.prefill(reqs[0])
    assert served.held.of_step(reqs, None).slots[0] == 1000


def test_a_request_for_which_there_is_no_memory_at_all_is_dropped() -> None:
    served = ServedRequests()
    req = request("a", [1, 2])
    served.prefill(req)
    # An abort of a running request comes with its next result.
    req.to_finish = FINISH_ABORT()
    assert served.describe()["num_requests"] == 1
    req.kv.req_pool_idx = None
    assert served.describe()["num_requests"] == 0


def test_a_flush_commits_the_last_step_first() -> None:
    served = ServedRequests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    verified(served, req)
    served.worker().clear_cache_pool()
    assert served.describe()["num_accepted_drafts"]["cache"] == 1


def test_a_copy_of_a_request_is_another_one() -> None:
    served = ServedRequests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    served.prefill(req)
    other = copy.copy(req)
    served.prefill(other)
    assert len(served.held) == 2
    req.output_ids.append(3)
    served.plan([req, other], [6, 6])
    assert served.describe()["num_resyncs"] == 0


@pytest.mark.parametrize(
    ("params", "is_kept"),
    [
        ({}, False),
        ({"logit_bias": {"5": 1.0}, "min_p": 0.1}, False),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"min_new_tokens": 1}, True),
    ],
)
def test_the_output_is_kept_for_parameters_that_depend_on_it(
    params: dict[str, Any], is_kept: bool
) -> None:
    served = ServedRequests()
    req = request("a", [1, 2, 3, 4, 1, 2])
    for name, value in params.items():
        setattr(req.sampling_params, name, value)
    served.prefill(req)
    req.output_ids.append(3)
    [plan] = single_plans(served.plan([req], [6]))
    assert plan.source == "cache"
    served.verify([4, 1, 2, 9], [4])
    served.launched.commit()
    held = served.held.find(req)
    assert held is not None
    assert held.output_ids == (array("q", [3, 4, 1, 2, 9]) if is_kept else None)
