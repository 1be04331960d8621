"""`sglang-hvd demo` and `sglang-hvd serve`: real servers on the embedded demo models."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from tqdm import tqdm
from transformers import AutoTokenizer

from sglang_hvd.config import HvdConfig
from sglang_hvd.demo.corpus.session import FAMILIES, Family
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import DemoModels, demo_models
from sglang_hvd.demo.modes import Mode, server_flags
from sglang_hvd.demo.play import Reply, play
from sglang_hvd.demo.report import TABLE_WIDTH, by_source, json_rows, legend, rows, table
from sglang_hvd.demo.server import (
    CPU_ENVIRONMENT,
    CPU_FLAGS,
    ServerFailed,
    SglangServer,
    demo_environment,
    held_port,
    how_it_ended,
)
from sglang_hvd.whole_file import write_whole

SESSION_SEED = 7

# The policy that serves by default, and whose replies are printed by draft source.
_POLICY = HvdConfig().policy

# The families whose last reply is printed.
_SHOWN: tuple[Family, ...] = ("editing", "tool_calls", "chat")


def run_demo(*, modes: Sequence[Mode], num_sessions: int, json_file: Path | None) -> int:
    """Play the same sessions in every mode and print what each gained.

    On a terminal, also print replies in which the style of each token shows its draft source.

    Returns:
        The exit code: 1 if the text of a mode differs from that of plain decoding.
    """
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)  # a narrower terminal wraps lines itself
    models = demo_models()
    sessions = [
        session
        for family in FAMILIES
        for session in demo_sessions(family, count=num_sessions, seed=SESSION_SEED)
    ]
    num_turns = sum(len(session.turns) for session in sessions)
    replies: dict[Mode, list[Reply]] = {}
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder, _server(mode, models, folder) as server:
            turns = play(server.url, sessions)
            replies[mode] = list(tqdm(turns, desc=f"{mode:<10}", total=num_turns, disable=None))
    if _POLICY in replies and console.is_terminal:
        _print_by_source(console, models, replies[_POLICY])
    all_rows = rows(replies)
    console.print(table(all_rows))
    if json_file is not None:
        write_whole(json_file, (json.dumps(json_rows(all_rows), indent=1) + "\n").encode())
    return 0 if all(row.outputs_identical for row in all_rows) else 1


def run_serve(*, cache_dir: Path, port: int, more_flags: Sequence[str]) -> int:
    """Serve the demo model with HVD until interrupted."""
    held_port(port).close()  # a taken port is an error before a log is promised
    cache_dir.mkdir(parents=True, exist_ok=True)
    log_file = cache_dir / f"serve-{port}.log"
    flags = [*CPU_FLAGS, *server_flags(_POLICY, demo_models()), *more_flags]
    print(f"starting an HVD server, log in {log_file}", flush=True)
    with SglangServer(flags, log_file=log_file, port=port, environment=CPU_ENVIRONMENT) as server:
        print(f"OpenAI API at {server.url}/v1, model name demo; ctrl-c ends the server", flush=True)
        try:
            code = server.wait()
        except KeyboardInterrupt:
            return 0
    if code:
        raise ServerFailed(f"{how_it_ended(code)}: its log is {log_file}")
    return 0


def _server(mode: Mode, models: DemoModels, folder: str) -> SglangServer:
    return SglangServer(
        [*CPU_FLAGS, *server_flags(mode, models)],
        log_file=Path(folder) / "server.log",
        environment=demo_environment(),
        grace_s=0,  # it has nothing to put away
    )


def _print_by_source(console: Console, models: DemoModels, replies: Sequence[Reply]) -> None:
    """Print the last reply of the shown families with the source of each token."""
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    console.print(f"\npolicy {_POLICY}, tokens by draft source:", legend(), end="\n\n")
    for family in _SHOWN:
        # Encoding the text again mostly gives the generated tokens; others have another length.
        shown = [
            (reply, token_ids)
            for reply in replies
            if reply.family == family
            and len(token_ids := tokenizer.encode(reply.text)) in _lengths(reply)
        ]
        if not shown:
            console.print(f"--- {family}: no reply whose text encodes to its tokens\n")
            continue
        reply, token_ids = shown[-1]
        console.print(f"--- {family}: {reply.question.splitlines()[-1]}", markup=False)
        console.print(
            by_source([tokenizer.decode([t]) for t in token_ids], reply.cycles), end="\n\n"
        )


def _lengths(reply: Reply) -> tuple[int, int]:
    """Token counts that a reply's text may have: with or without its end-of-turn token."""
    return reply.num_tokens - 1, reply.num_tokens
