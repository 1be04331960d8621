"""Compares GPU kernels with references that give the same results.

    python -m benchmarks.gpu_check.kernels cuda|cpu

The kernels that lay verify trees out are compared with the native core, those that move accepted
paths with torch, and FlashInfer's plans from the host's lengths with its own plans. The exit code
is 1 if a result differs. A CPU has no kernels to compare.
"""

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu_check.parts import Unit, tail

SANITIZER = "compute-sanitizer"


def kernel_units(device: str) -> Sequence[Unit]:
    """One unit: this module in a process of its own, on a GPU under compute-sanitizer."""
    return [Unit("kernels", lambda done: () if done else _checked(device))]


def _checked(device: str) -> Iterator[Mapping[str, Any]]:
    alone = [sys.executable, "-m", "benchmarks.gpu_check.kernels", device]
    sanitized = [
        *(SANITIZER, "--tool", "memcheck", "--error-exitcode", "9"),
        *("--report-api-errors", "no"),  # some calls only ask, and may fail
        *alone,
    ]
    command = sanitized if device == "cuda" else alone
    # Otherwise tensors share one allocation, and memcheck misses accesses beyond their ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = _run(command, environment)
    if command is sanitized and "Device not supported" in done.stdout + done.stderr:
        command = alone
        done = _run(command, environment)
    yield {
        "command": command,
        "is_sanitized": command is sanitized,
        "status": done.returncode,
        "output": tail(done.stdout),
        "errors": tail(done.stderr),
        "passed": done.returncode == 0,
    }


