"""Two scheduler processes, each with half of every layer, decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# A core for each rank. SGLang would want a memory node for each.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize("is_spawned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_generate_what_plain_serving_does(
    is_spawned: bool,
    start_server: Callable[..., Any],
    start_hvd: Callable[..., Any],
    prompts: list[str],
) -> None:
    asked = prompts[:8]
    plain = start_server("--tp-size", "2", environment=TWO_RANKS)
    expected = [plain.generate(prompt, max_new_tokens=48)["output_ids"] for prompt in asked]
    # The ranks time their steps differently. If they decided differently, they would add up
    # different nodes, or one would wait forever.
    server = start_hvd("allocate", "--tp-size", "2", environment=TWO_RANKS, is_spawned=is_spawned)
    for concurrency in (1, 8):
        server.flush_cache()
        answers = server.generate_all(asked, concurrency=concurrency, max_new_tokens=48)
        assert [answer["output_ids"] for answer in answers] == expected
    state = server.hvd_state()
    assert len([num for num in state["num_steps_by_width"].values() if num]) > 1
    assert state["costs"]["num_timed_steps"] > 20
    assert state["num_resyncs"] == 0
