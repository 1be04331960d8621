"""Many requests at once, some of them sampled, with prefill in chunks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

AT_ONCE = 48


@pytest.mark.parametrize("policy", ["allocate", pytest.param("payoff", marks=pytest.mark.slow)])
def test_greedy_requests_among_sampled_ones_keep_their_output_under_load(
    policy: str,
    start_hvd: Callable[..., Any],
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_hvd(
        policy,
        *("--max-running-requests", str(AT_ONCE), "--chunked-prefill-size", "128"),
        # Fewer KV slots than all requests need: some wait or are retracted.
        *("--max-total-tokens", "16000"),
    )

    def ask(place: int) -> list[int]:
        sampling = {} if place % 3 else {"temperature": 0.8}
        answer = server.generate(prompts[place // 2 % len(prompts)], **sampling)
        return list(answer["output_ids"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(2 * AT_ONCE)))
    for place, answer in enumerate(answers):
        if place % 3:
            assert answer == expected[place // 2 % len(prompts)], f"request {place}"
        else:
            assert answer
    state = server.hvd_state()
    assert state["num_requests"] == 0
    assert state["num_resyncs"] == 0
    # Requests ran in batches: one at a time they would take four times as many steps.
    assert state["steps"]["num_steps"] < sum(map(len, answers)) / 4
