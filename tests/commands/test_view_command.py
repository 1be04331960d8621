"""The command view: what it asks, what it writes, and what it refuses before any work is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from sglang_hvd.cli import main
from sglang_hvd.view.replies import read_replies, replies_json
from tests.commands.test_running_server import Server
from tests.view.made_up import cycle
from tests.view.test_reply_page import REPLY

CYCLES = [cycle(1, "cache", 1).report()]
FIGURES: dict[str, Any] = {"hvd": [{"num_cache_cycles": 1, "cycles": CYCLES}]}


@pytest.fixture
def server() -> Iterator[Server]:
    """An HVD server that answers with three tokens."""
    made = Server()
    info = {"internal_states": [{"hvd": {"config": {"policy": "allocate"}}}]}
    choice = {"response_token_ids": [5, 6, 7], "meta_info": FIGURES}
    answers = {
        "/server_info": info,
        "/generate": {"output_ids": [5, 6, 7], "meta_info": FIGURES},
        "/v1/chat/completions": {"choices": [choice]},
        "/detokenize": {"text": ["a", "a", "a b", "a b", "a b c"]},
    }
    made.answers.update({path: (200, json.dumps(answer)) for path, answer in answers.items()})
    thread = Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def run(*flags: object) -> int:
    try:
        return main(["view", *map(str, flags)])
    except SystemExit as ended:  # what the parser finds
        return int(str(ended.code))


def test_a_reply_becomes_a_page_and_a_file(server: Server, tmp_path: Path) -> None:
    page, saved = tmp_path / "page.html", tmp_path / "replies.json"
    flags = ("--url", server.url, "--prompt", "Hello\nthere", "--max-tokens", 3)
    assert run(*flags, "--html", page, "--save-json", saved, "--api-key", "secret") == 0
    [reply] = read_replies(saved)
    assert (reply.title, reply.prompt, reply.tokens) == ("Hello", "Hello\nthere", ("a", " b", " c"))
    assert reply.about == f"policy allocate, {server.url}"
    assert reply.sources == ["target", "prompt", "target"]
    assert "Hello" in page.read_text()
    assert {key for _, _, key in server.asked} == {"Bearer secret"}
    [_, (path, body, _), (_, windows, _)] = server.asked
    assert (path, body["text"]) == ("/generate", "Hello\nthere")
    assert body["sampling_params"] == {
        "max_new_tokens": 3,
        "temperature": 0,
        "custom_params": {"hvd": {"report_cycles": True}},
    }
    assert windows["tokens"] == [[5], [5], [5, 6], [5, 6], [5, 6, 7]]
    again = tmp_path / "again.html"
    assert run("--json", saved, "--html", again) == 0
    assert again.read_bytes() == page.read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (page, saved, again)} == {0o600}


def test_a_chat_is_asked_as_one(server: Server, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Say it")
    flags = ("--chat", "--url", server.url, "--prompt-file", prompt)
    assert run(*flags, "--html", tmp_path / "page.html") == 0
    [_, (path, body, _), _] = server.asked
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Say it"}]
    assert body["return_meta_info"]
    assert body["return_token_ids"]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--prompt", "a", "--html", "no/page.html"], "there is no folder no"),
        (["--prompt", "a", "--html", "."], ". is a folder"),
        (["--prompt", "a", "--html", "/dev/null"], "is a device or a pipe"),
        (["--prompt", "a", "--save-json", "no/replies.json"], "there is no folder no"),
        (["--prompt", "a"], "view has nothing to write: give --html, --save-json or both"),
        (["--prompt", "  ", "--html", "page.html"], "an empty prompt"),
        (["--prompt-file", "none.txt", "--html", "page.html"], "none.txt: cannot read the prompt"),
        (["--prompt-file", "bytes", "--html", "page.html"], "bytes: cannot read the prompt: not a"),
        (["--html", "page.html"], "one of the arguments --prompt"),
        (["--prompt", "a", "--max-tokens", "0", "--html", "page.html"], "a whole number from 1"),
        (["--traces", "t", "--html", "page.html"], "--traces needs --tokenizer"),
    ],
)
def test_a_mistake_is_one_line_before_the_server_is_asked(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    fault: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\xff\xfe\x00")
    assert run("--url", server.url, *flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert fault in line
    assert server.asked == []
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("path", "answer", "fault"),
    [
        ("/server_info", (200, '{"internal_states": [{}]}'), "does not run HVD"),
        ("/server_info", (404, "nothing"), "404 Not Found"),
        ("/generate", (400, '{"error": {"message": "too long"}}'), "/generate: too long"),
        (
            "/generate",
            (200, '{"output_ids": [1], "meta_info": {"hvd": [{}]}}'),
            "reports no cycles: it has an older version of sglang-hvd",
        ),
        (
            "/generate",
            (200, '{"output_ids": [1], "meta_info": {"hvd": [{"cycles": [["cache", 2]]}]}}'),
            "not a cycle that this version of sglang-hvd reports",
        ),
    ],
)
def test_a_server_that_cannot_answer_is_one_line(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    answer: tuple[int, str],
    fault: str,
) -> None:
    server.answers[path] = answer
    page = tmp_path / "page.html"
    assert run("--url", server.url, "--prompt", "a", "--html", page) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert fault in line
    assert not page.exists()


def test_a_reply_that_ends_with_its_prefill_has_no_cycles(server: Server, tmp_path: Path) -> None:
    server.answers["/generate"] = (200, '{"output_ids": [5], "meta_info": {"hvd": []}}')
    server.answers["/detokenize"] = (200, '{"text": ["a"]}')
    saved = tmp_path / "replies.json"
    assert run("--url", server.url, "--prompt", "a", "--save-json", saved) == 0
    [reply] = read_replies(saved)
    assert (reply.tokens, reply.cycles) == (("a",), ())


def test_saved_replies_need_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "replies.json"
    saved.write_text(replies_json([REPLY]))
    assert run("--json", saved, "--html", tmp_path / "page.html") == 0
    assert "10 tokens in 4 cycles: target 4, prompt 2, both 1, model 3" in capsys.readouterr().out
