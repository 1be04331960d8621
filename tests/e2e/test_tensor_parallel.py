"""Two scheduler processes, each with half of every layer, decide alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.cli import main

# A core for each rank. SGLang would want a memory node for each.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize("is_spawned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_generate_what_plain_serving_does(
    is_spawned: bool,
    start_server: Callable[..., Any],
    start_hvd: Callable[..., Any],
    prompts: list[str],
    tmp_path: Path,
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
    # Both ranks add the same texts between the same steps.
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(f"{json.dumps(reply)}\n" for reply in expected))
    server.flush_cache()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate_all, asked, concurrency=8, max_new_tokens=48)
        for _ in range(3):
            assert main(["warm", "--url", server.process.url, "--from", str(ids)]) == 0
        assert [answer["output_ids"] for answer in running.result()] == expected
    state = server.hvd_state()
    assert len([num for num in state["num_steps_by_width"].values() if num]) > 1
    assert state["costs"]["num_timed_steps"] > 20
    assert state["num_resyncs"] == 0
