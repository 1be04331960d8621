"""A server starts warm from a snapshot, and an administrator warms, lists and erases its cache."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.cli import main
from sglang_hvd.demo.corpus.session import Family
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import CPU_FLAGS, Process, SglangServer, demo_environment, spawn
from sglang_hvd.suffix_cache.snapshot import read_snapshot
from sglang_hvd.traces.recording_folder import salvage
from sglang_hvd.traces.tokenizer_json import load_tokenizer, tokenizer_fingerprint
from tests.e2e.conftest import HANGS_AFTER_S, Server
from tests.e2e.forked_server import PROJECT_FIRST, Nursery

ADMIN = "only-for-admins"
# Their replies share much, their prompts are many.
KINDS: tuple[Family, ...] = ("sql", "tool_calls")


@pytest.fixture
def start(models: DemoModels, nursery: Nursery, tmp_path: Path) -> Callable[..., SglangServer]:
    """Make a server that verifies cache drafts only, so that its cycles tell how warm it is.

    The test enters it. When it leaves, every process of the server receives SIGTERM.
    """

    def make(*flags: str, launch: Callable[..., Process] = nursery.launch) -> SglangServer:
        return SglangServer(
            [
                *("--model-path", str(models.target), *CPU_FLAGS),
                *("--speculative-algorithm", "HVD", "--hvd-policy", "cache"),
                *("--speculative-draft-model-path", str(models.drafter), *MODEL_TREE_FLAGS),
                *("--skip-server-warmup", "--hvd-snapshot", str(tmp_path / "kept"), *flags),
            ],
            log_file=tmp_path / "server.log",
            environment={**demo_environment(), **PROJECT_FIRST},
            timeout_s=HANGS_AFTER_S,
            grace_s=HANGS_AFTER_S,
            launch=launch,
        )

    return make


def num_cycles(answer: dict[str, Any]) -> int:
    [figures] = answer["meta_info"]["hvd"]
    return sum(figures[f"num_{name}_cycles"] for name in ("cache", "model", "both", "plain"))


def fingerprint_of(models: DemoModels) -> str:
    return tokenizer_fingerprint(load_tokenizer(models.target / "tokenizer.json"))


def without_refused_freeze(log: str) -> str:
    """The log without the traceback of a request that SGLang sends itself when it starts. Without a
    warm-up it sends it at once, and does not listen yet if the machine is busy."""
    return re.sub(r"freeze_gc failed\nTraceback.*?(?=\n\[)", "", log, flags=re.S)


def test_a_restarted_server_drafts_at_once_as_it_did_before(
    start: Callable[..., SglangServer],
    models: DemoModels,
    prompts: list[str],
    tmp_path: Path,
) -> None:
    asked, path = prompts[::4], tmp_path / "kept"
    launched: list[Process] = []

    def launch(*given: Any) -> Process:
        # SGLang waits for its schedulers to end if it finds them by their names. Processes that
        # were forked twice do not get these.
        launched.append(spawn(*given))
        return launched[-1]

    with start(launch=launch) as process:
        assert "there is no snapshot" in process.log
        server = Server(process)
        first = server.generate_all(asked, concurrency=4)
        # A reply's own text is found first; what another request left helps from the second on.
        before = [num_cycles(server.generate(prompt)) for prompt in asked]
        server.hvd_state()
        # As a container's runtime does. The next server ends with SIGTERM to all processes.
        os.kill(launched[0].pid, signal.SIGTERM)
        process.wait()
    assert path.stat().st_mode & 0o777 == 0o600
    saved = path.read_bytes()
    assert sum(len(p.lengths) for p in read_snapshot(path, fingerprint=fingerprint_of(models))) > 0
    with start() as process:
        assert f"of snapshot {path} in" in process.log
        again = Server(process).generate_all(asked, concurrency=1)
        after = [num_cycles(answer) for answer in again]
        assert sum(after) <= sum(before)
        assert all(abs(now - then) <= 1 for now, then in zip(after, before, strict=True))
        assert [a["output_ids"] for a in again] == [a["output_ids"] for a in first]
        assert sum(before) < sum(map(num_cycles, first))
    assert "Traceback" not in without_refused_freeze(process.log)
    assert path.read_bytes() != saved
    path.write_bytes(path.read_bytes()[:-1])
    with start() as process:
        assert "cut off or damaged" in process.log
        assert "the shared cache starts cold" in process.log
        [answer] = Server(process).generate_all(asked[:1], concurrency=1)
        assert answer["output_ids"] == first[0]["output_ids"]


def wait_until_warm(server: Server) -> dict[str, Any]:
    """Wait until the warm-up of --hvd-warm-from has ended, and return how it did."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while not (state := server.hvd_state()["warm_up"])["is_done"]:
        assert time.monotonic() < deadline, f"the warm-up hangs: {state}"
        time.sleep(0.1)
    return dict(state)


