"""What only a GPU shows: identity under graphs and overlap, costs of 8B shapes, recorded traffic.

    python -m benchmarks.gpu_check --out DIR [--parts identity,memory,costs,traces]
        [--traces DIR --tokenizer FILE] [--device cuda|cpu]

Models are made here: the demo pair, and 8B shapes with random weights. Each part writes its own
file below DIR when it ends and is not run again while that file is there. The exit status is 1 if
any part failed. On a CPU (--device cpu) the same parts run small, without graphs: that is how they
are tested.

identity: every policy's greedy output beside plain serving's on the demo pair, over attention
    backends, graphs, overlap scheduling, trees and chains, widths that change from step to
    step, and concurrency. Where a token differs, the gap is shown between the two log probabilities
    that plain serving gives there. In bfloat16 some logits tie: such a difference is reported with
    its gap, and still counts as a difference. A server that did not start is a problem of its row.
memory: the kernels that lay verify trees out and move accepted paths, under compute-sanitizer and
    beside torch. On a CPU there are no kernels to compare.
costs: what steps of the shapes cost, timed by the server before it serves: a plain step and each
    verify width, with the memory that each takes. The gap between steps is not among them.
traces: benchmarks.trace_serving on the shapes.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.trace_serving.models import write_models
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import DemoModels, ensure_demo_models
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS, Mode, server_flags
from sglang_hvd.demo.server import CPU_ENVIRONMENT, CPU_FLAGS, SglangServer
from sglang_hvd.user_cache import user_cache

CHAIN_FLAGS = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
POLICIES: tuple[Mode, ...] = ("model", "cache", "frequency", "payoff", "both", "allocate")
MAX_TOKENS = 64
# The first start on a machine compiles FlashInfer's kernels and SGLang's own.
START_SECONDS = 900
# Graphs of 64 requests at 64 nodes need more of FlashInfer's workspace than SGLang's 384 MB.
WORKSPACE = {"SGLANG_FLASHINFER_WORKSPACE_SIZE": str(2**30)}


@dataclass(frozen=True, slots=True)
class Setup:
    """How a server runs, the policy apart."""

    backend: str
    dtype: str
    has_graphs: bool
    has_overlap: bool
    is_tree: bool
    verify_width: int = 32
    narrow_widths: tuple[int, ...] = ()
    postpones: bool = False
    wide_width: int | None = None
    has_default_widths: bool = False  # which follow the memory that is there

    def flags(self, device: str) -> list[str]:
        """Of SGLang, for any mode."""
        flags = ["--dtype", self.dtype]
        if device == "cpu":
            return [*CPU_FLAGS, *flags]
        flags += ["--attention-backend", self.backend, "--mem-fraction-static", "0.15"]
        flags += [] if self.has_graphs else ["--disable-cuda-graph"]
        return flags if self.has_overlap else [*flags, "--disable-overlap-schedule"]

    def refuses(self, policy: Mode) -> bool:
        """HVD refuses policy `both` on FA3 with topk 1, whose verification knows chains only."""
        return policy == "both" and self.backend == "fa3" and not self.is_tree


@dataclass(frozen=True, slots=True)
class Difference:
    """position: of the first token that differs. gap: between the log probabilities that plain
    serving gives its own token and the other one there; None if the other is not among its first
    twenty."""

    prompt: int
    position: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class IdentityRow:
    """differences: of the prompts whose output is not plain serving's.

    problem: why a server did not start or ended; then there is nothing else.
    """

    setup: dict[str, Any]
    policy: str
    concurrency: int | None
    num_prompts: int
    differences: list[Difference]
    problem: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for name in options.parts:
        file = options.out / f"{name}.json"
        if file.is_file():
            result = json.loads(file.read_text())
            outcome = "passed" if result["passed"] else f"FAILED; without {file} it runs again"
            print(f"{name}: done before, {outcome}")
        else:
            began = time.monotonic()
            passed, rows = PARTS[name](options)
            result = {"passed": passed, "machine": _machine(options.device), "rows": rows}
            file.write_text(json.dumps(result, indent=1) + "\n")
            seconds = time.monotonic() - began
            print(f"{name}: {'passed' if passed else 'FAILED'} in {seconds:.0f} s, {file}")
        has_failed |= not result["passed"]
    return int(has_failed)


def _identity(options: argparse.Namespace) -> tuple[bool, Any]:
    models = ensure_demo_models(user_cache())
    rows = []
    for setup in _setups(options.device):
        for row in _Identity(models, setup, options).rows():
            rows.append(row)
            print(f"  {row}", flush=True)
    passed = all(not row.differences and row.problem is None for row in rows)
    return passed, [asdict(row) for row in rows]


@dataclass(frozen=True, slots=True)
class _Identity:
    """The policies beside plain serving, all run one way."""

    models: DemoModels
    setup: Setup
    options: argparse.Namespace

    def rows(self) -> Iterator[IdentityRow]:
        prompts = _prompts(self.options.prompts)
        try:
            with self._server("plain") as plain:
                expected = [_generate(plain, prompt) for prompt in prompts]
                for policy in POLICIES:
                    if policy in self.options.policies and not self.setup.refuses(policy):
                        yield from self._of_policy(policy, plain, prompts, expected)
        except (RuntimeError, OSError) as error:
            yield self._problem("plain", error)

    def _of_policy(
        self,
        policy: Mode,
        plain: SglangServer,
        prompts: Sequence[str],
        expected: Sequence[list[int]],
    ) -> Iterator[IdentityRow]:
        try:
            with self._server(policy) as server:
                for concurrency in self.options.concurrency:
                    got = _generate_all(server, prompts, concurrency)
                    differences = _differences(plain, prompts, expected, got)
                    yield IdentityRow(
                        asdict(self.setup), policy, concurrency, len(prompts), differences
                    )
        except (RuntimeError, OSError) as error:
            yield self._problem(policy, error)

    def _problem(self, policy: Mode, error: Exception) -> IdentityRow:
        return IdentityRow(asdict(self.setup), policy, None, 0, [], str(error)[-2000:])

    @contextlib.contextmanager
    def _server(self, mode: Mode) -> Iterator[SglangServer]:
        setup, device = self.setup, self.options.device
        flags = [*server_flags(mode, self.models), *setup.flags(device)]
        if mode != "plain":
            flags += MODEL_TREE_FLAGS if setup.is_tree else CHAIN_FLAGS
            if not setup.has_default_widths:
                flags += ["--hvd-verify-width", str(setup.verify_width)]
                flags += ["--hvd-narrow-widths", str(list(setup.narrow_widths))]
            if mode == "allocate" and setup.wide_width is not None:
                flags += ["--hvd-wide-width", str(setup.wide_width)]
            flags += ["--hvd-postpone-extend", str(setup.postpones).lower()]
        with (
            tempfile.TemporaryDirectory() as folder,
            SglangServer(
                flags,
                log_file=Path(folder) / "server.log",
                environment=CPU_ENVIRONMENT if device == "cpu" else {},
                timeout_s=START_SECONDS,
            ) as server,
        ):
            yield server


def _setups(device: str) -> list[Setup]:
    if device == "cpu":
        return [
            Setup("torch_native", "float32", False, False, True, postpones=True),
            Setup("torch_native", "float32", False, False, False, 16, (2, 4, 8), wide_width=24),
        ]
    backends = ["flashinfer", "triton"]
    if torch.cuda.get_device_capability()[0] == 9:
        backends.append("fa3")  # of Hopper
    setups = [
        Setup(backend, "bfloat16", True, True, is_tree)
        for backend, is_tree in itertools.product(backends, (True, False))
    ]
    # Graphs and overlap each off once, other widths, draft-extend postponed, and float16.
    setups += [
        Setup("flashinfer", "bfloat16", True, True, True, verify_width=width) for width in (16, 64)
    ]
    setups += [
        Setup(backend, "bfloat16", True, True, is_tree, 32, (2, 4, 8, 16), wide_width=64)
        for backend, is_tree in itertools.product(backends, (True, False))
    ]
    setups += [
        Setup(
            *("flashinfer", "bfloat16", has_graphs, True, True, 32, (2, 4, 8, 16)),
            postpones=True,
            wide_width=64,
        )
        for has_graphs in (True, False)
    ]
    setups += [
        Setup("flashinfer", "bfloat16", has_graphs, True, True, has_default_widths=True)
        for has_graphs in (True, False)
    ]
    setups.append(Setup("flashinfer", "bfloat16", True, True, True, postpones=True))
    setups.append(Setup("flashinfer", "bfloat16", False, True, True))
    setups.append(Setup("flashinfer", "bfloat16", True, False, True))
    setups.append(Setup("flashinfer", "float16", True, True, True))
    return setups


def _prompts(count: int) -> list[str]:
    prompts = [
        f"<|im_start|>user\n{session.turns[0].user}<|im_end|>\n<|im_start|>assistant\n"
        for family in FAMILIES
        for session in demo_sessions(family, count=2, seed=11)
    ]
    return prompts[:count]


def _generate(server: SglangServer, prompt: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": MAX_TOKENS}
    answer = server.post("/generate", {"text": prompt, "sampling_params": sampling})
    return list(answer["output_ids"])


def _generate_all(
    server: SglangServer, prompts: Sequence[str], concurrency: int
) -> list[list[int]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: _generate(server, prompt), prompts))


def _differences(
    plain: SglangServer,
    prompts: Sequence[str],
    expected: Sequence[list[int]],
    got: Sequence[list[int]],
) -> list[Difference]:
    found = []
    for number, (prompt, wanted, other) in enumerate(zip(prompts, expected, got, strict=True)):
        if wanted != other:
            pairs = itertools.zip_longest(wanted, other)
            position = next(place for place, (a, b) in enumerate(pairs) if a != b)
            found.append(Difference(number, position, _gap(plain, prompt, position, other)))
    return found


def _gap(plain: SglangServer, prompt: str, position: int, other: list[int]) -> float | None:
    answer = plain.post(
        "/generate",
        {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": position + 1},
            "return_logprob": True,
            "top_logprobs_num": 20,
        },
    )
    top = answer["meta_info"]["output_top_logprobs"]
    if position >= len(top) or position >= len(other):
        return None
    by_token = {token: logprob for logprob, token, _ in top[position]}
    logprob = by_token.get(other[position])
    return None if logprob is None else max(by_token.values()) - logprob


def _memory(options: argparse.Namespace) -> tuple[bool, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--kernels-of", options.device]
    # Else tensors are slices of one allocation, and memcheck sees no access beyond their ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    sanitizer = shutil.which("compute-sanitizer")
    if options.device == "cuda":
        assert sanitizer is not None, "_options has looked"
        command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    rows = [{"command": command, "status": done.returncode, "output": done.stdout[-2000:]}]
    return done.returncode == 0, rows


def _lay_out(device: str) -> int:
    """Random cache drafts, every other row a chain, and the model drafter's trees of some or all of
    them, merged and laid out as a step does it, and by torch alone. 1 where the two differ."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    from sglang_hvd.plugin.tree_layout import lay_out, merge_eagle_trees
    from sglang_hvd.plugin.verify_tree import (
        DraftNodes,
        EagleTrees,
        lay_out_by_torch,
        merge_eagle_trees_by_torch,
    )

    torch.manual_seed(0)
    topk, num_model, differ = 4, 15, 0
    shapes = itertools.product((1, 7, 64), (17, 32, 65, 128), (False, True), (False, True))
    for n, width, has_rows, has_ranks in shapes:
        rows = torch.arange(0, n, 2, device=device) if has_rows else None
        k = n if rows is None else len(rows)
        # One array for all, as the one transfer from the host brings it.
        packed = torch.empty((n, 2 * width + 1), dtype=torch.int64, device=device)
        places = torch.arange(width, device=device)
        before = (torch.rand((n, width), device=device) * places).long() - (places == 0).long()
        before[::2] = places - 1
        packed[:, width : 2 * width] = before
        # The how manieth child of its parent each is: siblings differ.
        is_earlier = (before[:, :, None] == before[:, None, :]) & (places < places[:, None])
        packed[:, :width] = is_earlier.sum(dim=2)
        packed[:, 2 * width] = torch.randint(1, width - num_model + 1, (n,), device=device)
        nodes, copied = (
            DraftNodes(array[:, :width], array[:, width : 2 * width], array[:, 2 * width])
            for array in (packed, packed.clone())
        )
        # Four below the root, four below the first of these, and so on.
        index = torch.arange(num_model, device=device).expand(k, -1)
        parents = torch.tensor([-1, 0, 1, 2, 3], device=device).expand(k, -1)
        kept = torch.randint(1, num_model + 1, (k,), device=device)
        ranks = index if has_ranks else None
        trees = EagleTrees(index % topk, parents, index, topk, ranks, kept)
        wanted, of_wanted = merge_eagle_trees_by_torch(copied, trees, rows)
        merged, of_model = merge_eagle_trees(nodes, trees, rows)
        differ += not torch.equal(of_model, of_wanted)
        seq_lens = torch.randint(1, 300, (n,), device=device)
        num_cells = int((width * (seq_lens + width)).sum())
        for mode in (TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY):
            found, expected = (
                make(of, seq_lens, mode=mode, num_cells=num_cells, buffer=None)
                for make, of in ((lay_out, merged), (lay_out_by_torch, wanted))
            )
            for name in ("positions", "next_token", "next_sibling", "mask"):
                differ += not torch.equal(getattr(found, name), getattr(expected, name))
    print(f"{differ} of the layouts differ from those by torch")
    return 1 if differ else 0


