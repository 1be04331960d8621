"""`sglang-hvd demo` and `sglang-hvd serve`: real servers on the embedded demo models."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from sglang_hvd.config import HvdConfig
from sglang_hvd.demo.corpus.session import Family, Session
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import DemoModels, demo_models
from sglang_hvd.demo.modes import HVD_MODES, Mode, server_flags
from sglang_hvd.demo.play import Reply, asked, play
from sglang_hvd.demo.printout import Printout, demo_console
from sglang_hvd.demo.report import json_rows, rows
from sglang_hvd.demo.screen import Screen, can_redraw
from sglang_hvd.demo.server import (
    CPU_ENVIRONMENT,
    CPU_FLAGS,
    ServerFailed,
    SglangServer,
    demo_environment,
    held_port,
    how_it_ended,
)
from sglang_hvd.demo.server_forker import ServerForker
from sglang_hvd.traces.tokenizer_json import load_tokenizer
from sglang_hvd.view.replies import ViewedReply, token_texts
from sglang_hvd.view.reply_page import write_page
from sglang_hvd.whole_file import write_whole

SESSION_SEED = 7

# The policy that serves by default, and whose replies are shown by source if it plays.
_POLICY = HvdConfig().policy


def run_demo(
    *,
    modes: Sequence[Mode],
    families: Sequence[Family],
    num_sessions: int,
    json_file: Path | None = None,
    page_file: Path | None = None,
    picture_file: Path | None = None,
) -> int:
    """Plays the same sessions in every mode, and prints HVD's replies by source and what each mode
    gained. A terminal also shows each reply while the demo plays.

    modes: plain is among them.
    json_file: receives the rows of the table.
    page_file: receives the token view of HVD's replies.
    picture_file: receives what is printed, as SVG.

    Returns:
        The exit code: 1 if the text of a mode differs from that of plain decoding.

    Raises ValueError if there are no replies of HVD for a page.
    """
    hvd = _shown_mode(modes)
    if page_file is not None and hvd is None:
        raise ValueError(f"--html shows replies of HVD: add {_POLICY} to --modes")
    console = demo_console()
    models = demo_models()
    sessions = [
        session
        for family in families
        for session in demo_sessions(family, count=num_sessions, seed=SESSION_SEED)
    ]
    with _servers(modes, models, console) as urls:
        replies, viewed = _play(sessions, urls, hvd, models, console)
    all_rows = rows(replies)
    printout = Printout(
        all_rows,
        f"{num_sessions} session{'s'[: num_sessions > 1]} of each workload, one request at a time",
        hvd,
        [_longest([view for reply, view in viewed if reply.family == f]) for f in families],
    )
    printout.print_to(console)
    if json_file is not None:
        write_whole(json_file, (json.dumps(json_rows(all_rows), indent=1) + "\n").encode())
    if page_file is not None:
        write_page(page_file, [view for _, view in viewed], title=f"Replies of policy {hvd}")
    if picture_file is not None:
        write_whole(picture_file, printout.as_svg().encode())
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


def _shown_mode(modes: Sequence[Mode]) -> Mode | None:
    """The mode of HVD whose replies are shown; None if there is none."""
    of_hvd = [mode for mode in modes if mode in HVD_MODES]
    return _POLICY if _POLICY in of_hvd else of_hvd[-1] if of_hvd else None


@contextmanager
def _servers(
    modes: Sequence[Mode], models: DemoModels, console: Console
) -> Iterator[Mapping[Mode, str]]:
    """URLs of servers of all modes. All run at the same time, and those that are idle sleep."""
    environment = demo_environment()
    told = f"Starting servers: {', '.join(modes)}"
    if not can_redraw(console):
        console.print(told)
    with ExitStack() as running:
        with console.status(told, spinner="line") if can_redraw(console) else nullcontext():
            folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
            forker = running.enter_context(ServerForker(environment))
            urls: dict[Mode, str] = {}
            for mode in modes:  # one by one, since HVD times its steps at its start
                server = SglangServer(
                    [*CPU_FLAGS, *server_flags(mode, models)],
                    log_file=folder / f"{mode}.log",
                    environment=environment,
                    grace_s=0,  # it has nothing to put away
                    launch=forker.launch,
                )
                urls[mode] = running.enter_context(server).url
        yield urls


def _play(
    sessions: Sequence[Session],
    urls: Mapping[Mode, str],
    hvd: Mode | None,
    models: DemoModels,
    console: Console,
) -> tuple[dict[Mode, list[Reply]], list[tuple[Reply, ViewedReply]]]:
    """Plays the sessions turn by turn, each turn in all modes. Whatever else the machine does slows
    all modes down alike.

    Returns:
        The replies of each mode, and those that were shown, each with its tokens.
    """
    decode_all = load_tokenizer(models.target / "tokenizer.json").decode_batch
    replies: dict[Mode, list[Reply]] = {mode: [] for mode in urls}
    shown = []
    screen = Screen(console, list(urls), num_turns=sum(len(s.turns) for s in sessions))
    players = [play(url, sessions) for url in urls.values()]
    with screen.open():
        for answers in zip(*players, strict=True):
            turn = dict(zip(urls, answers, strict=True))
            for mode, reply in turn.items():
                replies[mode].append(reply)
            reply = answers[-1] if hvd is None else turn[hvd]
            shown.append((reply, _viewed(reply, hvd, decode_all)))
            screen.count(turn)
            screen.write(*shown[-1])
    return replies, shown


def _longest(viewed: Sequence[ViewedReply]) -> ViewedReply:
    return max(viewed, key=lambda reply: len(reply.tokens))


def _viewed(
    reply: Reply, hvd: Mode | None, decode_all: Callable[[list[list[int]]], list[str]]
) -> ViewedReply:
    """A reply with the text and the source of each token."""
    return ViewedReply(
        title=f"{reply.family}: {asked(reply)}",
        about="" if hvd is None else f"policy {hvd}",
        prompt=reply.prompt,
        tokens=token_texts(reply.token_ids, decode_all),
        cycles=reply.cycles,
        seconds=round(reply.seconds, 3),
    )
