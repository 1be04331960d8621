"""The setups in which servers of the demo models are checked."""

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_check.parts import logged_server
from sglang_hvd.config import PostponeExtend
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import HVD_MODES, MODEL_TREE_FLAGS, Mode, server_flags
from sglang_hvd.demo.server import CPU_FLAGS, SglangServer

POLICIES: tuple[Mode, ...] = ("allocate", "both", "payoff", "cache", "frequency", "model")

_CHAIN_FLAGS = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)


# With this cost table most steps have no drafts.
_FEW_DRAFTS = Path(__file__).with_name("few_drafts.yaml")


@dataclass(frozen=True, slots=True)
class Setup:
    """How a server runs, apart from its policy. name: unique on its device."""

    name: str
    backend: str
    dtype: str
    has_graphs: bool
    has_overlap: bool
    is_tree: bool
    verify_width: int = 32
    narrow_widths: tuple[int, ...] = ()
    postpones: PostponeExtend | None = None  # None: the server's choice
    wide_width: int | None = None
    has_default_widths: bool = False  # these depend on the free memory
    runs_ahead: bool = False  # with costs by which drafts rarely pay
    is_chosen: bool = False  # SGLang chooses the backend

    def flags(self, device: str) -> list[str]:
        """SGLang's flags for all modes."""
        flags = ["--dtype", self.dtype]
        if device == "cpu":
            return [*CPU_FLAGS, *flags]
        flags += [] if self.is_chosen else ["--attention-backend", self.backend]
        flags += ["--mem-fraction-static", "0.15"]
        flags += ["--max-total-tokens", "100000"]  # several checks may share the GPU
        flags += [] if self.has_graphs else ["--disable-cuda-graph"]
        return flags if self.has_overlap else [*flags, "--disable-overlap-schedule"]

    def hvd_flags(self, policy: Mode) -> list[str]:
        """Additional flags of modes with HVD."""
        flags = [*(MODEL_TREE_FLAGS if self.is_tree else _CHAIN_FLAGS)]
        if not self.has_default_widths:
            flags += ["--hvd-verify-width", str(self.verify_width)]
            flags += ["--hvd-set", f"narrow_widths={list(self.narrow_widths)}"]
        if policy == "allocate" and self.wide_width is not None:
            flags += ["--hvd-set", f"wide_width={self.wide_width}"]
        if self.postpones is not None:
            flags += ["--hvd-set", f"postpone_extend={self.postpones}"]
        if policy == "allocate" and self.runs_ahead:
            flags += ["--hvd-set", "run_ahead=true", "--hvd-costs", str(_FEW_DRAFTS)]
        return flags

    def refuses(self, policy: Mode) -> bool:
        """HVD refuses policy `both` on FA3 with topk 1, which verifies chains only."""
        return policy == "both" and self.backend == "fa3" and not self.is_tree


def setups_of(device: str) -> list[Setup]:
    """All setups, the most important first. For "cuda" without a GPU: those of Hopper."""
    if device == "cpu":
        return [
            Setup("tree", "torch_native", "float32", False, False, True, postpones="always"),
            Setup(
                *("chain", "torch_native", "float32", False, False, False, 16, (2, 4, 8)),
                postpones="never",
                wide_width=24,
            ),
        ]
    backends = ["flashinfer", "triton"]
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9:
        backends.append("fa3")  # needs Hopper
    shapes = list(itertools.product(backends, (("tree", True), ("chain", False))))
    graphs = (("", True), ("-no-graphs", False))
    setups = [
        Setup(f"{backend}-{shape}", backend, "bfloat16", True, True, is_tree)
        for backend, (shape, is_tree) in shapes
    ]
    # Other widths, postponed draft-extend, float16, and graphs and overlap turned off.
    setups += [
        Setup(f"width-{width}", "flashinfer", "bfloat16", True, True, True, verify_width=width)
        for width in (24, 64)
    ]
    setups += [
        Setup(
            *(f"{backend}-{shape}-narrow", backend, "bfloat16", True, True, is_tree),
            *(32, (2, 4, 8, 16)),
            wide_width=64,
        )
        for backend, (shape, is_tree) in shapes
    ]
    setups += [
        Setup(
            *(f"narrow-postponed{suffix}", "flashinfer", "bfloat16", has_graphs, True, True),
            *(32, (2, 4, 8, 16)),
            postpones="always",
            wide_width=64,
        )
        for suffix, has_graphs in graphs
    ]
    setups += [
        Setup(
            *(f"default-widths{suffix}", "flashinfer", "bfloat16", has_graphs, True, True),
            has_default_widths=True,
        )
        for suffix, has_graphs in graphs
    ]
    setups += [
        Setup("postponed", "flashinfer", "bfloat16", True, True, True, postpones="always"),
        Setup("no-graphs", "flashinfer", "bfloat16", False, True, True),
        Setup("no-overlap", "flashinfer", "bfloat16", True, False, True),
        Setup("float16", "flashinfer", "float16", True, True, True),
    ]
    setups += [
        Setup(
            *(f"{backend}-ahead", backend, "bfloat16", True, True, True, 32, (1, 2, 4, 8, 16)),
            runs_ahead=True,
        )
        for backend in backends
    ]
    ahead = next(setup for setup in setups if setup.name == "flashinfer-ahead")
    return [*setups, replace(ahead, name="chosen-ahead", is_chosen=True)]


def prompts_of(count: int) -> list[str]:
    per_family = -(-count // len(FAMILIES))
    sessions = [demo_sessions(family, count=per_family, seed=11) for family in FAMILIES]
    prompts = [
        f"<|im_start|>user\n{session.turns[0].user}<|im_end|>\n<|im_start|>assistant\n"
        for of_families in zip(*sessions, strict=True)
        for session in of_families
    ]
    return prompts[:count]


@contextlib.contextmanager
def server_of(
    setup: Setup, mode: Mode, part: str, options: argparse.Namespace, more: Sequence[str] = ()
) -> Iterator[SglangServer]:
    """part: the part of the check, which is in the log's name. more: flags, after all others."""
    flags = [*server_flags(mode, demo_models()), *setup.flags(options.device)]
    if mode in HVD_MODES:
        flags += setup.hvd_flags(mode)
    elif setup.is_chosen:  # without trees SGLang may choose another
        flags += ["--attention-backend", setup.backend]
    flags += more
    log_file = options.logs / f"{part}-{setup.name}-{mode}.log"
    with logged_server(
        flags, log_file=log_file, device=options.device, launch=options.launch
    ) as server:
        yield server
