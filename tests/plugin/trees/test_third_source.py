"""A made-up third draft source, a second drafter on the device, goes through the table of sources,
the allocation, the merge into one trie, and the layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

from sglang_hvd.allocation import (
    Allocation,
    DrafterChoices,
    PredictedDrafts,
    StepAllocator,
    allocator,
)
from sglang_hvd.config import HvdConfig
from sglang_hvd.costs import StepCosts
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import TokenClasses
from sglang_hvd.plugin.trees.draft_trees import DraftNodes
from sglang_hvd.plugin.trees.layout import lay_out, merge_eagle_trees
from sglang_hvd.replay.core.single_cycles import VerifyOutcome, outcome_batch, single_plans
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import (
    SOURCES,
    DraftPlans,
    DraftSource,
    SourceTable,
)
from tests.allocation.fixed_drafts import of_model_only
from tests.payoff.made_up import constant_survival
from tests.plugin.trees.made_up_tries import Tree, eagle_trees_of, tries

Float32 = npt.NDArray[np.float32]

TABLE = SourceTable(*SOURCES.rows, DraftSource("heads", is_on_host=False))
WIDTHS, MAX_NODES = (1, 2, 4, 8), 5
LOOK_AFTER = 5


def heads_ms(
    costs: StepCosts, num_requests: Sequence[int], num_steps: int
) -> npt.NDArray[np.float64]:
    """The heads cost the same whatever their number."""
    return 0.3 * (np.asarray(num_requests) > 0)


MODEL = DrafterChoices(sizes=(1, 3), num_steps=(1, 2))
HEADS = DrafterChoices(sizes=(2,), num_steps=(1, 3), max_nodes=(1, 2), draft_ms=heads_ms)
MAX_STEPS = 3


def costs(per_node: float, of_round: float) -> StepCosts:
    return StepCosts(
        about="made up",
        batch_sizes=(1, 4),
        widths=(1, 8),
        verify=tuple(tuple(5 + per_node * n * w for w in (1, 8)) for n in (1, 4)),
        draft_round=(of_round, 2 * of_round),
        draft_extend=((0.0, 0.0), (0.0, 0.0)),
    )


def made(table: StepCosts, drafters: Sequence[DrafterChoices], num: int) -> StepAllocator:
    built = StepAllocator(table, widths=WIDTHS, drafters=drafters)
    for slot in range(num):
        built.start(slot)
    return built


def predicted(random: np.random.Generator, num: int, num_sizes: int) -> PredictedDrafts:
    hazards = random.random((num, MAX_NODES)) ** random.choice([0.1, 1, 4])
    tokens = random.random((num, num_sizes, MAX_STEPS)) ** random.choice([0.1, 1, 4])
    probs = np.cumprod(tokens, axis=2).astype(np.float32)
    return PredictedDrafts(
        np.cumprod(hazards, axis=1).astype(np.float32),
        np.tile(np.arange(1, MAX_NODES + 1, dtype=np.int32), (num, 1)),
        random.integers(0, MAX_NODES + 1, num).astype(np.int32),
        probs,
        probs,
    )


def of_sizes(given: PredictedDrafts, sizes: slice) -> PredictedDrafts:
    """The prediction for one drafter's sizes."""
    return PredictedDrafts(
        given.probs,
        given.depths,
        given.num_nodes,
        np.ascontiguousarray(given.model_probs[:, sizes]),
        np.ascontiguousarray(given.model_probs_if_right[:, sizes]),
    )


