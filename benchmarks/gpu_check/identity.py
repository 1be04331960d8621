"""Every policy's greedy output beside plain serving's, on the demo models, in many setups."""

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from benchmarks.gpu_check.parts import PROBLEMS, Row, Unit, logged_server
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import DemoModels, ensure_demo_models
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS, Mode, server_flags
from sglang_hvd.demo.server import CPU_FLAGS, ServerFailed, SglangServer, flush_cache
from sglang_hvd.user_cache import user_cache

POLICIES: tuple[Mode, ...] = ("allocate", "both", "payoff", "cache", "frequency", "model")

_CHAIN_FLAGS = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
_MAX_TOKENS = 64


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
        flags += ["--max-total-tokens", "100000"]  # several checks may share the GPU
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


class Identity:
    """Context manager around the plain server of the setup that is compared now."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._prompts = _prompts(options.prompts)
        self._of_setup: Setup | None = None
        self._plain: SglangServer | ServerFailed | None = None
        self._expected: list[list[int]] = []
        self._running = contextlib.ExitStack()

    def __enter__(self) -> "Identity":
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def units(self) -> Sequence[Unit]:
        """One for each setup and policy."""

        def unit(number: int, setup: Setup, policy: Mode) -> Unit:
            return Unit(f"setup-{number}-{policy}", lambda done: self._rows(setup, policy, done))

        return [
            unit(number, setup, policy)
            for number, setup in enumerate(setups_of(self._options.device))
            if self._options.setups is None or number in self._options.setups
            for policy in POLICIES
            if policy in self._options.policies and not setup.refuses(policy)
        ]

    @cached_property
    def _models(self) -> DemoModels:
        return ensure_demo_models(user_cache())

    def _rows(self, setup: Setup, policy: Mode, done: Sequence[Row]) -> Iterator[Row]:
        known = {row["concurrency"] for row in done}
        missing = [number for number in self._options.concurrency if number not in known]
        if not missing:
            return
        plain = self._plain_of(setup)
        with self._server(setup, policy) as server:
            for concurrency in missing:
                flush_cache(server.url)  # else all drafts would be what was answered before
                got = _generate_all(server, self._prompts, concurrency)
                differences = _differences(plain, self._prompts, self._expected, got)
                yield {
                    "setup": asdict(setup),
                    "policy": policy,
                    "concurrency": concurrency,
                    "num_prompts": len(self._prompts),  # no more than these are served at once
                    "differences": [asdict(difference) for difference in differences],
                    "passed": not differences,
                }

    def _plain_of(self, setup: Setup) -> SglangServer:
        if self._of_setup != setup:
            self._running.close()
            self._of_setup = setup
            try:
                server = self._running.enter_context(self._server(setup, "plain"))
                self._expected = [_generate(server, prompt) for prompt in self._prompts]
                self._plain = server
            except PROBLEMS as error:
                # Said of each policy, without another start.
                self._plain = ServerFailed(f"plain serving: {error}")
        assert self._plain is not None
        if isinstance(self._plain, ServerFailed):
            raise self._plain
        return self._plain

    @contextlib.contextmanager
    def _server(self, setup: Setup, mode: Mode) -> Iterator[SglangServer]:
        device, launch = self._options.device, self._options.launch
        flags = [*server_flags(mode, self._models), *setup.flags(device)]
        if mode != "plain":
            flags += MODEL_TREE_FLAGS if setup.is_tree else _CHAIN_FLAGS
            if not setup.has_default_widths:
                flags += ["--hvd-verify-width", str(setup.verify_width)]
                flags += ["--hvd-narrow-widths", str(list(setup.narrow_widths))]
            if mode == "allocate" and setup.wide_width is not None:
                flags += ["--hvd-wide-width", str(setup.wide_width)]
            flags += ["--hvd-postpone-extend", str(setup.postpones).lower()]
        number = setups_of(device).index(setup)
        log_file = self._options.logs / f"identity-{number}-{mode}.log"
        with logged_server(flags, log_file=log_file, device=device, launch=launch) as server:
            yield server


def setups_of(device: str) -> list[Setup]:
    """Those that say most come first."""
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
        Setup("flashinfer", "bfloat16", True, True, True, verify_width=width) for width in (24, 64)
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
    per_family = -(-count // len(FAMILIES))
    sessions = [demo_sessions(family, count=per_family, seed=11) for family in FAMILIES]
    prompts = [
        f"<|im_start|>user\n{session.turns[0].user}<|im_end|>\n<|im_start|>assistant\n"
        for of_families in zip(*sessions, strict=True)
        for session in of_families
    ]
    return prompts[:count]


def _generate(server: SglangServer, prompt: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": _MAX_TOKENS}
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
