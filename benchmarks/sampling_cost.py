"""What it costs a batch that one of its requests asks for penalties, min_p or a logit processor.

    python -m benchmarks.sampling_cost [--against CHECKOUT] [--rounds 5] [--requests 32]

One request of the batch asks, the others decode greedily, and all verify the model drafter's tree.
The cells of a round take turns, and each is compared with its base in the same round: a batch in
which that request asks for nothing. With --against a second server runs the code of another
checkout, for example that of an earlier commit, and each cell is compared with the same cell there.

Steps are timed while the whole batch decodes; then all requests are aborted. The time of the
scheduler's process is less disturbed by other load than that of the clock.
"""

import argparse
import contextlib
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from sglang.srt.sampling.custom_logit_processor import Qwen3ThinkingBudgetLogitProcessor

from benchmarks.checkout import add_against, launch_of
from benchmarks.command import parser_of, run, write_rows
from benchmarks.gap import room_flags
from sglang_hvd.commands.arguments import add_json, count
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import HVD_MODES, server_flags
from sglang_hvd.demo.server import CPU_FLAGS, SglangServer, demo_environment
from sglang_hvd.replay.training.tables import markdown_table

_BASE, _SAMPLED = "nothing", "temperature"
# Of a reply: more than it has when its batch is aborted.
_MAX_TOKENS = 500
_POLL_SECONDS = 0.2


