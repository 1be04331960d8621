"""Requests that SGLang takes out of the running batch when KV slots run out, and resumes later."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.demo.corpus.sessions import demo_sessions
from tests.e2e.conftest import mixing
from tests.e2e.test_record import wait_until_recorded

# What SGLang logs when it retracts.
RETRACTED = "Retract requests."
# Most prompts fit, their replies do not. The scheduler admits too many requests only if it expects
# short replies (a low conservativeness, no `ignore_eos`) and admits one at a time: it counts the
# whole replies of requests that it admits together.
SMALL_POOL = (
    *("--max-total-tokens", "2600", "--disable-radix-cache"),
    *("--schedule-conservativeness", "0.05", "--prefill-max-requests", "1"),
    "--enable-metrics",
)
MAX_NEW_TOKENS = 180


@pytest.fixture
def prompts() -> list[str]:
    """Sixteen files to edit, each with a reply about as long as the prompt."""
    sessions = demo_sessions("editing", count=40, seed=12)
    turns = sorted((s.turns[0] for s in sessions), key=lambda turn: len(turn.assistant))[-16:]
    return [f"<|im_start|>user\n{t.user}<|im_end|>\n<|im_start|>assistant\n" for t in turns]


@pytest.mark.parametrize(
    ("policy", "environment"),
    [("payoff", {}), ("cache", {}), ("payoff", {"TRITON_INTERPRET": "1"})],
    ids=["payoff", "cache", "payoff overlap"],
)
def test_output_is_that_of_plain_serving(
    policy: str,
    environment: dict[str, str],
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts, max_new_tokens=MAX_NEW_TOKENS)
    server = start_hvd(policy, *mixing(policy), *SMALL_POOL, environment=environment)
    answers = server.generate_all(prompts, concurrency=len(prompts), max_new_tokens=MAX_NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == expected
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    server.wait_until_idle()
    assert server.hvd_state()["num_resyncs"] == 0


def test_steps_that_run_ahead_of_a_retraction_give_the_same_output(
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    running_ahead: tuple[str, ...],
) -> None:
    expected = plain_ids(prompts, max_new_tokens=MAX_NEW_TOKENS)
    server = start_hvd(
        *("allocate", *running_ahead, *SMALL_POOL), environment={"TRITON_INTERPRET": "1"}
    )
    answers = server.generate_all(prompts, concurrency=len(prompts), max_new_tokens=MAX_NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == expected
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    server.wait_until_idle()
    state = server.hvd_state()
    assert state["num_steps_ahead"] > 0
    assert state["num_resyncs"] == 0


def test_requests_that_end_with_a_prefill_after_a_retraction_are_kept(
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    tmp_path: Path,
) -> None:
    expected = plain_ids(prompts, max_new_tokens=2)
    server = start_hvd(
        *("model", "--disable-radix-cache", "--enable-metrics", "--hvd-record", str(tmp_path)),
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "1"},
    )
    server.flush_cache()
    with ThreadPoolExecutor(1) as pool:
        # Each step retracts the request with fewer tokens, which is never the first one.
        running = pool.submit(server.generate, prompts[0], max_new_tokens=1000, ignore_eos=True)
        answers = [server.generate(prompt, max_new_tokens=2) for prompt in prompts]
        answers.append(running.result())
    assert [answer["output_ids"] for answer in answers[:-1]] == expected
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers[:-1]) > 0
    assert all(answer["meta_info"]["hvd"] for answer in answers)
    server.wait_until_idle()
    assert server.hvd_state()["num_shared_requests"] == len(answers)
    wait_until_recorded(server.process, 1 + len(answers))  # the first warmed the server up


def test_aborted_after_a_retraction(start_hvd: Callable[..., Any], prompts: list[str]) -> None:
    server = start_hvd("payoff", *mixing("payoff"), *SMALL_POOL)
    server.flush_cache()
    before = server.process.log.count(RETRACTED)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(server.generate, p, max_new_tokens=MAX_NEW_TOKENS) for p in prompts]
        while server.process.log.count(RETRACTED) == before:
            assert not all(future.done() for future in asked), "no request was retracted"
            time.sleep(0.005)
        server.process.post("/abort_request", {"abort_all": True})
        reasons = [future.result()["meta_info"]["finish_reason"]["type"] for future in asked]
    assert "abort" in reasons
    server.wait_until_idle()
