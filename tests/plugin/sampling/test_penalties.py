"""Penalties at each node against SGLang's penalizers, fed with the node's text token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from sglang_hvd.plugin.requests.sampling import Penalties
from sglang_hvd.plugin.sampling.penalties import NodePaths, penalty_tensors

VOCAB_SIZE = 12


class Batch:
    """What SGLang's penalizers read of a batch; they refer to it weakly."""

    device = "cpu"

    def __init__(self, req: Any) -> None:
        self.reqs = [req]


def plain(penalties: Penalties, output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits after an output as plain serving has them, the additive penalties first."""
    params = SimpleNamespace(
        frequency_penalty=penalties.frequency,
        presence_penalty=penalties.presence,
        repetition_penalty=penalties.repetition,
        min_new_tokens=penalties.min_new_tokens,
        stop_token_ids=set(penalties.end_ids),
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    req = SimpleNamespace(sampling_params=params, eos_token_ids=None, tokenizer=tokenizer)
    batch: Any = Batch(req)
    logits = logits.clone()[None]
    for kinds in (
        {BatchedFrequencyPenalizer, BatchedPresencePenalizer, BatchedMinNewTokensPenalizer},
        {BatchedRepetitionPenalizer},
    ):
        weak: Any = kinds
        orchestrator = BatchedPenalizerOrchestrator(VOCAB_SIZE, batch, weak)
        for token_id in output:
            orchestrator.cumulate_output_tokens(torch.tensor([token_id]))
        orchestrator.apply(logits)
    return logits[0]


TOKENS = st.integers(0, VOCAB_SIZE - 1)
PENALTIES = st.builds(
    Penalties,
    frequency=st.sampled_from([0.0, 0.3, -1.7]),
    presence=st.sampled_from([0.0, 0.9, -0.2]),
    repetition=st.sampled_from([1.0, 1.3, 0.6]),
    min_new_tokens=st.integers(0, 8),
    end_ids=st.frozensets(TOKENS, max_size=3),
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Penalties], list[list[int]], list[list[int]], Any]:
    """Penalties, outputs, the tokens of the nodes (the output's last first), their parents."""
    k, w = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    kinds = draw(st.lists(PENALTIES, min_size=k, max_size=k))
    outputs = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=k, max_size=k))
    nodes = [[out[-1], *draw(st.lists(TOKENS, min_size=w - 1, max_size=w - 1))] for out in outputs]
    parents = [[0, *(draw(st.integers(0, node - 1)) for node in range(1, w))] for _ in range(k)]
    return kinds, outputs, nodes, parents


@settings(max_examples=150, deadline=None)
@given(requests(), st.integers(0, 2**31))
def test_each_node_has_the_penalties_of_its_own_text(
    made: tuple[list[Penalties], list[list[int]], list[list[int]], Any], seed: int
) -> None:
    kinds, outputs, nodes, parents = made
    k, w = len(kinds), len(nodes[0])
    torch.manual_seed(seed)
    logits = torch.randn(k, w, VOCAB_SIZE)
    paths = NodePaths.of(torch.tensor(nodes), torch.tensor(parents), max_depth=max(w - 1, 1))
    found = penalty_tensors(
        kinds,
        [np.array(output, np.int64) for output in outputs],
        paths,
        vocab_size=VOCAB_SIZE,
        device="cpu",
    ).apply(logits)
    for i in range(k):
        texts = [outputs[i]]
        for node in range(1, w):
            texts.append([*texts[parents[i][node]], nodes[i][node]])
        for node, text in enumerate(texts):
            expected = plain(kinds[i], text, logits[i, node])
            torch.testing.assert_close(found[i, node], expected, rtol=1e-6, atol=1e-6)


def test_without_output_only_ends_are_forbidden() -> None:
    kinds = [
        Penalties(0.5, 0.5, 1.5, 3, frozenset({2, VOCAB_SIZE + 7})),
        Penalties(0.5, 0.0, 1.0, 0, frozenset()),
    ]
    outputs = [np.array([], np.int64), np.array([4, 4], np.int64)]
    found = penalty_tensors(kinds, outputs, None, vocab_size=VOCAB_SIZE, device="cpu")
    logits = torch.linspace(-1, 1, VOCAB_SIZE).expand(2, 1, VOCAB_SIZE)
    expected = logits.clone()
    expected[0, 0, 2] = float("-inf")
    expected[1, 0, 4] -= 1.0
    torch.testing.assert_close(found.apply(logits), expected)


@pytest.mark.parametrize("max_depth", [1, 2, 5])
def test_paths_end_before_the_root(max_depth: int) -> None:
    paths = NodePaths.of(torch.tensor([[7, 1, 2, 3]]), torch.tensor([[0, 0, 1, 0]]), max_depth)
    depths = [min(depth, max_depth) for depth in (0, 1, 2, 1)]
    assert paths.is_token.sum(2).tolist() == [depths]
    assert paths.token_ids[0, 2].tolist() == [2, 1, 7, 7, 7][:max_depth]
