"""Replay generates the recording again, with the drafter's own plans, labels and features."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import FEATURE_NAMES, POSITION_FEATURES, TokenClasses
from sglang_hvd.replay.core.replayed import ReplayedCycle, replay, right_branch, training_rows
from sglang_hvd.replay.core.single_cycles import VerifyOutcome, outcome_batch, single_plans
from sglang_hvd.replay.core.totals import CycleTotals, count_cycles
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.text_traces import read_text_traces, tokenize
from sglang_hvd.traces.tokenizer_json import load_tokenizer
from sglang_hvd.traces.trace import Trace
from tests.payoff.made_up import linear

CLASSES = TokenClasses.from_strings(["a", ",", "("])
DRAFT_LEN_AS_PAYOFF = linear({"draft_len": 1})


def drafter(policy: Policy, shared_cache_tokens: int = 1000) -> HybridDrafter:
    config = HvdConfig(threshold=2.0).for_policy(policy)
    return HybridDrafter(
        config,
        cache=SuffixCache.as_in_paper(shared_cache_tokens=shared_cache_tokens),
        predictor=DRAFT_LEN_AS_PAYOFF if config.predicts else None,
        token_classes=CLASSES,
        num_model_steps=2,
        num_model_nodes=2,
        verify_width=33,
    )


def trace(prompt: list[int], output: list[int]) -> Trace:
    return Trace(
        prompt_ids=np.array(prompt, dtype=np.int32),
        output_ids=np.array(output, dtype=np.int32),
        session="s",
        turn=0,
        family="f",
    )


# prompt 0 1 2 3 4 5 6 7, output 1 2 3 4 9: the output copies the prompt and then departs.
COPY = trace([0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9])
TOKENS = st.lists(st.integers(0, 2), max_size=40)
POLICIES = st.sampled_from(["payoff", "frequency", "cache", "model"])


def labels(cycles: list[ReplayedCycle]) -> list[int | None]:
    return [cycle.draft and cycle.draft.accepted_len for cycle in cycles]


def sources(cycles: list[ReplayedCycle]) -> list[str]:
    return [cycle.plan.source for cycle in cycles]


@given(POLICIES, st.integers(0, 4), TOKENS, TOKENS)
@settings(max_examples=150, deadline=None)
def test_the_cycles_generate_the_recording(
    policy: Policy, num_model_accepted: int, prompt: list[int], output: list[int]
) -> None:
    made, recording = drafter(policy), trace(prompt, output)
    cycles = replay(recording, made, num_model_accepted=num_model_accepted)
    generated = [token for cycle in cycles for token in cycle.outcome.token_ids]
    assert output[:1] + generated == output
    assert made.num_requests == 0

    position = 1
    for cycle in cycles:
        rest = output[position:]
        accepted = cycle.outcome.num_accepted_drafts
        if cycle.plan.cache_draft is not None:
            drafted = cycle.plan.cache_draft.token_ids.tolist()
            agreeing = [a == b for a, b in zip(drafted, rest, strict=False)]
            label = agreeing.index(False) if False in agreeing else len(agreeing)
            assert cycle.draft is not None
            assert cycle.draft.accepted_len == accepted == label
            assert cycle.draft.is_verified
        elif cycle.plan.source == "model":
            assert accepted == min(num_model_accepted, cycle.plan.num_model_steps, len(rest))
        else:
            assert accepted == 0
        has_verified = cycle.draft is not None and cycle.draft.is_verified
        assert has_verified == (cycle.plan.cache_draft is not None)
        position += len(cycle.outcome.token_ids)


def test_a_copied_passage_is_accepted_up_to_where_it_departs() -> None:
    cycles = replay(COPY, drafter("cache"), num_model_accepted=0)
    drafts = [cycle.plan.cache_draft for cycle in cycles]
    assert [draft and draft.token_ids.tolist() for draft in drafts] == [[2], [4, 5, 6]]
    assert labels(cycles) == [1, 1]
    assert [cycle.outcome.token_ids.tolist() for cycle in cycles] == [[2, 3], [4, 9]]


def test_draft_tokens_after_the_end_of_the_text_are_not_accepted() -> None:
    # At [1, 2, 3] the draft is [4, 5, 6]; the output ends with 4, or continues with 9.
    for output in [1, 2, 3, 4], [1, 2, 3, 4, 9]:
        cycles = replay(trace(list(range(8)), output), drafter("model"), num_model_accepted=0)
        draft = cycles[2 if len(output) == 5 else -1].draft
        assert draft is not None
        assert (draft.num_tokens, draft.accepted_len) == (3, 1)


def test_draft_tokens_after_a_cut_of_the_text_are_unknown() -> None:
    # At [1, 2, 3] the draft is [4, 5, 6]; the output was cut after 4.
    made = replace(trace(list(range(8)), [1, 2, 3, 4]), is_cut=True)
    cycles = replay(made, drafter("model"), num_model_accepted=0)
    assert [(c.draft.num_tokens, c.draft.accepted_len) for c in cycles if c.draft] == [
        *((1, 1), (2, 2), (1, 1)),
    ]
    whole = replay(replace(made, is_cut=False), drafter("model"), num_model_accepted=0)
    for cut, uncut in zip(cycles, whole, strict=True):
        assert cut.draft is not None
        assert uncut.draft is not None
        assert cut.draft.accepted_len == uncut.draft.accepted_len
        assert cut.draft.features.tobytes() == uncut.draft.features.tobytes()


def test_the_last_drafts_of_a_cut_text_are_neither_right_nor_wrong() -> None:
    # Drafts grow with the match, and the output is cut after ten tokens that are all right.
    made = replace(trace(list(range(20)), list(range(1, 12))), is_cut=True)
    cycles = replay(made, drafter("model"), num_model_accepted=0)
    assert [(c.draft.num_tokens, c.draft.is_worth_known) for c in cycles if c.draft] == [
        *((1, True), (2, True), (3, True), (4, True), (5, True)),
        *((5, False), (4, False), (3, False), (2, False), (1, False)),
    ]
    ended = replay(replace(made, is_cut=False), drafter("model"), num_model_accepted=0)
    assert all(c.draft.is_worth_known for c in ended if c.draft)


def test_labels_are_known_for_drafts_that_are_not_verified() -> None:
    cycles = replay(COPY, drafter("model"), num_model_accepted=0)
    assert sources(cycles) == ["model"] * 4
    assert labels(cycles) == [1, 2, 1, 0]


def test_a_model_drafter_that_accepts_nothing_visits_every_position() -> None:
    cycles = replay(COPY, drafter("model"), num_model_accepted=0)
    assert [cycle.outcome.token_ids.tolist() for cycle in cycles] == [[2], [3], [4], [9]]


def test_a_kept_output_helps_the_next_request() -> None:
    made = drafter("cache")
    first = trace([7], [1, 2, 3, 4, 5, 6])
    second = trace([8], [1, 2, 3, 4, 5, 6])
    alone = replay(first, made, num_model_accepted=0, keep=False)
    still_alone = replay(second, made, num_model_accepted=0)
    helped = replay(second, made, num_model_accepted=0)
    assert set(sources(alone)) == set(sources(still_alone)) == {"plain"}
    assert len(helped) < len(alone)


@pytest.mark.parametrize("output", [[], [1]])
def test_an_output_that_prefill_generates_needs_no_cycle(output: list[int]) -> None:
    made = drafter("cache")
    assert replay(trace([1, 2], output), made, num_model_accepted=1) == []
    assert made.num_requests == 0


def test_replay_plans_what_a_batch_in_serving_plans() -> None:
    random = np.random.default_rng(3)
    recordings = [
        trace(random.integers(0, 3, 30).tolist(), random.integers(0, 3, 25).tolist())
        for _ in range(6)
    ]
    replayed = [
        replay(each, drafter("payoff", shared_cache_tokens=0), num_model_accepted=1)
        for each in recordings
    ]

    serving = drafter("payoff", shared_cache_tokens=0)
    positions = dict.fromkeys(range(len(recordings)), 1)
    for index, each in enumerate(recordings):
        serving.start(index, each.prompt_ids)
        serving.extend(index, each.output_ids[:1])
    served: list[list[tuple[str, float | None]]] = [[] for _ in recordings]
    while running := [i for i, p in positions.items() if p < len(recordings[i].output_ids)]:
        plans = single_plans(serving.plan(running))
        outcomes = []
        for index, plan in zip(running, plans, strict=True):
            served[index].append((plan.source, plan.predicted_len))
            cycle = replayed[index][len(served[index]) - 1]
            outcomes.append(
                VerifyOutcome(cycle.outcome.token_ids, cycle.outcome.num_accepted_drafts)
            )
            positions[index] += len(cycle.outcome.token_ids)
        serving.commit(running, outcome_batch(outcomes))
    assert served == [
        [(cycle.plan.source, cycle.plan.predicted_len) for cycle in cycles] for cycles in replayed
    ]
    assert {source for cycles in served for source, _ in cycles} == {
        "cache",
        "model",
    }


def test_training_rows_are_the_cycles_with_a_draft() -> None:
    cycles = replay(trace([5, 1, 2], [7, 1, 2, 9]), drafter("model"), num_model_accepted=0)
    rows = training_rows(cycles)
    assert labels(cycles) == [None, 1, 0]
    assert rows.accepted_lens.tolist() == [1, 0]
    assert rows.draft_lens.tolist() == [1, 2]
    assert not rows.is_verified.any()
    assert rows.features.shape == (2, len(FEATURE_NAMES))
    assert rows.positions.shape == (2, 2, len(POSITION_FEATURES))
    draft = cycles[2].draft
    assert draft is not None
    assert (rows.features[1] == draft.features).all()
    assert (rows.positions[1] == draft.positions).all()
    assert not rows.positions[0, 1].any()


def test_without_a_draft_there_are_no_rows() -> None:
    cycles = replay(trace([1], [2, 3]), drafter("model"), num_model_accepted=0)
    with pytest.raises(ValueError, match="no cycle had a cache draft"):
        training_rows(cycles)


def test_a_summary_counts_cycles_tokens_and_sources() -> None:
    made = drafter("payoff")
    # At [1, 2] the draft has 2 tokens, of which 1 is accepted; elsewhere it is shorter.
    cycles = replay(trace([0, 1, 2, 3, 4, 5], [1, 2, 3, 8, 8]), made, num_model_accepted=0)
    summary = count_cycles(cycles)
    assert sources(cycles) == ["model", "cache", "model"]
    assert (summary.num_cycles, summary.num_tokens) == (3, 4)
    assert (summary.num_model, summary.num_cache) == (2, 1)
    assert summary + summary == CycleTotals(6, 8, 6, 2, num_accepted=2, num_steps=6)
    assert summary.mean_accepted_len == 1 / 3
    assert summary.cache_share == 1 / 3
    assert summary.cycles_per_1k_tokens == 750


def test_every_cycle_counts_for_the_accepted_length() -> None:
    cycles = replay(trace([1, 2, 7], [9, 1, 2]), drafter("cache"), num_model_accepted=0)
    assert sources(cycles) == ["plain", "cache"]
    assert count_cycles(cycles).mean_accepted_len == 1 / 2


def test_trees_of_both_drafts_count_for_the_cache() -> None:
    assert CycleTotals(num_cycles=4, num_cache=1, num_both=2).cache_share == 3 / 4


def test_no_cycles_have_no_figures() -> None:
    none = count_cycles([])
    assert none == CycleTotals()
    assert none.cycles_per_1k_tokens is none.mean_accepted_len is none.cache_share is None


def test_recorded_generations_need_fewer_cycles_with_the_hybrid_than_with_either_drafter(
    traces_dir: Path, tokenizer_file: Path
) -> None:
    path = traces_dir / "structured_tool__spider_intercode_gpt4.jsonl"
    lines = list(read_text_traces(path))[:150]
    tokenizer = load_tokenizer(tokenizer_file)

    def num_cycles(policy: Policy) -> int:
        made = drafter(policy, shared_cache_tokens=100_000)
        recordings = tokenize(iter(lines), tokenizer, eos_token_id=None)
        return sum(len(replay(each, made, num_model_accepted=1)) for each in recordings)

    assert num_cycles("payoff") < min(num_cycles("cache"), num_cycles("model"))


def test_a_tree_goes_as_far_as_one_of_its_branches() -> None:
    # 5, and after it 6 or 7; after 7 another 6.
    token_ids, parents = np.array([5, 6, 7, 6], np.int32), np.array([-1, 0, 0, 2], np.int32)
    for text, branch in (
        ([5, 7, 6, 6], [0, 2, 3]),
        ([5, 6, 7], [0, 1]),
        ([6, 5], []),
        ([5], [0]),
        ([], []),
    ):
        assert right_branch(token_ids, parents, np.array(text, np.int32)) == branch