def test_the_first_request_of_a_known_kind_drafts_as_the_hundredth(
    start: Callable[..., SglangServer], tmp_path: Path
) -> None:
    sessions = [s for kind in KINDS for s in demo_sessions(kind, count=60, seed=11)]
    # No two prompts are equal: what helps is what others of their kind were answered.
    asked = [
        f"<|im_start|>user\n{session.turns[0].user}<|im_end|>\n<|im_start|>assistant\n"
        for session in sessions
    ]
    assert len(set(asked)) == len(asked)
    probes = [prompt for place, prompt in enumerate(asked) if place % 6 == 0]
    hundred = [prompt for place, prompt in enumerate(asked) if place % 6]
    assert len(hundred) == 100

    def cycles(server: Server) -> list[int]:
        leaving_nothing = {"hvd": {"learn": False}}
        return [num_cycles(server.generate(p, custom_params=leaving_nothing)) for p in probes]

    recorded = tmp_path / "recorded"
    with start("--hvd-record", str(recorded)) as process:
        server = Server(process)
        cold = cycles(server)
        server.generate_all(hundred, concurrency=4)
        server.hvd_state()
        later = cycles(server)
        while server.hvd_state()["recorder"]["num_recorded"] < len(hundred):
            time.sleep(0.1)
    with start() as process:
        restarted = cycles(Server(process))
    (tmp_path / "kept").unlink()
    salvage(recorded)
    with start("--hvd-warm-from", str(recorded)) as process:
        server = Server(process)
        state = wait_until_warm(server)
        assert state["error"] is None
        assert server.hvd_state()["num_shared_requests"] == len(hundred)
        warmed = cycles(server)
    assert sum(later) < sum(cold) / 2
    for found in (restarted, warmed):
        # The outputs are the same, but their order is not, and of equal drafts the latest is used.
        assert sum(found) == pytest.approx(sum(later), rel=0.05)
        assert max(found) < min(cold)


