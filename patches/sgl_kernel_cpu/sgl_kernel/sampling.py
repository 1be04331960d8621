"""Lossless sampling over a verify tree, and the probability filters of SGLang's CPU sampler."""

import numpy as np
import torch
from torch import Tensor

from sgl_kernel.demands import demand, demand_verified
from sgl_kernel.tree import write_paths


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Sample one path per tree so that its tokens are distributed as the target model's own.

    At a node, children are taken in order: a child is accepted with the probability the target
    gives its token, among what earlier siblings left. When none is, the bonus token is drawn from
    the target's distribution without the tried tokens.

    Source: sglang/kernels/jit/include/sgl_kernel/speculative/sampling.cuh, with two differences,
    neither of which changes the distribution: rows of target_probs need not sum to 1 (they are
    divided by their mass), and a token of zero probability is never drawn.

    uniform_samples: float[B, W], the coin of the children of each node.
    uniform_samples_for_final_sampling: float[B]. target_probs: float[B, W, V]. draft_probs: scratch
    space of the CUDA operator, not used. The rest as in `sgl_kernel.tree.verify_tree_greedy_cpu`.
    Thresholds below 1 accept more drafts than lossless sampling would. Raises ValueError for what
    the CUDA operator does not take.
    """
    demand_verified(
        predicts,
        accept_index,
        accept_token_num,
        *(candidates, retrive_index, retrive_next_token, retrive_next_sibling),
    )
    (batch, width), vocab_size = candidates.shape, target_probs.shape[-1]
    demand(torch.float32, (batch, width), uniform_samples=uniform_samples)
    demand(
        torch.float32,
        (batch,),
        uniform_samples_for_final_sampling=uniform_samples_for_final_sampling,
    )
    demand(
        torch.float32,
        (batch, width, vocab_size),
        target_probs=target_probs,
        draft_probs=draft_probs,
    )
    max_depth = accept_index.shape[1]
    probs = target_probs.float().numpy()
    final_coins = uniform_samples_for_final_sampling.tolist()
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        uniform_samples.tolist(),
        strict=True,
    )
    paths: list[list[int]] = []
    sampled: list[int] = []
    for b, (tokens, index, next_token, next_sibling, coins) in enumerate(rows):
        path, node = [index[0]], 0
        left = probs[b, 0].astype(np.float64)
        while len(path) < max_depth:
            mass = left.sum()
            tried, child = 0.0, next_token[node]
            while child != -1:
                p = left[tokens[child]] / mass
                tried += p
                if p > 0 and (coins[node] < tried / threshold_acc or p >= threshold_single):
                    break
                left[tokens[child]] = 0.0
                child = next_sibling[child]
            if child == -1:
                break
            sampled.append(tokens[child])
            path.append(index[child])
            node = child
            left = probs[b, node].astype(np.float64)
        sampled.append(_draw(left, final_coins[b], fallback=probs[b, node]))
        paths.append(path)
    write_paths(
        paths,
        sampled,
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_token_num,
    )


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Zero all but the top_ks[n] largest entries of each row; the kept entries are not rescaled.

    SGLang's CPU sampler filters jointly: top-p counts the mass of the unfiltered row. Its verify
    path calls this first and `keep_top_p` next, so rescaling in between would keep fewer tokens.

    probs: float[N, V]. top_ks: int[N].
    """
    values, token_ids = _descending(probs)
    values[torch.arange(values.shape[1]) >= top_ks.view(-1, 1)] = 0.0
    return torch.zeros_like(values).scatter_(1, token_ids, values)


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Zero all entries that larger entries of mass above top_ps[n] precede; no rescaling.

    probs: float[N, V], mass counted as given. top_ps: float[N].
    """
    values, token_ids = _descending(probs)
    values[values.cumsum(1) - values > top_ps.view(-1, 1)] = 0.0
    return torch.zeros_like(values).scatter_(1, token_ids, values)


def keep_min_p(probs: Tensor, min_ps: Tensor) -> Tensor:
    """Zero all entries below min_ps[n] times the row's largest; no rescaling.

    probs: float[N, V]. min_ps: float[N].
    """
    return probs.masked_fill(probs < probs.amax(1, keepdim=True) * min_ps.view(-1, 1), 0.0)


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 of the 16 bytes seed, position and column: int64[N, M], in [0, 2**32).

    It gives the noise of sampling with a seed. Source:
    sglang/kernels/ops/sampling/murmur_hash.py.

    seed: uint64[N]. positions: int[N]. col_indices: int[M].
    """
    seed = seed.view(torch.int64)
    hashed = torch.zeros_like(seed)
    for block in (seed & _U32, seed >> 32 & _U32, positions.to(torch.int64) & _U32):
        hashed = _mix(hashed, block)
    hashed = _mix(hashed[:, None], col_indices.to(torch.int64)[None] & _U32) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed ^= hashed >> shift
        hashed = hashed * factor & _U32
    return hashed ^ hashed >> 16


_U32 = 0xFFFFFFFF


def _mix(hashed: Tensor, block: Tensor) -> Tensor:
    # Products pass 64 bits, whose lower 32 are right all the same.
    mixed = _rotated(block * 0xCC9E2D51 & _U32, 15) * 0x1B873593 & _U32
    return _rotated(hashed ^ mixed, 13) * 5 + 0xE6546B64 & _U32


def _rotated(x: Tensor, num_bits: int) -> Tensor:
    return (x << num_bits | x >> 32 - num_bits) & _U32


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def _descending(probs: Tensor) -> tuple[Tensor, Tensor]:
    # stable: of equal entries the first wins, as in argmax, so top_k = 1 is greedy decoding
    values, token_ids = probs.sort(dim=1, descending=True, stable=True)
    return values, token_ids


def _draw(weights: np.ndarray, coin: float, *, fallback: np.ndarray) -> int:
    """The entry of weights in which coin, in [0, 1), falls.

    If the children hold all the mass except for rounding, all of them can be refused, and nothing
    is left to draw from. Then the draw is from the node's whole distribution, fallback.
    """
    cumulative = np.cumsum(weights)
    if cumulative[-1] <= 0.0:
        cumulative = np.cumsum(fallback, dtype=np.float64)
    return int(np.searchsorted(cumulative, coin * cumulative[-1], side="right"))
