"""The CPU operators against SGLang's own Triton kernels.

Run by test_operators_match_triton.py in a process of its own: the kernels run on a CPU only in
Triton's interpreter, which must be chosen before triton is imported.
"""

import pytest
import sgl_kernel
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled
from sglang.kernels.ops.sampling import murmur_hash
from sglang.kernels.ops.speculative import cache_locs, eagle, reconstruct_tree, spec_tree
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.spec_utils import select_top_k_tokens

EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31 - 1)


@EXAMPLES
@given(SEEDS)
def test_murmur_hash(seed: int) -> None:
    torch.manual_seed(seed)
    n, m = 3, 1500
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,)).view(torch.uint64)
    positions, columns = torch.randint(0, 2**31 - 1, (n,)), torch.arange(m)
    expected = torch.empty((n, m), dtype=torch.uint32)
    murmur_hash.murmur_hash32_kernel[(n, 2)](
        seeds, positions, columns, expected, n, m, BLOCK_SIZE=1024
    )
    found = torch.ops.sgl_kernel.murmur_hash32_cpu(seeds, positions, columns)
    assert torch.equal(found, expected.to(torch.int64))


def eagle_draft(batch: int, topk: int, steps: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(parent_list, selected_index) of random drafts, chosen by SGLang's own functions."""
    scores: torch.Tensor | None = None
    score_list, token_list, parents_list = [], [], []
    rows = batch
    for step in range(steps):
        probs = torch.rand(rows, topk).softmax(1)
        tokens = torch.randint(0, 1000, (rows, topk))
        hidden = torch.zeros(rows, 1)
        _, _, scores, (score, token, parents) = select_top_k_tokens(
            step, probs, tokens, hidden, scores, topk
        )
        score_list.append(score)
        token_list.append(token)
        parents_list.append(parents)
        rows = batch * topk
    parent_list, selected, _ = organize_draft_results(score_list, token_list, parents_list, width)
    return parent_list, selected


def random_trees(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(parent int64[batch, width], ancestor-or-self mask bool[batch, width, width]), any shape."""
    parent = (torch.rand(batch, width) * torch.arange(width)).long()
    parent[:, 0] = -1
    mask = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for node in range(1, width):
            mask[b, node] |= mask[b, parent[b, node]]
    return parent, mask


def linked_trees(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Links (index, next token, next sibling) int64[batch, width] of random trees."""
    _, mask = random_trees(batch, width)
    links = torch.empty(3, batch, width, dtype=torch.int64)
    positions = torch.empty(batch * width, dtype=torch.int64)
    reconstruct_indices_from_tree_mask(
        mask.flatten(), torch.zeros(batch, dtype=torch.int64), positions, *links, batch, width
    )
    return links[0], links[1], links[2]


def request_table(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(req_to_token int32[batch + 2, length] of distinct slots, req_pool_indices int64[batch])."""
    slots = torch.randperm((batch + 2) * length).int().view(batch + 2, length)
    return slots, torch.randperm(batch + 2)[:batch]


@EXAMPLES
@given(
    seed=SEEDS,
    batch=st.integers(1, 3),
    topk=st.integers(1, 4),
    steps=st.integers(1, 4),
    mode=st.sampled_from(["FULL_MASK", "QLEN_ONLY"]),
)
def test_build_tree(seed: int, batch: int, topk: int, steps: int, mode: str) -> None:
    torch.manual_seed(seed)
    candidates = topk + (steps - 1) * topk**2
    width = int(torch.randint(2, candidates + 2, ()))
    parent_list, selected = eagle_draft(batch, topk, steps, width)
    seq_lens = torch.randint(1, 20, (batch,))
    mask_mode = spec_tree.TreeMaskMode[mode]
    cells = batch * width * width
    if mode == "FULL_MASK":
        cells += int(seq_lens.sum()) * width

    results = []
    for build in (
        spec_tree.sgl_build_tree_kernel_triton,
        spec_tree.build_tree_kernel_efficient_func,
    ):
        mask = torch.ones(cells, dtype=torch.bool)
        positions = torch.empty(batch * width, dtype=torch.int64)
        links = torch.full((3, batch, width), -1)
        build(
            *(parent_list, selected, seq_lens, mask, positions, *links),
            *(topk, steps, width, mask_mode),
        )
        results.append((mask, positions, links))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@EXAMPLES
@given(seed=SEEDS, batch=st.integers(1, 3), width=st.integers(1, 17))
def test_reconstruct_indices_from_tree_mask(seed: int, batch: int, width: int) -> None:
    torch.manual_seed(seed)
    _, mask = random_trees(batch, width)
    seq_lens = torch.randint(1, 20, (batch,))
    results = []
    for reconstruct in (
        reconstruct_tree.reconstruct_indices_from_tree_mask_triton,
        reconstruct_tree.reconstruct_indices_from_tree_mask_func,
    ):
        positions = torch.empty(batch * width, dtype=torch.int64)
        links = torch.empty(3, batch, width, dtype=torch.int64)
        reconstruct(mask.flatten(), seq_lens, positions, *links, batch, width)
        results.append(torch.cat([positions, links.flatten()]))
    assert torch.equal(*results)


@EXAMPLES
@given(seed=SEEDS, batch=st.integers(1, 3), width=st.integers(1, 12), depth=st.integers(1, 12))
def test_verify_tree_greedy(seed: int, batch: int, width: int, depth: int) -> None:
    torch.manual_seed(seed)
    links = linked_trees(batch, width)
    candidates = torch.randint(0, 3, (batch, width))
    target = torch.randint(0, 3, (batch, width))
    results = []
    for verify in (spec_tree.verify_tree_greedy_triton, spec_tree.verify_tree_greedy_func):
        predicts = torch.zeros(batch * width, dtype=torch.int32)
        accept_index = torch.full((batch, depth), -1, dtype=torch.int32)
        num_accepted = torch.empty(batch, dtype=torch.int32)
        verify(predicts, accept_index, num_accepted, candidates, *links, target)
        results.append(torch.cat([predicts, accept_index.flatten(), num_accepted]))
    assert torch.equal(*results)


@EXAMPLES
@given(seed=SEEDS, width=st.integers(1, 6))
def test_sampling_a_chain(seed: int, width: int) -> None:
    """Triton's chain sampler with a certain draft is our tree sampler on a chain."""
    torch.manual_seed(seed)
    batch, vocab = 32, 5
    index = torch.arange(batch * width).view(batch, width)
    next_token = torch.cat([torch.arange(1, width), torch.tensor([-1])]).repeat(batch, 1)
    next_sibling = torch.full((batch, width), -1)
    candidates = torch.randint(0, vocab, (batch, width))
    target_probs = torch.rand(batch, width, vocab).pow(3)
    target_probs /= target_probs.sum(2, keepdim=True)
    certain = torch.zeros(batch, width, vocab)
    if width > 1:
        certain[:, :-1].scatter_(2, candidates[:, 1:, None], 1.0)
    coins, final_coins = torch.rand(batch, width), torch.rand(batch)
    results = []
    for sample in (
        chain_speculative_sampling_triton,
        sgl_kernel.tree_speculative_sampling_target_only,
    ):
        predicts = torch.zeros(batch * width, dtype=torch.int32)
        accept_index = torch.full((batch, width), -1, dtype=torch.int32)
        num_accepted = torch.empty(batch, dtype=torch.int32)
        sample(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=num_accepted,
            candidates=candidates,
            retrive_index=index,
            retrive_next_token=next_token,
            retrive_next_sibling=next_sibling,
            uniform_samples=coins,
            uniform_samples_for_final_sampling=final_coins,
            target_probs=target_probs,
            draft_probs=certain.clone(),
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )
        results.append(torch.cat([predicts, accept_index.flatten(), num_accepted]))
    assert torch.equal(*results)


@EXAMPLES
@given(seed=SEEDS, batch=st.integers(1, 4))
def test_slots_of_extended_positions(seed: int, batch: int) -> None:
    torch.manual_seed(seed)
    table, rows = request_table(batch, 90)
    start = torch.randint(0, 40, (batch,))
    end = start + torch.randint(1, 50, (batch,))
    size = int((end - start).sum())
    expected = torch.full((size + 3,), -7)
    cache_locs.assign_extend_cache_locs[(batch,)](
        rows, table, start, end, expected, table.shape[1], 4
    )
    slots = torch.full((size + 3,), -7)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, slots, table.shape[1])
    assert torch.equal(slots, expected)

    new_slots = torch.randint(0, 1000, (size,))
    written, expected = table.clone(), table.clone()
    allocation.assign_req_to_token_pool[(batch,)](
        rows, expected, start, end, new_slots, table.shape[1], 4
    )
    allocation.assign_req_to_token_pool_func(rows, written, start, end, new_slots, batch)
    assert torch.equal(written, expected)


@EXAMPLES
@given(seed=SEEDS, batch=st.integers(1, 3), topk=st.integers(1, 4), steps=st.integers(2, 4))
def test_slots_of_draft_branches(seed: int, batch: int, topk: int, steps: int) -> None:
    torch.manual_seed(seed)
    table, rows = request_table(batch, 64)
    seq_lens = torch.randint(1, 40, (batch,))
    expected = torch.empty(batch * topk * steps, dtype=torch.int64)
    cache_locs.assign_draft_cache_locs_contiguous[(batch,)](
        rows, table, seq_lens, expected, table.shape[1], topk, steps
    )
    slots = torch.empty_like(expected)
    cache_locs.assign_draft_cache_locs_contiguous_func(rows, table, seq_lens, slots, topk, steps)
    assert torch.equal(slots, expected)

    branches = sgl_kernel.build_draft_decode_metadata_cpu(
        table, rows, seq_lens, topk, steps, table.shape[1]
    )
    kv_indices = torch.empty(steps, batch * topk * 64, dtype=torch.int64)
    kv_indptr = torch.zeros(steps, batch * topk + 1, dtype=torch.int32)
    cache_locs.generate_draft_decode_kv_indices[(steps, batch, topk)](
        *(rows, table, seq_lens, kv_indices, kv_indptr, seq_lens.repeat_interleave(topk)),
        *(table.shape[1], kv_indices.shape[1], kv_indptr.shape[1]),
        *(4, 4, 16, 1),  # batch, steps and branches rounded up to powers of 2; page size
    )
    for step in range(steps - 1):
        for branch in range(batch * topk):
            length = int(seq_lens[branch // topk]) + step + 1
            first = int(kv_indptr[step, branch])
            read = kv_indices[step, first : first + length]
            assert torch.equal(branches[branch, :length].long(), read)


@EXAMPLES
@given(seed=SEEDS, batch=st.integers(1, 5), width=st.integers(1, 6))
def test_accepted_tokens_and_slots(seed: int, batch: int, width: int) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(0, 99, (batch * width,), dtype=torch.int32)
    accept_lens = torch.randint(1, width + 1, (batch,), dtype=torch.int32)
    expected = torch.empty(batch, dtype=torch.int32)
    eagle.fill_bonus_tokens[(batch,)](tokens, accept_lens, expected, width)
    bonus = torch.empty_like(expected)
    eagle.fill_bonus_tokens_func(tokens, accept_lens, bonus, width, batch)
    assert torch.equal(bonus, expected)

    size = batch * width
    accept_index = torch.where(torch.rand(size) < 0.5, torch.arange(size), -1).int()
    slots = torch.randperm(1000)[:size]
    expected = torch.full((size,), -7)
    eagle.fill_accept_out_cache_loc[(size,)](accept_index, slots, expected, 32)
    packed = torch.full((size,), -7)
    eagle.fill_accept_out_cache_loc_func(accept_index, slots, packed, size)
    assert torch.equal(packed, expected)


@EXAMPLES
@given(seed=SEEDS, num_locs=st.integers(1, 9))
def test_kv_copy_between_overlapping_slots(seed: int, num_locs: int) -> None:
    torch.manual_seed(seed)
    theirs = [torch.randn(20, 2, 4), torch.randn(20, 3, 5)]
    ours = [buffer.clone() for buffer in theirs]
    src, tgt = torch.randperm(20)[:num_locs], torch.randperm(20)[:num_locs]
    strides = torch.tensor([buffer[0].nbytes for buffer in ours])

    def addresses(buffers: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)

    copy_all_layer_kv_cache_tiled[(2, 1)](addresses(theirs), strides, tgt, src, num_locs, 16, 128)
    sgl_kernel.copy_all_layer_kv_cache_cpu(addresses(ours), strides, tgt, src)
    for buffer, expected in zip(ours, theirs, strict=True):
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2)])
def test_decode_attention(num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    seq_lens, head_dim, splits = torch.tensor([1, 70, 33]), 16, 2
    table, rows = request_table(3, 80)
    keys, values = torch.randn(2, table.numel(), num_kv_heads, head_dim).unbind()
    q = torch.randn(3, num_heads, head_dim)
    kv_indptr = torch.cat([torch.zeros(1), seq_lens.cumsum(0)]).int()
    kv_indices = torch.cat([table[r, :n] for r, n in zip(rows, seq_lens, strict=True)]).long()
    expected = torch.empty_like(q)
    decode_attention_fwd(
        *(q, keys, values, expected, kv_indptr, kv_indices),
        torch.empty(3, num_heads, splits, head_dim),
        torch.empty(3, num_heads, splits),
        torch.full((3,), splits, dtype=torch.int32),
        *(splits, head_dim**-0.5, 1.0, 1.0),
    )
    # The newest key and value come as arguments and are stored first.
    last = torch.stack([table[r, n - 1] for r, n in zip(rows, seq_lens, strict=True)]).long()
    new_keys, new_values = keys[last], values[last]
    keys[last] = values[last] = torch.nan
    out = torch.empty_like(q)
    torch.ops.sgl_kernel.decode_attention_cpu(
        *(q, keys, values, 1.0, 1.0, out, new_keys, new_values, last, torch.empty(0), table, rows),
        *(seq_lens, head_dim**-0.5, 0.0, False, 0, None, None),
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_tree", [False, True])
def test_extend_attention(is_tree: bool) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = 4, 2, 16
    query_lens = torch.tensor([6, 6, 6] if is_tree else [1, 37, 6])
    prefix_lens = torch.tensor([0, 50, 7])
    seq_lens = prefix_lens + query_lens
    table, rows = request_table(3, 96)
    keys, values = torch.randn(2, table.numel(), num_kv_heads, head_dim).unbind()
    q = torch.randn(int(query_lens.sum()), num_heads, head_dim)
    request_slots = [table[r, :n].long() for r, n in zip(rows, seq_lens, strict=True)]
    prefix = [s[:n] for s, n in zip(request_slots, prefix_lens, strict=True)]
    new = torch.cat([s[n:] for s, n in zip(request_slots, prefix_lens, strict=True)])
    starts = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int()

    tree_mask = full_mask = mask_indptr = None
    if is_tree:
        _, trees = random_trees(3, 6)
        tree_mask = trees.flatten()
        full = [
            torch.cat([torch.ones(6, int(n), dtype=torch.bool), tree], dim=1).flatten()
            for n, tree in zip(prefix_lens, trees, strict=True)
        ]
        full_mask = torch.cat(full)
        mask_indptr = torch.tensor([0, *(m.numel() for m in full)]).cumsum(0)

    expected = torch.empty_like(q)
    extend_attention_fwd(
        *(q, keys[new], values[new], expected, keys, values, starts),
        torch.cat([torch.zeros(1), prefix_lens.cumsum(0)]).int(),
        torch.cat(prefix),
        *(full_mask, True, mask_indptr, int(query_lens.max()), 1.0, 1.0, head_dim**-0.5),
    )
    out = torch.empty_like(q)
    torch.ops.sgl_kernel.extend_attention_cpu(
        *(q, None, None, out, keys, values, 1.0, 1.0, table, rows, seq_lens, query_lens),
        *(starts[:-1], int(query_lens.max()), head_dim**-0.5, 0.0, False, 0, None, None),
        *(tree_mask, True),
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