def score(
    found: Allocation, drafter: DrafterChoices, given: PredictedDrafts, table: StepCosts
) -> float:
    """Progress minus time, at the pace that every request and step begins with: 2 tokens a cycle,
    and the time of a plain step."""
    num = len(found.num_host)
    tokens = 0.0
    for i in range(num):
        host = given.probs[i, : found.num_host[i]]
        tokens += float(host.sum())
        if found.model_size[i]:
            place = drafter.sizes.index(int(found.model_size[i]))
            for step in range(found.num_steps):
                of_host = float(host[step]) if step < len(host) else 0.0
                both = of_host * float(given.model_probs_if_right[i, place, step])
                tokens += max(float(given.model_probs[i, place, step]) - both, 0.0)
    drafting = int(np.count_nonzero(found.num_model))
    ms = table.verify_ms(num, [found.width])[0]
    ms += drafter.draft_ms(table, [drafting], found.num_steps)[0]
    return tokens / 2 - num / float(table.verify_ms(num, [1])[0]) * float(ms)


def test_sets_of_three_sources_have_labels() -> None:
    assert TABLE.labels[:4] == SOURCES.labels == ("plain", "cache", "model", "both")
    assert TABLE.labels[4:] == ("heads", "cache+heads", "model+heads", "cache+model+heads")
    assert TABLE.labels[TABLE.bit_of("heads")] == "heads"
    with pytest.raises(KeyError, match="no draft source 'lookahead'"):
        TABLE.bit_of("lookahead")


@pytest.mark.parametrize("num", [1, 3])
def test_the_better_of_two_drafters_drafts(num: int) -> None:
    random = np.random.default_rng(num)
    slots = np.arange(num, dtype=np.int32)
    chosen = set()
    for _ in range(300):
        table = costs(random.choice([0.0, 0.1, 1.0]), random.choice([0.0, 0.5, 3.0]))
        given = predicted(random, num, 3)
        of_each = of_sizes(given, slice(0, 2)), of_sizes(given, slice(2, 3))
        alone = [
            score(made(table, [drafter], num).allocate(slots, of_one), drafter, of_one, table)
            for drafter, of_one in zip((MODEL, HEADS), of_each, strict=True)
        ]
        found = made(table, [MODEL, HEADS], num).allocate(slots, given)
        drafter = (MODEL, HEADS)[found.drafter]
        assert score(found, drafter, of_each[found.drafter], table) == pytest.approx(max(alone))
        limit = dict(zip(drafter.num_steps, drafter.node_limits, strict=True))[found.num_steps]
        assert found.num_model.tolist() == np.minimum(found.model_size, limit).tolist()
        if found.num_model.any():
            chosen.add((found.drafter, found.num_steps))
    assert chosen == {(0, 1), (0, 2), (1, 1), (1, 3)}


def test_a_request_of_the_model_drafter_alone_has_no_other_drafts() -> None:
    given = predicted(np.random.default_rng(0), 2, 3)
    given.model_probs[:, 2], given.model_probs_if_right[:, 2] = 1, 1  # the heads are always right
    built, slots = made(costs(0.0, 0.5), [MODEL, HEADS], 2), np.arange(2, dtype=np.int32)
    assert built.allocate(slots, given).drafter == 1
    found = built.allocate(slots, given, of_model_only(np.array([True, False]), MODEL.sizes[-1]))
    assert (found.drafter, found.num_steps) == (0, MODEL.num_steps[-1])
    assert (found.num_host[0], found.num_model[0]) == (0, MODEL.sizes[-1])


def test_a_drafter_that_does_not_pay_is_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_LOOK_AFTER", LOOK_AFTER)
    given = predicted(np.random.default_rng(0), 1, 3)
    given.num_nodes[:] = 0
    given.model_probs[:, :2], given.model_probs[:, 2] = 0.9, 0.01
    built, slots = made(costs(0.0, 0.5), [MODEL, HEADS], 1), np.zeros(1, np.int32)
    found = [built.allocate(slots, given) for _ in range(40 * LOOK_AFTER)]
    rounds = {(each.drafter, each.num_steps) for each in found if each.num_model.any()}
    assert rounds == {(0, 1), (0, 2), (1, 1), (1, 3)}