def _run(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _lay_out(device: str) -> int:
    """Merges and lays out random drafts as a step does, and on the host. Every other cache draft is
    a
    chain; some or all rows have a tree of the model drafter. Returns 1 if results differ, else 0.
    """
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    from sglang_hvd.plugin.trees import host_layout
    from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees
    from sglang_hvd.plugin.trees.layout import lay_out, merge_eagle_trees

    torch.manual_seed(0)
    topk, num_model, differ = 4, 15, 0
    shapes = itertools.product((1, 7, 64), (17, 32, 65, 128), (False, True), (False, True))
    for n, width, has_rows, has_ranks in shapes:
        rows = torch.arange(0, n, 2, device=device) if has_rows else None
        k = n if rows is None else len(rows)
        # One array for everything, as the host transfers it.
        packed = torch.empty((n, 2 * width + 1), dtype=torch.int64, device=device)
        places = torch.arange(width, device=device)
        before = (torch.rand((n, width), device=device) * places).long() - (places == 0).long()
        before[::2] = places - 1
        packed[:, width : 2 * width] = before
        # The token of each node is its number among its siblings, so siblings differ.
        is_earlier = (before[:, :, None] == before[:, None, :]) & (places < places[:, None])
        packed[:, :width] = is_earlier.sum(dim=2)
        packed[:, 2 * width] = torch.randint(1, width - num_model + 1, (n,), device=device)
        nodes, copied = (
            DraftNodes(array[:, :width], array[:, width : 2 * width], array[:, 2 * width])
            for array in (packed, packed.clone())
        )
        # Four nodes below the root, four below the first of these, and so on.
        index = torch.arange(num_model, device=device).expand(k, -1)
        parents = torch.tensor([-1, 0, 1, 2, 3], device=device).expand(k, -1)
        kept = torch.randint(1, num_model + 1, (k,), device=device)
        ranks = index if has_ranks else None
        trees = EagleTrees(index % topk, parents, index, topk, ranks, kept)
        is_wanted = host_layout.merge(copied, trees, rows)
        is_model_node = merge_eagle_trees(nodes, trees, rows)
        differ += not torch.equal(is_model_node, is_wanted)
        seq_lens = torch.randint(1, 300, (n,), device=device)
        num_cells = int((width * (seq_lens + width)).sum())
        for mode in (TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY):
            found = lay_out(nodes, seq_lens, mode=mode, num_cells=num_cells, buffer=None)
            mask = torch.ones_like(found.mask)
            is_full = mode == TreeMaskMode.FULL_MASK
            expected = (*host_layout.lay_out(copied, seq_lens, mask, is_full_mask=is_full), mask)
            layout = (found.positions, found.next_token, found.next_sibling, found.mask)
            differ += not all(map(torch.equal, layout, expected))
    print(f"{differ} of the layouts differ from those on the host")
    return 1 if differ else 0


def _move_paths(device: str) -> int:
    """Moves random accepted paths to the front in a KV cache of two layers, as a step does, and
    with
    torch. Returns 1 if results differ, else 0."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_hvd.plugin.trees.accepted_kv import is_moved_by_kernel, move_paths

    num_slots, differ = 4096, 0
    pool = MHATokenToKVPool(
        size=num_slots,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=8,
        head_dim=128,
        layer_num=2,
        device=device,
        enable_memory_saver=False,
    )
    if not is_moved_by_kernel(pool):
        print("this device has no kernel that moves paths")
        return int(device == "cuda")
    torch.manual_seed(0)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for n, width in itertools.product((1, 7, 48), (8, 32, 65)):
        for buffer in buffers:
            buffer.copy_(torch.rand(buffer.shape))
        expected = [buffer.clone() for buffer in buffers]
        slots = 1 + torch.randperm(num_slots, device=device)[: n * width]
        num_accepted = torch.randint(0, width, (n,))
        accepted = torch.full((n, width), -1, dtype=torch.int32)
        for row, num in enumerate(num_accepted.tolist()):
            path = [0, *(1 + torch.randperm(width - 1)[:num]).sort().values.tolist()]
            accepted[row, : num + 1] = row * width + torch.tensor(path, dtype=torch.int32)
            of_row = slots[row * width : (row + 1) * width]
            for buffer in expected:
                buffer[of_row[: num + 1]] = buffer[of_row[path]]
        lens = num_accepted.to(device=device, dtype=torch.int32)
        move_paths(pool, slots, accepted.to(device), lens)
        differ += sum(
            not torch.equal(buffer, wanted)
            for buffer, wanted in zip(buffers, expected, strict=True)
        )
    print(f"{differ} of the moved buffers differ from those by torch")
    return 1 if differ else 0


def _plan_verifications(device: str) -> int:
    """Plans verifications with random masks from the host's lengths, as a server does, and with
    FlashInfer's own planner. Returns 1 if a plan, a mask or an output differs, else 0."""
    if device != "cuda":
        print("this device has no FlashInfer")
        return 0
    from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim, longest, differ = 32, 8, 128, 700, 0
    model = (num_heads, num_kv_heads, head_dim, 1)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    num_slots = 4096
    cache = torch.randn((2, num_slots, 1, num_kv_heads, head_dim), device=device).bfloat16()
    for n, width in itertools.product((1, 7, 32), (1, 2, 16, 31, 64)):
        own, from_host = (_flashinfer_wrapper(n, width * longest, device) for _ in range(2))
        queries = torch.randn((n * width, num_heads, head_dim), device=device).bfloat16()
        indptr = torch.arange(0, (n + 1) * width, width, dtype=torch.int32)
        for turn in range(4):
            lens = torch.randint(1, longest - width, (n,)) if turn else torch.ones(n)
            kv_lens = lens.to(torch.int32) + width
            kv_indptr = torch.zeros(n + 1, dtype=torch.int32)
            kv_indptr[1:] = torch.cumsum(kv_lens, dim=0)
            num_cells = int(kv_lens.sum()) * width
            mask = torch.rand(num_cells + 9, device=device) < 0.5  # SGLang's buffer is longer
            of_rows = kv_lens.long().repeat_interleave(width)
            mask[torch.cumsum(of_rows, dim=0) - of_rows] = True  # every row sees something
            layout = (
                indptr.to(device),
                kv_indptr.to(device),
                torch.randint(num_slots, (int(kv_lens.sum()),), device=device, dtype=torch.int32),
                torch.ones(n, dtype=torch.int32, device=device),
            )
            own.plan(*layout, *model, custom_mask=mask[:num_cells], **types)
            if not turn:  # as the capture of a graph does
                from_host.plan(*layout, *model, custom_mask=mask[:num_cells], **types)
                continue
            fast_prefill_plan(
                from_host,
                *layout,
                *model,
                custom_mask=mask,
                **types,
                qo_indptr_host=indptr,
                kv_indptr_host=kv_indptr,
                kv_lens_host=kv_lens,
                max_q_len=width,
                max_kv_len=int(kv_lens.max()),
                uniform_verify_width=width,
            )
            end = int(own._mask_indptr_buf[-1])
            outputs = [wrapper.run(queries, (cache[0], cache[1])) for wrapper in (own, from_host)]
            differ += not (
                list(own._plan_info) == list(from_host._plan_info)
                and torch.equal(own._mask_indptr_buf, from_host._mask_indptr_buf)
                and torch.equal(own._custom_mask_buf[:end], from_host._custom_mask_buf[:end])
                and torch.equal(outputs[0], outputs[1])
            )
    print(f"{differ} of the plans differ from FlashInfer's own")
    return 1 if differ else 0


def _flashinfer_wrapper(n: int, max_cells: int, device: str) -> Any:
    """The wrapper of a captured graph of n verifications, with max_cells mask cells each."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def zeros(num: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(num, dtype=dtype, device=device)

    return BatchPrefillWithPagedKVCacheWrapper(
        zeros(256 << 20, torch.uint8),
        "NHD",
        use_cuda_graph=True,
        backend="fa2",
        qo_indptr_buf=zeros(n + 1),
        paged_kv_indptr_buf=zeros(n + 1),
        paged_kv_indices_buf=zeros(n * max_cells),
        paged_kv_last_page_len_buf=zeros(n),
        custom_mask_buf=zeros(n * max_cells, torch.uint8),
        mask_indptr_buf=zeros(n + 1),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare GPU kernels with references.")
    parser.add_argument("device", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    sys.exit(max(check(device) for check in (_lay_out, _move_paths, _plan_verifications)))
