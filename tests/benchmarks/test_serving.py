"""The benchmark of servers, attached to a made-up server."""

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.command import run
from benchmarks.serving import measure as serving_measure
from benchmarks.serving.__main__ import main
from benchmarks.serving.client import Answer, Played, arrivals, play
from benchmarks.serving.measure import Bounds, Cell, Row, measure, table_of
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.reply_cycles import ReplyCycles
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
    # So many requests must be running before any is answered.
    together = threading.Barrier(1)
    asked: ClassVar[list[str]] = []

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
        state = {"internal_states": [{}], "tokenizer_path": str(demo_models().target)}
        self._send(200, json.dumps(state).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/generate":
            self.asked.append(json.loads(body)["text"])
            self.together.wait(timeout=60)
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS]
        if self.fault == "tells":
            lines[1] = 'data: {"error": {"message": "out of memory"}}\n\n'
        content = "".join([*lines, "data: [DONE]\n\n"]).encode()
        status = 500 if self.fault == "refuses" else 200
        self._send(status, content, missing=9 if self.fault == "breaks off" else 0)


class _Impatient(_Handler):
    """Closes connections that are idle, as SGLang's server does after five seconds."""

    timeout = 0.05
    has_closed = threading.Event()

    def finish(self) -> None:
        super().finish()
        self.has_closed.set()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client may drop its connection. A traceback would stand among what the program says.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving(handler: type[_Handler]) -> Iterator[str]:
    made = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


@pytest.fixture
def server() -> Iterator[str]:
    with serving(_Handler) as url:
        yield url


def ask_once(answers: object) -> dict[str, object] | None:
    return None if answers else {"text": "a"}


def test_a_reply_has_its_times_and_cycles(server: str) -> None:
    [answer] = play(server, [ask_once], concurrency=2).answers
    assert (answer.token_ids, answer.counts.num_cycles) == ((1, 1, 1, 1), 2)
    assert len(answer.gaps) == 3
    assert 0 < answer.ttft < answer.ttft + sum(answer.gaps) < answer.seconds


def test_a_prompt_may_take_longer_to_be_made_than_the_server_keeps_a_connection() -> None:
    def slowly(answers: object) -> dict[str, object] | None:
        assert _Impatient.has_closed.wait(timeout=60)
        return ask_once(answers)

    with serving(_Impatient) as url:
        assert len(play(url, [slowly], concurrency=1).answers) == 1


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


def test_in_an_open_loop_conversations_begin_without_waiting_for_others(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a closed loop of one at a time the first request would wait for the others forever.
    monkeypatch.setattr(_Handler, "together", threading.Barrier(3))
    played = play(server, [ask_once] * 3, concurrency=1, starts=[0, 0.001, 0.002])
    assert [answer.conversation for answer in played.answers] == [0, 1, 2]


def test_arrivals_are_a_poisson_process_of_a_seed() -> None:
    times = arrivals(20_000, 4.0, seed=1)
    assert times == arrivals(20_000, 4.0, seed=1) != arrivals(20_000, 4.0, seed=2)
    gaps = np.diff(times, prepend=0)
    # Gaps of an exponential distribution: the standard deviation equals the mean.
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03)
    assert (gaps > 0).all()


def answer_of(ttft: float, gaps: tuple[float, ...]) -> Answer:
    tokens = (1,) * (1 + len(gaps))
    counts = ReplyCycles.of({"completion_tokens": len(tokens), "spec_verify_ct": 1}, len(tokens))
    return Answer(0, 0, "a", tokens, ttft + sum(gaps), ttft, gaps, counts)


def measured(monkeypatch: pytest.MonkeyPatch, *rounds: list[Answer], rate: float = 2.0) -> Row:
    """The row of these answers, which take ten seconds in each round."""
    left = list(rounds)
    monkeypatch.setattr(
        serving_measure, "play", lambda *_, **__: Played(tuple(left.pop(0)), 10.0, None)
    )
    monkeypatch.setattr(serving_measure, "flush_cache", lambda url: None)
    cell = Cell("w", "f", 1, [ask_once], lambda answer: True, rate)
    bounds = Bounds(ttft_ms=200, tpot_ms=30)
    [row] = measure({"plain": "x"}, [cell], rounds=len(rounds), warm_up=False, bounds=bounds)
    return row


def test_goodput_counts_the_replies_that_keep_both_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    good, slow_start, slow_tokens = (
        answer_of(0.1, (0.01, 0.03)),
        answer_of(0.3, (0.01, 0.01)),
        answer_of(0.1, (0.01, 0.07)),
    )
    one_chunk = answer_of(0.2, ())
    row = measured(monkeypatch, [good, slow_start, slow_tokens, one_chunk], [good] * 4)
    assert (row.rate, row.num_rounds, row.is_complete) == (2.0, 2, True)
    assert row.good_share == pytest.approx(6 / 8)
    assert row.goodput_per_s == pytest.approx((0.2 + 0.4) / 2)


