"""No request leaves state behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def server(start_hvd: Callable[..., Any]) -> Any:
    """One request in three may run at a time and prefill goes in chunks, so requests queue."""
    return start_hvd(
        *("payoff", "--max-running-requests", "3", "--chunked-prefill-size", "64"),
        *("--max-total-tokens", "4000", "--enable-metrics"),
    )


def _num_queued(server: Any) -> float:
    lines = server.process.get("/metrics").splitlines()
    [line] = [line for line in lines if line.startswith("sglang:num_queue_reqs{")]
    return float(line.rsplit(" ", 1)[1])


def _ask_in_background(server: Any, bodies: Sequence[dict[str, Any]]) -> list[threading.Thread]:
    def ask(body: dict[str, Any]) -> None:
        # Aborted ones are answered with an error.
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            server.process.post("/generate", body)

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def _body(prompt: str, rid: str, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, **params}
    return {"text": prompt, "rid": rid, "sampling_params": sampling}


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


def test_normal_ends(server: Any, prompts: list[str]) -> None:
    server.generate_all(prompts, concurrency=8, max_new_tokens=40)
    server.wait_until_idle()


def test_finished_at_prefill(server: Any, prompts: list[str]) -> None:
    server.generate_all(prompts, concurrency=8, max_new_tokens=1)
    server.wait_until_idle()


def test_several_samples_with_their_prefix_warming_request(server: Any, long_prompt: str) -> None:
    server.generate(long_prompt, n=4, max_new_tokens=20)
    server.wait_until_idle()


def test_aborted_while_running_and_while_queued(server: Any, prompts: list[str]) -> None:
    bodies = [_body(prompt, f"abort-{i}") for i, prompt in enumerate(prompts[:9])]
    threads = _ask_in_background(server, bodies)
    _wait_for(lambda: server.hvd_state()["num_requests"] == 3)
    _wait_for(lambda: _num_queued(server) >= 3)
    for body in reversed(bodies):  # the queued ones first
        server.process.post("/abort_request", {"rid": body["rid"]})
    for thread in threads:
        thread.join()
    server.wait_until_idle()


def test_aborted_in_chunked_prefill(server: Any, long_prompt: str) -> None:
    long_text = long_prompt * 3
    threads = _ask_in_background(server, [_body(long_text, "chunked")])
    _wait_for(lambda: server.hvd_state()["num_requests"] >= 1)
    server.process.post("/abort_request", {"rid": "chunked"})
    for thread in threads:
        thread.join()
    server.wait_until_idle()


def test_disconnected_in_the_middle_of_a_stream(server: Any, long_prompt: str) -> None:
    body = {**_body(long_prompt, "gone"), "stream": True}
    request = urllib.request.Request(
        server.process.url + "/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        assert server.hvd_state()["num_requests"] == 1
    server.wait_until_idle()


def test_a_rid_used_again_starts_afresh(server: Any, prompts: list[str]) -> None:
    first = server.process.post("/generate", _body(prompts[0], "again", max_new_tokens=30))
    second = server.process.post("/generate", _body(prompts[0], "again", max_new_tokens=30))
    assert first["output_ids"] == second["output_ids"]
    server.wait_until_idle()