def test_a_server_serves_while_it_is_warmed_and_a_fault_does_not_end_it(
    start: Callable[..., SglangServer], prompts: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    # More than enters while the server starts: a piece enters with each step, some while it idles.
    (folder / "1.jsonl").write_text("".join(f"{[i % 500] * 500}\n" for i in range(8000)))
    (folder / "2.jsonl").write_text("[1, 2]\n[-1]\n")
    with start("--hvd-warm-from", str(folder)) as process:
        server = Server(process)
        first = server.hvd_state()["warm_up"]
        assert not first["is_done"]
        during = server.generate_all(prompts, concurrency=4)
        now = server.hvd_state()["warm_up"]
        assert now["num_tokens"] > first["num_tokens"]
        state = wait_until_warm(server)
        assert state["error"] == f"{folder}/2.jsonl:2: no token ids: token ids are not negative"
        assert (state["num_files"], state["num_tokens"]) == (2, 4_000_002)
        after = server.generate_all(prompts, concurrency=4)
        assert [a["output_ids"] for a in during] == [a["output_ids"] for a in after]
        assert "warm-up ended early" in process.log
        assert "Traceback" not in without_refused_freeze(process.log)


@pytest.fixture
def server(start_hvd: Callable[..., Any]) -> Server:
    return start_hvd("cache", "--admin-api-key", ADMIN, "--enable-metrics")


def command(server: Server, *arguments: str, key: str | None = ADMIN) -> int:
    """Run a command on the server and return its exit code."""
    keys = () if key is None else ("--admin-api-key", key)
    return main([*arguments, "--url", server.process.url, *keys])


def flush(server: Server) -> None:
    assert command(server, "cache", "erase", "--all") == 0


def token_lines(path: Path, texts: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


def test_requests_that_run_while_the_cache_is_warmed_get_the_same_output(
    server: Server, prompts: list[str], tmp_path: Path
) -> None:
    expected = [a["output_ids"] for a in server.generate_all(prompts, concurrency=1)]
    flush(server)
    some = token_lines(tmp_path / "ids.jsonl", [*expected, *([[i] * 500 for i in range(400)])])
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.generate_all, prompts, concurrency=4)
        num_commands = 0
        while not answers.done():
            assert command(server, "warm", "--from", str(some)) == 0
            num_commands += 1
    assert num_commands > 1
    assert [a["output_ids"] for a in answers.result()] == expected
    assert "Traceback" not in server.process.log


def test_after_a_warm_up_the_first_request_drafts_as_a_later_one(
    server: Server, models: DemoModels, prompts: list[str], tmp_path: Path
) -> None:
    flush(server)
    cold = [server.generate(prompt) for prompt in prompts[::4]]
    later = [num_cycles(server.generate(prompt)) for prompt in prompts[::4]]
    flush(server)
    ids = token_lines(tmp_path / "ids.jsonl", [answer["output_ids"] for answer in cold])
    assert command(server, "warm", "--from", str(ids), "--cache-salt", "mine") == 0
    first = server.generate_all(prompts[::4], concurrency=1, cache_salt="mine")
    assert sum(map(num_cycles, first)) <= sum(later) < sum(map(num_cycles, cold))
    # Nothing of it is seen by others.
    other = server.generate(prompts[0], cache_salt="theirs")
    assert num_cycles(other) == num_cycles(cold[0])


def test_a_saved_snapshot_is_loaded_by_the_command(
    server: Server,
    models: DemoModels,
    prompts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flush(server)
    server.generate(prompts[0])
    server.generate(prompts[4], cache_salt="mine")
    server.hvd_state()
    path = tmp_path / "saved"
    capsys.readouterr()
    assert command(server, "snapshot", "save", str(path)) == 0
    assert f" tokens in {path}" in capsys.readouterr().out
    [piece] = read_snapshot(path, fingerprint=fingerprint_of(models))
    assert len(piece.namespaces) == 2
    flush(server)
    assert server.hvd_state()["num_shared_tokens"] == 0
    assert command(server, "snapshot", "load", str(path)) == 0
    assert server.hvd_state()["num_shared_tokens"] == len(piece.token_ids)
    capsys.readouterr()
    assert command(server, "cache", "list") == 0
    listed = capsys.readouterr().out
    assert "(none)" in listed
    name = next(name for name in piece.namespaces if name)
    assert name[:12] in listed
    assert command(server, "cache", "erase", "--listed", name[:12]) == 0
    state = server.hvd_state()
    common = [len(token_ids) for name, token_ids, *_ in piece.by_namespace() if not name]
    assert state["num_shared_tokens"] == sum(common)
    assert command(server, "cache", "resize", "--tokens", "4") == 0
    assert server.hvd_state()["num_shared_tokens"] == 0
    assert command(server, "cache", "resize", "--tokens", "1000000") == 0
    path.write_bytes(path.read_bytes()[:-1])
    assert command(server, "snapshot", "load", str(path)) == 2
    (tmp_path / "mine").write_text("notes")
    assert command(server, "snapshot", "save", str(tmp_path / "mine")) == 2
    assert "is not replaced" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("cache", "list"), ("cache", "erase", "--all")])
def test_only_an_administrator_orders_the_cache(
    server: Server, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(server, *arguments, key=None) == 2
    assert "401" in capsys.readouterr().err


def test_tokens_that_the_model_lacks_never_enter(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flush(server)
    ids = token_lines(tmp_path / "ids.jsonl", [[1, 2, 10**8]])
    capsys.readouterr()
    assert command(server, "warm", "--from", str(ids)) == 2
    assert "is not in the model's vocabulary" in capsys.readouterr().err
    assert server.hvd_state()["num_shared_tokens"] == 0
