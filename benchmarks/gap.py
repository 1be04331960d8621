"""How long the device waits for the host between the tokens of a step and the next one.

    python -m benchmarks.gap [--modes MODES] [--requests 1,8,32,64] [--against CHECKOUT]
        [--json FILE]

The models are the demo's, so small that a step is nearly all host. Each mode is a server of its
own, and all servers take turns. A batch of so many requests is sent at once. Texts are the demo's
questions, decoded greedily (text); one of them, decoded greedily by all requests (same); or noise,
sampled at a temperature at which drafts are rarely right. On a CPU SGLang's EAGLE3 and NGRAM do not
sample: they decode noise greedily.

The time of a step is compared where all requests take about as many steps: for `same`, and for
noise in modes that sample. Else most steps have fewer requests than the batch. The time of the same
batch with replies of one token, its prefill, is subtracted.

The stages of the gap and the host time are those of `/server_info`, which modes without HVD lack:
means over all steps of a batch.
On a CPU the host is the device, so that drafts and draft-extends take their whole time. With
--against further servers run HVD's modes with the code of another checkout.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.checkout import add_against, launch_of
from benchmarks.command import counts, parser_of, run, write_rows
from sglang_hvd.commands.arguments import add_json, count
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import COMMON_MODES, HVD_MODES, MODES, server_flags
from sglang_hvd.demo.server import CPU_FLAGS, SglangServer, demo_environment, flush_cache
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.step_clock import Phase, Stage, StepClock

# Tokens of a prompt, and KV slots that a request reserves for drafts, at most.
_PROMPT_AND_DRAFTS = 480

SAMPLING: Mapping[str, Mapping[str, float]] = {
    "text": {"temperature": 0},
    "same": {"temperature": 0},
    "noise": {"temperature": 100.0},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: means of a step in microseconds. step: None where the batch shrinks. stages: see
    Stage; empty without figures."""

    step: float | None
    host: float | None
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds, in microseconds of a step.

    code: "here", or the other checkout.
    gap: the sum of the stages but the draft. host_us: the time of HVD's own code.
    None without HVD, and of the gap with code that does not measure it. step_us: None where
        the batch shrinks.
    """

    text: str
    requests: int
    mode: str
    code: str
    step_us: float | None
    host_us: float | None
    gap_us: float | None
    stages_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Server:
    mode: str
    code: str
    server: SglangServer


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    found: dict[tuple[str, int, str, str], list[Measured]] = {}
    with _servers(options) as servers:
        cells = [(text, num) for num in options.requests for text in options.texts]
        rounds = [(cell, number) for cell in cells for number in range(options.rounds + 1)]
        for (text, num), number in tqdm(rounds, unit="round", disable=None):
            # Taking turns, so that none always runs after the same one.
            for each in servers[:: -1 if number % 2 else 1]:
                of_round = measured(each.server, text, num, options.max_tokens)
                if number:  # the first round warms up
                    found.setdefault((text, num, each.mode, each.code), []).append(of_round)
    rows = [row_of(*cell, of_cell) for cell, of_cell in found.items()]
    print(_table(rows))
    print(f"\nThe clock itself takes {1e6 * clock_seconds():.1f} us of each step.")
    write_rows(options.json, map(asdict, rows))
    return 0


def clock_seconds(num_steps: int = 2000) -> float:
    """Seconds that StepClock takes for a step with every phase twice and every stage once."""
    clock = StepClock()
    began = time.perf_counter()
    for _ in range(num_steps):
        clock.begin_step()
        clock.know_tokens()
        for phase in (*Phase, *Phase):
            with clock.measure(phase):
                pass
        for stage in Stage:
            clock.reach(stage)
    clock.end_step()
    return (time.perf_counter() - began) / num_steps


def measured(server: SglangServer, text: str, num_requests: int, max_tokens: int) -> Measured:
    """One round of a batch. text: see SAMPLING."""
    flush_cache(server.url)
    prefill, _ = _run(server, text, num_requests, 1)
    flush_cache(server.url)
    before = _figures(server)
    seconds, num_cycles = _run(server, text, num_requests, max_tokens)
    after = _figures(server)
    step = step_us(seconds - prefill, num_cycles)
    if before is None or after is None:
        return Measured(step, None)
    num_steps, num_gaps = after["num_steps"] - before["num_steps"], after["num_gaps"]
    num_gaps -= before["num_gaps"]
    stages = {}
    if num_gaps:
        stages = {
            stage.value: (after[stage.value] - before.get(stage.value, 0.0)) / num_gaps
            for stage in Stage
        }
    return Measured(step, (after["host"] - before["host"]) / num_steps, stages)


def step_us(seconds: float, num_cycles: Sequence[int]) -> float | None:
    """Microseconds of a step with all requests; None if the batch shrank.

    seconds: of all decode steps. num_cycles: decode steps of each request.
    """
    most = max(num_cycles)
    return None if min(num_cycles) < 0.95 * most else 1e6 * seconds / most


def _run(server: SglangServer, text: str, num: int, max_tokens: int) -> tuple[float, list[int]]:
    """Seconds of a batch, and the decode steps of each request."""
    sampling = {**SAMPLING[text], "max_new_tokens": max_tokens, "ignore_eos": True}
    body = {"text": prompts_of(text, num), "sampling_params": sampling}
    began = time.perf_counter()
    answers = server.post("/generate", body)
    seconds = time.perf_counter() - began
    # A plain server does not count: each of its steps is a token, and the first is the prefill's.
    return seconds, [a["meta_info"].get("spec_verify_ct") or max_tokens - 1 for a in answers]


def prompts_of(text: str, num: int) -> list[str]:
    """The shortest first questions of the demo, as its chat template renders them. text: see
    SAMPLING."""
    if text == "same":
        return prompts_of("text", 1) * num
    questions = [
        session.turns[0].user
        for family in FAMILIES
        for session in demo_sessions(family, count=num, seed=11)
    ]
    return [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in sorted(questions, key=len)[:num]
    ]


def _figures(server: SglangServer) -> dict[str, float] | None:
    """Numbers of steps and gaps so far, and the microseconds of the host and of each stage in them.
    None without HVD."""
    hvd = server.get("/server_info")["internal_states"][0].get("hvd")
    if hvd is None:
        return None
    steps = hvd["steps"]
    num_steps, gap = steps["num_steps"], steps.get("gap", {})
    num_gaps = gap.get("num_gaps", 0)
    stages = {name: us * num_gaps for name, us in gap.get("us_by_stage", {}).items()}
    host = num_steps * steps["host_us"] if num_steps else 0.0
    return {"num_steps": num_steps, "num_gaps": num_gaps, "host": host, **stages}


def room_flags(num_requests: int, max_tokens: int) -> list[str]:
    """Flags of a server that decodes so many of the demo's questions at once, with replies of so
    many tokens."""
    num_tokens = num_requests * (max_tokens + _PROMPT_AND_DRAFTS)
    return ["--max-running-requests", str(num_requests), "--max-total-tokens", str(num_tokens)]


def row_of(text: str, num: int, mode: str, code: str, rounds: Sequence[Measured]) -> Row:
    """Medians over the rounds. num: requests of the batch."""
    steps = [of.step for of in rounds if of.step is not None]
    hosts = [of.host for of in rounds if of.host is not None]
    stages = {
        stage.value: float(np.median([of.stages[stage.value] for of in rounds]))
        for stage in Stage
        if all(of.stages for of in rounds)
    }
    return Row(
        text=text,
        requests=num,
        mode=mode,
        code=code,
        step_us=float(np.median(steps)) if len(steps) == len(rounds) else None,
        host_us=float(np.median(hosts)) if hosts else None,
        gap_us=sum(stages.values()) - stages[Stage.DRAFT.value] if stages else None,
        stages_us=stages,
    )


def _table(rows: Sequence[Row]) -> str:
    columns = {name: name for name in ("text", "requests", "mode", "code")}
    columns |= {"step_us": "step us", "host_us": "host us", "gap_us": "gap us"}
    columns |= {stage.value: stage.value for stage in Stage}
    nothing = {stage.value: None for stage in Stage}
    cells = [{**asdict(row), **nothing, **row.stages_us} for row in rows]
    return markdown_table(columns, cells, num_labels=4)


@contextlib.contextmanager
def _servers(options: argparse.Namespace) -> Iterator[list[_Server]]:
    models, room = demo_models(), room_flags(max(options.requests), options.max_tokens)
    codes: dict[str, Path | None] = {"here": None}
    if options.against is not None:
        codes[options.against.name] = options.against
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for mode in options.modes:
            flags = [*CPU_FLAGS, *server_flags(mode, models), *room]
            if mode in HVD_MODES:
                flags += ["--hvd-report-cycles", "false"]
            for code, checkout in codes.items():
                if checkout is not None and mode not in HVD_MODES:
                    continue
                server = SglangServer(
                    flags,
                    log_file=folder / f"{mode}-{code}.log",
                    environment=demo_environment(),
                    grace_s=0,
                    launch=launch_of(checkout),
                )
                servers.append(_Server(mode, code, stack.enter_context(server)))
        yield servers


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("gap", "Measure how long the device waits for the host.")
    parser.add_argument(
        "--modes",
        type=lambda text: _among(text, MODES),
        default=list(COMMON_MODES),
        help=f"some of {','.join(MODES)} (default: {','.join(COMMON_MODES)})",
    )
    parser.add_argument(
        "--requests",
        type=counts,
        default=[1, 8, 32, 64],
        help="comma-separated numbers of requests in a batch (default: 1,8,32,64)",
    )
    parser.add_argument(
        "--texts",
        type=lambda text: _among(text, SAMPLING),
        default=list(SAMPLING),
        help=f"some of {','.join(SAMPLING)} (default: all)",
    )
    parser.add_argument(
        "--max-tokens", type=count, default=160, help="of each reply (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=count, default=5, help="measured rounds (default: %(default)s)"
    )
    add_against(parser)
    add_json(parser)
    return parser.parse_args(arguments)


def _among(text: str, known: Sequence[str] | Mapping[str, object]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    return names


if __name__ == "__main__":
    run(main)
