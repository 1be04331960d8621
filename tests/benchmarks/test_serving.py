"""The benchmark of servers, attached to a made-up server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.command import run
from benchmarks.serving.__main__ import main
from benchmarks.serving.client import play
from sglang_hvd.demo.server import ServerFailed

# The server's answers to /generate: the reply so far. The last one only says that it has ended.
CHUNKS = [
    {
        "text": "a" * num_tokens,
        "output_ids": [1] * num_tokens,
        "meta_info": {"completion_tokens": num_tokens, "spec_verify_ct": num_cycles},
    }
    for num_tokens, num_cycles in ((1, 0), (4, 2), (4, 2))
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault = ""

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, content: bytes, *, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) + missing))
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = missing > 0

    def do_GET(self) -> None:
        self._send(200, json.dumps({"internal_states": [{}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS]
        if self.fault == "tells":
            lines[1] = 'data: {"error": {"message": "out of memory"}}\n\n'
        content = "".join([*lines, "data: [DONE]\n\n"]).encode()
        status = 500 if self.fault == "refuses" else 200
        self._send(status, content, missing=9 if self.fault == "breaks off" else 0)


@pytest.fixture
def server() -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def ask_once(answers: object) -> dict[str, object] | None:
    return None if answers else {"text": "a"}


def test_a_reply_has_its_times_and_cycles(server: str) -> None:
    [answer] = play(server, [ask_once], concurrency=2).answers
    assert (answer.token_ids, answer.counts.num_cycles) == ((1, 1, 1, 1), 2)
    assert len(answer.gaps) == 3
    assert 0 < answer.ttft < answer.ttft + sum(answer.gaps) < answer.seconds


@pytest.mark.parametrize(
    ("fault", "said"), [("refuses", "500"), ("breaks off", "payload"), ("tells", "out of memory")]
)
def test_a_server_that_fails_ends_the_benchmark_in_one_line(
    server: str,
    fault: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_Handler, "fault", fault)
    with pytest.raises(SystemExit) as ended:
        run(lambda: play(server, [ask_once], concurrency=1) and None)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2  # 1 says that outputs differ
    assert line.startswith(f"error: {server}: ")
    assert said in line


def test_a_server_that_is_gone_is_named() -> None:
    with pytest.raises(ServerFailed, match=r"^http://127\.0\.0\.1:1: "):
        play("http://127.0.0.1:1", [ask_once], concurrency=1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--attach", "plain=http://a", "--attach", "plain=http://b"],
            "give each server another name",
        ),
        (
            ["--attach", "plain=http://a", "--modes", "plain,payoff"],
            "--modes names servers to start, --attach running servers",
        ),
        (["--attach", "plain"], "give MODE=URL"),
        (["--attach", "=http://a"], "give MODE=URL"),
        (["--modes", "plain,fast"], "fast: unknown, choose from plain"),
        (["--concurrency", "4,0"], "a whole number from 1 on, got 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert said in capsys.readouterr().err
