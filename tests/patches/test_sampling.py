"""Sampling over a verify tree is lossless, and filters as SGLang's own CPU sampler does."""

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel.sampling import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    tree_speculative_sampling_target_only,
)
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

VOCAB = 5
NUM_SAMPLES = 20_000
# What the test below may fail by chance, were its random numbers not fixed.
FALSE_ALARM = 1e-6

# Parent of each node; node 0 is the root. Nodes are drawn in this order.
TREES = {
    "root only": [-1],
    "chain": [-1, 0, 1, 2],
    "full binary": [-1, 0, 0, 1, 1, 2, 2],
    "siblings only": [-1, 0, 0, 0, 0, 0],
    "chain beside a bush": [-1, 0, 1, 2, 3, 0, 0, 5],
    "unused slots": [-1, 0, 1, None, None],
}


def links(parents: list[int | None]) -> torch.Tensor:
    """index, next token, next sibling: int64[3, width]. A parent of None leaves the slot out."""
    width = len(parents)
    mask = torch.eye(width, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent is not None and parent >= 0:
            mask[node] |= mask[parent]
    out = torch.empty(3, width, dtype=torch.int64)
    positions = torch.empty(width, dtype=torch.int64)
    reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.zeros(1, dtype=torch.int64), positions, *out, 1, width
    )
    return out


def sample(
    target_probs: torch.Tensor, tokens: torch.Tensor, tree: torch.Tensor, *, depth: int
) -> list[tuple[int, ...]]:
    """What NUM_SAMPLES runs emit: accepted drafts and the bonus token.

    target_probs: float[width, VOCAB]. tokens: int64[width]. tree: int64[3, width].
    """
    width, batch = tokens.numel(), NUM_SAMPLES
    predicts = torch.full((batch * width,), -1, dtype=torch.int32)
    accept_index = torch.full((batch, depth), -1, dtype=torch.int32)
    num_accepted = torch.empty(batch, dtype=torch.int32)
    index, next_token, next_sibling = (link.repeat(batch, 1) for link in tree)
    index += torch.arange(batch)[:, None] * width
    tree_speculative_sampling_target_only(
        predicts,
        accept_index,
        num_accepted,
        tokens.repeat(batch, 1),
        index,
        next_token,
        next_sibling,
        torch.rand(batch, width),
        torch.rand(batch),
        target_probs.repeat(batch, 1, 1),
        torch.zeros(batch, *target_probs.shape),
    )
    return [
        tuple(predicts[path[: n + 1]].tolist())
        for path, n in zip(accept_index, num_accepted.tolist(), strict=True)
    ]


def exact(
    probs: list[list[float]], tokens: list[int], tree: list[list[int]], *, depth: int
) -> dict[tuple[int, ...], float]:
    """The same by enumeration, with each token drawn from the target model alone."""
    _, next_token, next_sibling = tree

    def walk(node: int, emitted: tuple[int, ...], p: float) -> Iterator[tuple[tuple, float]]:
        children: dict[int, int] = {}
        child = next_token[node] if len(emitted) < depth - 1 else -1
        while child != -1:
            children.setdefault(tokens[child], child)
            child = next_sibling[child]
        for token, q in enumerate(probs[node]):
            if q == 0.0:
                continue
            if token in children:
                yield from walk(children[token], (*emitted, token), p * q)
            else:
                yield (*emitted, token), p * q

    return dict(walk(0, (), 1.0))


def total_variation_bound(num_outcomes: int) -> float:
    """Distance that the empirical distribution exceeds with probability FALSE_ALARM at most.

    Bretagnolle-Huber-Carol: P(2 TV >= e) <= 2^k exp(-n e^2 / 2) for k outcomes, n samples.
    """
    log_terms = num_outcomes * math.log(2) - math.log(FALSE_ALARM)
    return math.sqrt(2 * log_terms / NUM_SAMPLES) / 2


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("duplicates", [False, True])
def test_emitted_tokens_follow_the_target_distribution(shape: str, duplicates: bool) -> None:
    torch.manual_seed(len(shape))
    tree, width = links(TREES[shape]), len(TREES[shape])
    depth = max(2, width - 2)  # shorter than the deepest chain in one of the trees
    target_probs = torch.rand(width, VOCAB).pow(2)
    target_probs[:, 0] = 0.0  # filtered out
    # Rows need not sum to 1: SGLang's filters leave them unscaled here.
    weights = target_probs * torch.rand(width, 1).add(0.2)
    if duplicates:
        tokens = torch.randint(0, VOCAB, (width,))
    else:  # siblings differ
        tokens = torch.tensor([n % VOCAB for n in range(width)])

    expected = exact(
        (target_probs / target_probs.sum(1, keepdim=True)).tolist(),
        tokens.tolist(),
        tree.tolist(),
        depth=depth,
    )
    emitted = Counter(sample(weights, tokens, tree, depth=depth))
    assert set(emitted) <= set(expected), "a token of zero probability was drawn"
    distance = sum(abs(emitted[e] / NUM_SAMPLES - p) for e, p in expected.items()) / 2
    assert distance < total_variation_bound(len(expected))


def test_children_that_hold_all_mass_but_rounding_never_yield_an_impossible_token() -> None:
    tree = links([-1, 0, 0])
    probs = torch.tensor([[0.0, 0.7, 0.3 - 1e-7, 0.0, 0.0]] * 3)
    emitted = sample(probs, torch.tensor([0, 1, 2]), tree, depth=3)
    assert {token for tokens in emitted for token in tokens} == {1, 2}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31 - 1),
    top_k=st.integers(1, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_filters_keep_what_sglang_samples_from(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(seed)
    probs = (torch.randn(3, 12) / 0.7).softmax(1)
    top_ks = torch.tensor([top_k, 12, 1])
    top_ps = torch.tensor([top_p, 1.0, top_p])
    min_ps = torch.tensor([min_p, 0.0, min_p])
    _, kept, token_ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), top_ks, top_ps, min_ps, True, None, None, return_filtered_probs=True
    )
    expected = torch.zeros_like(probs).scatter_(1, token_ids.long(), kept)
    # The order in which the verify path applies them.
    filtered = keep_min_p(keep_top_p(keep_top_k(probs, top_ks), top_ps), min_ps)
    torch.testing.assert_close(filtered, expected, rtol=0, atol=0)


def test_top_k_of_one_is_greedy_on_ties() -> None:
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    kept = keep_top_k(probs, torch.tensor([1]))
    assert kept.nonzero().tolist() == [[0, int(probs.argmax())]]