def _cells() -> dict[str, tuple[dict[str, Any], str]]:
    """What one request asks for, and the cell that is its base, by the cell's name."""
    # It looks for a token that the demo models lack: it reads the whole text and changes nothing.
    processor = {
        "custom_logit_processor": Qwen3ThinkingBudgetLogitProcessor.to_str(),
        "custom_params": {"thinking_budget": 100},
    }
    return {
        _BASE: ({}, _BASE),
        "frequency_penalty": ({"frequency_penalty": 0.5}, _BASE),
        "repetition_penalty": ({"repetition_penalty": 1.2}, _BASE),
        "min_new_tokens": ({"min_new_tokens": _MAX_TOKENS}, _BASE),
        "processor": (processor, _BASE),
        _SAMPLED: ({"temperature": 0.8}, _BASE),
        "min_p": ({"temperature": 0.8, "min_p": 0.1}, _SAMPLED),
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """Means per step of one batch, in milliseconds, or totals.

    wall: by the clock. process: of the scheduler's process. host: of HVD's own code.
    """

    num_steps: int
    wall: float
    process: float
    host: float


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds; ratios are of the times of one round.

    of: what the ratios compare with.
    process_ratio_spread: between the quartiles.
    """

    cell: str
    of: str
    steps: int
    wall_ms: float
    process_ms: float
    host_us: float
    wall_ratio: float
    process_ratio: float
    process_ratio_spread: float
    host_ratio: float


class _Batch:
    """The same requests, again and again, on one server."""

    def __init__(self, server: SglangServer, scheduler: psutil.Process, size: int, steps: int):
        self._server, self._scheduler, self._steps = server, scheduler, steps
        questions = [
            session.turns[0].user
            for family in FAMILIES
            for session in demo_sessions(family, count=size, seed=11)
        ]
        self._prompts = sorted(questions, key=len)[:size]

    def measure(self, asked: Mapping[str, Any]) -> Measured:
        """Run the batch. asked: what its first request asks for."""
        first, *others = self._prompts
        with ThreadPoolExecutor(len(self._prompts)) as pool:
            asking = pool.submit(self._ask, first, **asked)
            running = [asking, *(pool.submit(self._ask, prompt) for prompt in others)]
            before = self._when(running, lambda hvd: hvd["num_requests"] == len(running))
            enough = before.num_steps + self._steps
            after = self._when(running, lambda hvd: hvd["steps"]["num_steps"] >= enough)
            self._server.post("/abort_request", {"abort_all": True})
            for each in running:
                with contextlib.suppress(urllib.error.HTTPError):  # an aborted request may get one
                    each.result()
        num_steps = after.num_steps - before.num_steps
        return Measured(
            num_steps,
            wall=1e3 * (after.wall - before.wall) / num_steps,
            process=1e3 * (after.process - before.process) / num_steps,
            host=1e3 * (after.host - before.host) / num_steps,
        )

    def _ask(self, question: str, **params: Any) -> None:
        processor = params.pop("custom_logit_processor", None)
        sampling = {"temperature": 0, "max_new_tokens": _MAX_TOKENS, "ignore_eos": True, **params}
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        body = {"text": text, "sampling_params": sampling, "custom_logit_processor": processor}
        self._server.post("/generate", body)

    def _when(
        self, running: Sequence[Future[None]], is_so: Callable[[dict[str, Any]], bool]
    ) -> Measured:
        """The totals so far, in seconds, once the server's figures say so. All requests still run
        then: one that failed raises its error."""
        while not is_so(hvd := self._server.get("/server_info")["internal_states"][0]["hvd"]):
            _require_running(running)
            time.sleep(_POLL_SECONDS)
        _require_running(running)
        num_steps = hvd["steps"]["num_steps"]
        return Measured(
            num_steps,
            wall=time.perf_counter(),
            process=sum(self._scheduler.cpu_times()[:2]),
            host=num_steps * hvd["steps"]["host_us"] / 1e6 if num_steps else 0.0,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    cells = _cells()
    found: dict[tuple[str, str], list[Measured]] = {}
    with contextlib.ExitStack() as stack:
        batches = {
            name: stack.enter_context(_batch(checkout, options))
            for name, checkout in {"here": None, "there": options.against}.items()
            if name == "here" or checkout is not None
        }
        for number in range(options.rounds + 1):
            for cell, (asked, _) in cells.items():
                # Taking turns, so that neither always runs second.
                for name in sorted(batches, reverse=number % 2 == 1):
                    measured = batches[name].measure(asked)
                    if number:  # the first round warms up
                        found.setdefault((name, cell), []).append(measured)
    rows = [
        _row(cell, base, found["here", cell], found["here", base])
        for cell, (_, base) in cells.items()
        if cell != base
    ]
    if options.against is not None:
        rows += [
            _row(cell, str(options.against), found["here", cell], found["there", cell])
            for cell in cells
        ]
    columns = {
        **{"cell": "one request asks for", "of": "compared with", "steps": "steps"},
        **{"wall_ms": "step ms", "process_ms": "process ms", "host_us": "host us"},
        **{"wall_ratio": "step ratio", "process_ratio": "process ratio"},
        **{"process_ratio_spread": "spread", "host_ratio": "host ratio"},
    }
    print(markdown_table(columns, map(asdict, rows), num_labels=2))
    write_rows(options.json, map(asdict, rows))
    return 0


def _row(cell: str, of: str, rounds: Sequence[Measured], bases: Sequence[Measured]) -> Row:
    def ratios(time_of: Callable[[Measured], float]) -> Any:
        return np.array([time_of(a) / time_of(b) for a, b in zip(rounds, bases, strict=True)])

    process = ratios(lambda measured: measured.process)
    return Row(
        cell=cell,
        of=of,
        steps=int(np.median([measured.num_steps for measured in rounds])),
        wall_ms=float(np.median([measured.wall for measured in rounds])),
        process_ms=float(np.median([measured.process for measured in rounds])),
        host_us=1e3 * float(np.median([measured.host for measured in rounds])),
        wall_ratio=float(np.median(ratios(lambda measured: measured.wall))),
        process_ratio=float(np.median(process)),
        process_ratio_spread=float(np.ptp(np.quantile(process, [0.25, 0.75]))),
        host_ratio=float(np.median(ratios(lambda measured: measured.host))),
    )


def _require_running(running: Sequence[Future[None]]) -> None:
    for each in running:
        if each.done():
            each.result()
            raise ValueError("a reply ended while its batch was timed: lower --steps")


@contextlib.contextmanager
def _batch(checkout: Path | None, options: argparse.Namespace) -> Iterator[_Batch]:
    """A server of this code, or of that in another checkout with its own .venv."""

    flags = [
        *(*CPU_FLAGS, *server_flags(options.policy, demo_models())),
        *(*room_flags(options.requests, _MAX_TOKENS), "--enable-custom-logit-processor"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        server = SglangServer(
            flags,
            log_file=Path(folder) / "log",
            environment=demo_environment(),
            launch=launch_of(checkout),
        )
        others = _schedulers()
        with server:
            [scheduler] = _schedulers() - others
            yield _Batch(server, scheduler, options.requests, options.steps)


def _schedulers() -> set[psutil.Process]:
    """The scheduler processes of all servers that this process started."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if "sglang::scheduler" in " ".join(child.cmdline())}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("sampling_cost", "Time batches in which one request asks for something.")
    add_against(parser)
    parser.add_argument("--policy", choices=HVD_MODES, default="model", help="default: %(default)s")
    parser.add_argument(
        "--requests", type=count, default=32, help="in the batch (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=count, default=60, help="timed in each batch (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count, default=5, help="measured rounds (default: %(default)s)"
    )
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