def _move_paths(device: str) -> int:
    """Random paths in a KV cache of two layers, moved to the front as a step does it, and by torch.
    1 where the two differ."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_hvd.plugin.kv_kernel import is_moved_by_kernel, move_paths

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
        return 0
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


def _costs(options: argparse.Namespace) -> tuple[bool, Any]:
    rows = []
    *narrow, widest = sorted({1, *options.widths})
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            models = _dummy_models(shape, folder)
            began = time.monotonic()
            with SglangServer(
                [
                    *server_flags("allocate", models),
                    *("--hvd-cost-profile", "fresh", "--hvd-verify-width", str(widest)),
                    *("--hvd-narrow-widths", str(narrow)),
                    *("--load-format", "dummy"),
                    *_running(options),
                ],
                log_file=folder / "server.log",
                environment=CPU_ENVIRONMENT if options.device == "cpu" else WORKSPACE,
                timeout_s=START_SECONDS,
            ) as server:
                seconds = time.monotonic() - began
                state = server.get("/server_info")["internal_states"][0]
                rows.append(
                    {
                        "shape": shape,
                        "width_memory_gb": state["hvd"]["width_memory_gb"],
                        "seconds_to_start": seconds,
                        "costs": state["hvd"]["costs"],
                    }
                )
    return True, rows


def _dummy_models(shape: str, folder: Path) -> DemoModels:
    from sglang_hvd.payoff import DEFAULT_PREDICTORS

    demo = ensure_demo_models(user_cache())
    target, drafter = write_models(shape, folder, num_tokens=2048, context_length=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.target / name, target / name)
    return DemoModels(target, drafter, DEFAULT_PREDICTORS["votes"])


def _running(options: argparse.Namespace) -> list[str]:
    if options.device == "cpu":
        return [*CPU_FLAGS, "--max-running-requests", "4"]
    # At 64 nodes each, 64 would need more workspace than SGLang lets FlashInfer have for Qwen3.
    return ["--max-running-requests", "60", "--mem-fraction-static", "0.6"]


def _traces(options: argparse.Namespace) -> tuple[bool, Any]:
    from benchmarks.trace_serving.__main__ import main as serve_traces

    rows, passed = [], True
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            modes = "plain,eagle3,cache,frequency,payoff,allocate"
            status = serve_traces(
                [
                    *("--traces", str(options.traces), "--tokenizer", str(options.tokenizer)),
                    *("--shape", shape, "--device", options.device, "--json", str(file)),
                    *("--concurrency", ",".join(map(str, options.concurrency))),
                    *("--modes", modes if options.device == "cuda" else "plain,payoff"),
                    *(["--files", *options.files] if options.files else []),
                ]
            )
            passed &= status == 0
            rows += [{"shape": shape, **row} for row in json.loads(file.read_text())]
    return passed, rows


PARTS: dict[str, Callable[[argparse.Namespace], tuple[bool, Any]]] = {
    "identity": _identity,
    "memory": _memory,
    "costs": _costs,
    "traces": _traces,
}


def _machine(device: str) -> dict[str, str]:
    machine = {name: version(name) for name in ("sglang", "torch")}
    machine["python"] = platform.python_version()
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        machine["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.strip()
    return machine


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What only a GPU shows.")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        help=f"of {','.join(PARTS)} (default: all that can run)",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--traces", type=Path, metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE")
    parser.add_argument("--files", nargs="+", metavar="NAME", help="these recordings only")
    parser.add_argument("--prompts", type=int, default=12, help="of the identity part")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 8, 32]
    )
    parser.add_argument(
        "--shapes", type=lambda text: text.split(","), default=["llama-3.1-8b", "qwen3-8b"]
    )
    parser.add_argument(
        "--widths",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[2, 4, 8, 16, 32, 64],
    )
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=list(POLICIES),
        help="of the identity part (default: all)",
    )
    parser.add_argument("--kernels-of", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.kernels_of is not None:
        raise SystemExit(max(_lay_out(options.kernels_of), _move_paths(options.kernels_of)))
    unknown = sorted(set(options.parts or PARTS) - set(PARTS))
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)}: known are {', '.join(PARTS)}")
    missing = {}
    if options.device == "cuda" and shutil.which("compute-sanitizer") is None:
        missing["memory"] = "compute-sanitizer, of the CUDA toolkit, on the PATH"
    if options.traces is None or options.tokenizer is None:
        missing["traces"] = "--traces and --tokenizer"
    for part, needed in missing.items():
        if options.parts is None:
            print(f"{part}: left out, it needs {needed}")
        elif part in options.parts:
            parser.error(f"--parts: {part} needs {needed}")
    options.parts = options.parts or [part for part in PARTS if part not in missing]
    return options


if __name__ == "__main__":
    run(main)
