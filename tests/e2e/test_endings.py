"""No request leaves state behind, however it ends."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.conftest import HANGS_AFTER_S


@pytest.fixture
def server(start_hvd: Callable[..., Any]) -> Any:
    """At most three requests run at a time and prefill goes in chunks, so requests queue."""
    return start_hvd(
        *("payoff", "--max-running-requests", "3", "--chunked-prefill-size", "64"),
        *("--max-total-tokens", "4000", "--enable-metrics"),
    )


def _num_queued(server: Any) -> float:
    lines = server.process.get("/metrics").splitlines()
    [line] = [line for line in lines if line.startswith("sglang:num_queue_reqs{")]
    return float(line.rsplit(" ", 1)[1])


def _ask_in_background(
    server: Any, bodies: Sequence[dict[str, Any]], answers: list[dict[str, Any]] | None = None
) -> list[threading.Thread]:
    def ask(body: dict[str, Any]) -> None:
        # An aborted request may be answered with an error.
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            answer = server.process.post("/generate", body)
            if answers is not None:
                answers.append(answer)

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def _body(prompt: str, rid: str, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, **params}
    return {"text": prompt, "rid": rid, "sampling_params": sampling}


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_AFTER_S
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


def test_the_others_of_a_batch_go_on_as_in_plain_serving(
    start_hvd: Callable[..., Any], plain_ids: Callable[..., list[list[int]]], prompts: list[str]
) -> None:
    params = {"max_new_tokens": 200, "ignore_eos": True}
    survivors, ended = prompts[:8:2], prompts[1:8:2]
    expected = plain_ids(survivors, **params)
    server = start_hvd("payoff", "--hvd-threshold", "1.5", "--enable-metrics")
    aborted = _ask_in_background(
        server, [_body(prompt, f"ended-{i}") for i, prompt in enumerate(ended[:2])]
    )
    with ExitStack() as streams, ThreadPoolExecutor(len(survivors)) as pool:
        asked = [pool.submit(server.generate, prompt, **params) for prompt in survivors]
        for number, prompt in enumerate(ended[2:]):
            stream = streams.enter_context(server.stream(_body(prompt, f"gone-{number}")))
            stream.readline()  # running by now; closing the stream disconnects
        server.process.post("/abort_request", {"rid": "ended-0"})
        streams.close()
        server.process.post("/abort_request", {"rid": "ended-1"})
        answers = [future.result() for future in asked]
    for thread in aborted:
        thread.join()
    assert [answer["output_ids"] for answer in answers] == expected
    server.wait_until_idle()


def test_aborted_in_chunked_prefill(server: Any, long_prompt: str) -> None:
    answers: list[dict[str, Any]] = []
    threads = _ask_in_background(server, [_body(long_prompt * 8, "chunked")], answers)
    _wait_for(lambda: server.hvd_state()["num_requests"] >= 1)
    server.process.post("/abort_request", {"rid": "chunked"})
    for thread in threads:
        thread.join()
    # It had more prompt left than one chunk: no token was generated.
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] in ([], [0])
    server.wait_until_idle()


def test_disconnected_in_the_middle_of_a_stream(server: Any, long_prompt: str) -> None:
    with server.stream(_body(long_prompt, "gone")) as response:
        response.readline()
        assert server.hvd_state()["num_requests"] == 1
    server.wait_until_idle()


def test_a_rid_used_again_starts_afresh(server: Any, prompts: list[str]) -> None:
    first = server.process.post("/generate", _body(prompts[0], "again", max_new_tokens=30))
    second = server.process.post("/generate", _body(prompts[0], "again", max_new_tokens=30))
    assert first["output_ids"] == second["output_ids"]
    server.wait_until_idle()