def test_percentiles_are_those_of_the_replies_and_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [answer_of(number / 1000, (number / 1000,) * 2) for number in range(101)]
    answers[100] = answer_of(0.1, (0.05, 0.15))  # the mean per token is .1
    row = measured(monkeypatch, answers)
    assert (row.ttft_ms_p50, row.ttft_ms_p90, row.ttft_ms_p99) == pytest.approx((50, 90, 99))
    assert (row.tpot_ms_p50, row.tpot_ms_p90, row.tpot_ms_p99) == pytest.approx((50, 90, 99))
    assert row.itl_ms_p50 == pytest.approx(50)
    assert row.itl_ms_p99 == pytest.approx(99, abs=0.5)


def test_replies_of_one_chunk_have_no_times_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, [answer_of(0.1, ())])
    assert row.ttft_ms_p99 == pytest.approx(100)
    assert (row.tpot_ms_p50, row.itl_ms_p99) == (None, None)


def test_rows_of_a_server_that_ends_are_kept_and_marked(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_left = 2

    def play_or_fail(url: str, *args: Any, **settings: Any) -> Played:
        nonlocal num_left
        if url == "gone":
            num_left -= 1
            if num_left < 0:
                raise ServerFailed("gone: exit code 137")
        return play(server, *args, **settings)

    monkeypatch.setattr(serving_measure, "play", play_or_fail)
    monkeypatch.setattr(serving_measure, "flush_cache", lambda url: None)
    cells = [Cell(name, "f", 1, [ask_once], lambda answer: True) for name in "ab"]
    urls = {"plain": server, "payoff": "gone"}
    rows = measure(urls, cells, rounds=2, warm_up=False)
    assert [(r.workload, r.mode, r.num_rounds, r.is_complete) for r in rows] == [
        ("a", "plain", 2, True),
        ("a", "payoff", 1, False),
        ("b", "plain", 2, True),
        ("b", "payoff", 1, False),
    ]
    assert capsys.readouterr().err.splitlines() == ["payoff has ended: gone: exit code 137"]
    with pytest.raises(ServerFailed, match="137"):
        measure({"payoff": "gone"}, cells, rounds=2, warm_up=False)
    assert {(r.mode, r.fault) for r in rows} == {
        ("plain", None),
        ("payoff", "gone: exit code 137"),
    }
    # The last server that ends takes no row with it either.
    num_left = 1
    rows = measure({"payoff": "gone"}, cells, rounds=2, warm_up=False)
    assert [(r.num_rounds, r.is_complete) for r in rows] == [(1, False), (0, False)]
    assert (rows[1].tokens_per_s, rows[1].ttft_ms_p50, rows[1].outputs_identical) == (None,) * 3
    assert table_of(rows).count("NO") == 2


def test_a_mode_without_a_server_is_marked_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played((answer_of(0.1, (0.01,)),), 10.0, None)
    monkeypatch.setattr(serving_measure, "play", lambda *_, **__: played)
    monkeypatch.setattr(serving_measure, "flush_cache", lambda url: None)
    cell = Cell("w", "f", 1, [ask_once], lambda answer: True)
    why = "NotImplementedError in init_cuda_graph_state"
    rows = measure({"plain": "x"}, [cell], rounds=1, unserved={"eagle3-adaptive": why})
    assert [(r.mode, r.num_rounds, r.is_complete, r.fault) for r in rows] == [
        ("plain", 1, True, None),
        ("eagle3-adaptive", 0, False, why),
    ]
    assert rows[1].speedup_vs_plain is rows[1].goodput_per_s is None


def test_phases_follow_each_other_on_a_server_without_a_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def play(url: str, conversations: object, **_: object) -> Played:
        done.append(f"{url} {len(conversations)}")  # type: ignore[arg-type]
        return Played((answer_of(0.1, (0.01,)),), 10.0 * len(done), None)

    monkeypatch.setattr(serving_measure, "play", play)
    monkeypatch.setattr(serving_measure, "flush_cache", lambda url: done.append(f"{url} flush"))
    phases = [
        Cell("w", "f", 1, [ask_once] * number, lambda answer: True, phase=number)
        for number in (1, 2, 3)
    ]
    alone = Cell("w", "f", 1, [ask_once] * 4, lambda answer: True)
    urls = {"plain": "x", "payoff": "y"}
    rows = measure(urls, [*phases, alone], rounds=1, warm_up=False)
    of_x, of_y = ([f"{url} {what}" for what in ("flush", 1, 2, 3)] for url in "xy")
    assert done == [*of_x, *of_y, "y flush", "y 4", "x flush", "x 4"]
    assert [(row.phase, row.mode) for row in rows] == [
        (phase, mode) for phase in (1, 2, 3, None) for mode in urls
    ]
    # Each phase has figures of its own.
    assert len({row.tokens_per_s for row in rows}) == 8


def test_a_rate_is_measured_from_the_command_line(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "rows.json"
    flags = ["--attach", f"plain={server}", "--workloads", "chat", "--sessions", "3"]
    flags += ["--rates", "50,100", "--max-ttft-ms", "60000", "--rounds", "1", "--json", str(found)]
    assert main([*flags, "--template", "none"]) == 0
    rows = json.loads(found.read_text())
    assert [(row["rate"], row["concurrency"]) for row in rows] == [(50, 3), (100, 3)]
    assert all(row["good_share"] == 1 and row["goodput_per_s"] > 0 for row in rows)
    assert "good per s" in capsys.readouterr().out


class _Refusing(_Handler):
    fault = "refuses"


def test_the_next_server_gives_the_expected_answers_if_the_first_has_ended(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "rows.json"
    flags = ["--workloads", "chat", "--sessions", "2", "--concurrency", "1", "--rounds", "1"]
    gone = "http://127.0.0.1:1"
    with serving(_Refusing) as refusing:
        ended = ["--attach", f"eagle3={gone}", "--attach", f"plain={refusing}"]
        served = ["--attach", f"payoff={server}"]
        assert main([*ended, *served, *flags, "--json", str(found)]) == 1
        faults = capsys.readouterr().err.splitlines()
        with pytest.raises(SystemExit, match="2"):
            run(lambda: main([*ended, *flags]))
    assert [line.split(": ")[:2] for line in faults] == [
        ["plain has ended", refusing],
        ["eagle3 has ended", gone],
    ]
    rows = {row["mode"]: row for row in json.loads(found.read_text())}
    assert {mode: (row["num_rounds"], row["is_complete"]) for mode, row in rows.items()} == {
        "payoff": (1, True),
        "plain": (0, False),
        "eagle3": (0, False),
    }
    assert "500" in rows["plain"]["fault"]
    assert rows["payoff"]["outputs_identical"]
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: no server is left that could give the expected answers (plain: ")
    assert refusing in last
    assert f"; eagle3: {gone}: " in last


def test_a_workload_that_comes_back_brings_other_conversations(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "rows.json"
    flags = ["--attach", f"plain={server}", "--phases", "chat,sql,chat", "--sessions", "2"]
    flags += ["--concurrency", "1,2", "--rates", "50", "--rounds", "1", "--json", str(found)]
    _Handler.asked.clear()
    assert main([*flags, "--template", "none"]) == 0
    rows = json.loads(found.read_text())
    assert [(row["concurrency"], row["rate"], row["phase"], row["workload"]) for row in rows] == [
        (at_once, rate, phase, workload)
        for at_once, rate in ((1, None), (2, None), (4, 50))
        for phase, workload in enumerate(("chat", "sql", "chat"), start=1)
    ]
    assert [row["num_sessions"] for row in rows] == [2] * 3 + [4] * 6
    # Expected answers, a round that is not counted and a round of each of three loads. A load of
    # one at a time needs half of the sessions.
    expected: Counter[str] = Counter()
    for place, session in enumerate(demo_sessions("chat", count=8, seed=11)):
        expected[session.turns[0].user] += 7 if place % 4 < 2 else 5
    asked = Counter(_Handler.asked)
    assert {text: asked[text] for text in expected} == expected
    assert "phase" in capsys.readouterr().out


def test_a_workload_is_served_with_the_targets_own_chat_template(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.jsonl"
    lines = [{"turns": [f"Say {number}.", "Again."]} for number in range(50)]
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = tmp_path / "rows.json"
    flags = ["--attach", f"plain={server}", "--workloads", f"demo-sql,{mine}", "--rounds", "1"]
    _Handler.asked.clear()
    assert main([*flags, "--concurrency", "2", "--json", str(found)]) == 0
    rows = json.loads(found.read_text())
    assert [(row["workload"], row["family"], row["num_sessions"]) for row in rows] == [
        ("demo-sql", "demo", 8),
        (str(mine), "prompts", 8),
    ]
    # Each conversation's second request has the server's own reply to the first.
    again = [text for text in _Handler.asked if "Again." in text]
    assert again
    assert all("<|im_start|>assistant\naaaa<|im_end|>" in text for text in again)


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
        (["--rates", "2,0"], "numbers above 0, got 2,0"),
        (["--rates", "many"], "a number, got many"),
        (["--workloads", "sql,nix"], "nix: neither a file nor one of delegate-52"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert said in capsys.readouterr().err