def test_plans_name_the_third_source() -> None:
    plain = DraftPlans.plain(2)
    of_host = np.array([TABLE.bit_of("cache"), 0], np.uint8)
    named = DraftPlans(
        plain.drafts,
        *(np.array([2, 0], np.int32) for _ in range(3)),
        None,
        np.zeros(2, np.int32),
        *(np.zeros(2, np.float32) for _ in range(2)),
        of_host,
        TABLE.bit_of("heads"),
        TABLE,
    )
    assert named.sources == ["cache+heads", "plain"]
    assert named.select([0]).sources == ["cache+heads"]


def test_the_drafter_plans_and_learns_by_source() -> None:
    """The heads cost nearly nothing and the model drafter much, so the heads draft. What they have
    accepted says nothing about the model drafter."""
    config = HvdConfig(policy="allocate")
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=constant_survival(0.3),
        token_classes=TokenClasses.from_strings(["a"] * 100),
        num_model_steps=2,
        num_model_nodes=3,
        verify_width=WIDTHS[-1],
        allocator=StepAllocator(costs(0.0, 40.0), widths=WIDTHS, drafters=[MODEL, HEADS]),
        sources=TABLE,
    )
    drafter.start("r", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    labels = []
    for token in range(20, 28):
        plans = drafter.plan(["r"], explains=[0])
        [plan] = single_plans(plans)
        labels.append(plan.source)
        if plan.cache_draft is None:
            assert plans.expected is not None
            assert plans.expected.verified == pytest.approx(plans.model_predicted, abs=1e-5)
        assert plan.num_model_nodes == min(HEADS.sizes[-1], HEADS.node_limits[-1])
        assert plans.num_model_steps == HEADS.num_steps[-1]
        outcome = VerifyOutcome([token, token + 20, 99], 2, num_model_accepted=2)
        drafter.commit(["r"], outcome_batch([outcome]))
    assert set(labels) <= {"heads", "cache+heads"}
    assert "heads" in labels
    assert sum(drafter.stats("r").num_cycles[label] for label in set(labels)) == len(labels)
    figures = drafter.model_figures()
    assert figures is not None
    assert figures.num_verified == 0


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token in tree:
        paths.append((*paths[parent], token))
    return paths


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(tries(4), tries(4), tries(4)), min_size=1, max_size=3))
def test_drafts_of_three_sources_make_one_trie(batch: list[tuple[Tree, Tree, Tree]]) -> None:
    width = 1 + max(sum(map(len, trees)) for trees in batch)
    token_ids = torch.zeros((len(batch), width), dtype=torch.int64)
    parents = torch.full_like(token_ids, -1)
    for row, (of_host, _, _) in enumerate(batch):
        for node, (parent, token) in enumerate(of_host):
            parents[row, 1 + node], token_ids[row, 1 + node] = parent, token
    num_used = torch.tensor([1 + len(of_host) for of_host, _, _ in batch])
    nodes = DraftNodes(token_ids, parents, num_used)
    marks = [
        merge_eagle_trees(nodes, eagle_trees_of([trees[place] for trees in batch]), None)
        for place in (1, 2)
    ]
    seq_lens = torch.full((len(batch),), 9)
    layout = lay_out(nodes, seq_lens, mode=TreeMaskMode.QLEN_ONLY, num_cells=0, buffer=None)
    visible = layout.mask.view(len(batch), width, width)
    for row, trees in enumerate(batch):
        num = int(num_used[row])
        trie = list(zip(parents[row, 1:num].tolist(), token_ids[row, 1:num].tolist(), strict=True))
        paths = paths_of(trie)
        assert len(paths) == len(set(paths))
        assert set(paths) == set(itertools.chain(*map(paths_of, trees)))
        for mark, tree in zip(marks, trees[1:], strict=True):
            marked = {path for path, is_in in zip(paths, mark[row].tolist(), strict=False) if is_in}
            assert marked == set(paths_of(tree)[1:])
        for node, path in enumerate(paths):
            assert layout.positions[row, node] == 9 + len(path)
            seen = {paths[other] for other in range(num) if visible[row, node, other]}
            assert seen == {path[:depth] for depth in range(len(path) + 1)}
