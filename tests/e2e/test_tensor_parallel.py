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
MIXED: list[dict[str, Any]] = [
    *({"frequency_penalty": 0.6}, {"repetition_penalty": 1.2, "min_new_tokens": 20}),
    *({"logit_bias": {"9": 2.0}}, {"custom_params": {"hvd": "off"}}, {"presence_penalty": 0.9}),
    *({"temperature": 1.0, "min_p": 0.1}, {"temperature": 1.3}, {"temperature": 0.7, "top_k": 5}),
]


@pytest.mark.parametrize("is_spawned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_generate_what_plain_serving_does(
    is_spawned: bool,
    start_server: Callable[..., Any],
    start_hvd: Callable[..., Any],
    prompts: list[str],
    tmp_path: Path,
) -> None:
    asked = prompts[:8]
    # With overlap plain serving's penalties come one token late.
    plain = start_server("--tp-size", "2", "--disable-overlap-schedule", environment=TWO_RANKS)
    expected = [plain.generate(prompt, max_new_tokens=48)["output_ids"] for prompt in asked]
    # The ranks time their steps differently. If they decided differently, they would add up
    # different nodes, or one would wait forever.
    server = start_hvd("allocate", "--tp-size", "2", environment=TWO_RANKS, is_spawned=is_spawned)
    for concurrency in (1, 8):
        server.flush_cache()
        answers = server.generate_all(asked, concurrency=concurrency, max_new_tokens=48)
        assert [answer["output_ids"] for answer in answers] == expected
    # Requests that sample, whose tokens one rank decides for both, among those that do not.
    mixed = list(zip(asked, MIXED, strict=True))
    expected_of = [plain.generate(prompt, max_new_tokens=48, **params) for prompt, params in mixed]
    with ThreadPoolExecutor(len(mixed)) as pool:
        found = list(
            pool.map(lambda one: server.generate(one[0], max_new_tokens=48, **one[1]), mixed)
        )
    for (_, params), one, other in zip(mixed, expected_of, found, strict=True):
        assert "temperature" in params or one["output_ids"] == other["output_ids"]
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
