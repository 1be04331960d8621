"""`sglang-hvd demo` and `sglang-hvd serve`: real servers on the embedded demo models."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer

from sglang_hvd.config import HvdConfig
from sglang_hvd.demo.corpus.session import FAMILIES, Family
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import DemoModels, ensure_demo_models
from sglang_hvd.demo.modes import Mode, server_flags
from sglang_hvd.demo.play import Reply, play
from sglang_hvd.demo.report import coloured, json_rows, legend, rows, shows_colours, table
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

# The policy that serves by default, and whose replies are printed in colour.
_POLICY = HvdConfig().policy

# Families whose last reply is printed so.
_SHOWN: tuple[Family, ...] = ("editing", "tool_calls", "chat")


def run_demo(
    *, cache_dir: Path, modes: Sequence[Mode], num_sessions: int, json_file: Path | None
) -> int:
    """Play the same sessions in every mode and print where tokens came from, on a terminal with
    colours, and what it gained.

    Returns:
        The exit code: 1 if a mode's text differs from plain decoding's.
    """
    models = ensure_demo_models(cache_dir)
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
    if _POLICY in replies and shows_colours(sys.stdout):
        _print_coloured(models, replies[_POLICY])
    all_rows = rows(replies)
    print(table(all_rows))
    if json_file is not None:
        write_whole(json_file, (json.dumps(json_rows(all_rows), indent=1) + "\n").encode())
    return 0 if all(row.outputs_identical for row in all_rows) else 1


def run_serve(*, cache_dir: Path, port: int, more_flags: Sequence[str]) -> int:
    """Serve the demo model with HVD until interrupted."""
    held_port(port).close()  # told before minutes are spent on the models
    models = ensure_demo_models(cache_dir)
    log_file = cache_dir / f"serve-{port}.log"
    flags = [*CPU_FLAGS, *server_flags(_POLICY, models), *more_flags]
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


def _print_coloured(models: DemoModels, replies: Sequence[Reply]) -> None:
    """Print the last reply of the shown families as it was decoded while it was played."""
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    print(f"\npolicy {_POLICY}, tokens by draft source: {legend()}\n")
    for family in _SHOWN:
        # Encoding the text again gives the generated tokens, but for a rare one spelt otherwise.
        shown = [
            (reply, token_ids)
            for reply in replies
            if reply.family == family
            and len(token_ids := tokenizer.encode(reply.text)) in _lengths(reply)
        ]
        if not shown:
            print(f"--- {family}: no reply that its text alone gives back in tokens\n")
            continue
        reply, token_ids = shown[-1]
        print(f"--- {family}: {reply.question.splitlines()[-1]}")
        print(coloured([tokenizer.decode([t]) for t in token_ids], reply.cycles), end="\n\n")


def _lengths(reply: Reply) -> tuple[int, int]:
    """Token counts that a reply's text may have: with or without its end-of-turn token."""
    return reply.num_tokens - 1, reply.num_tokens
