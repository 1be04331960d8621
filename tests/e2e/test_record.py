"""A server with --hvd-record keeps what its clients saw."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import CPU_FLAGS, SglangServer, demo_environment
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.recording_folder import recordings, salvage
from sglang_hvd.traces.tokenizer_json import load_tokenizer
from tests.e2e.conftest import HANGS_AFTER_S
from tests.e2e.forked_server import PROJECT_FIRST, Nursery

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9}

Row = tuple[list[int], list[int], dict[str, float]]


@pytest.fixture
def server(models: DemoModels, nursery: Nursery, tmp_path: Path) -> SglangServer:
    """A server that records into tmp_path / "recorded".

    The test enters it, and reads the recording after it has ended.
    """
    return SglangServer(
        [
            *("--model-path", str(models.target), *CPU_FLAGS),
            *("--speculative-algorithm", "HVD", "--hvd-predictor", str(models.predictor)),
            *("--speculative-draft-model-path", str(models.drafter), *MODEL_TREE_FLAGS),
            *("--served-model-name", "demo", "--skip-server-warmup"),
            *("--hvd-record", str(tmp_path / "recorded"), "--hvd-set", "cost_profile=skip"),
            "--enable-metrics",
        ],
        log_file=tmp_path / "server.log",
        environment={**demo_environment(), **PROJECT_FIRST},
        timeout_s=HANGS_AFTER_S,
        launch=nursery.launch,
    )


def wait_until_recorded(server: SglangServer, num_requests: int) -> None:
    """Wait until the server has written so many requests."""

    def stats() -> dict[str, Any]:
        return server.get("/server_info")["internal_states"][0]["hvd"]["recorder"]

    deadline = time.monotonic() + HANGS_AFTER_S
    while (found := stats())["num_recorded"] < num_requests:
        assert time.monotonic() < deadline, f"recorded only {found}"
        time.sleep(0.1)
    assert found == {"num_recorded": num_requests, "num_dropped": 0, "last_error": None}


def test_recordings_hold_what_clients_saw(
    server: SglangServer, models: DemoModels, prompts: list[str], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(models.target / "tokenizer.json")
    seen: list[Row] = []

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def ask(
        prompt: list[int],
        sampling: dict[str, float] = GREEDY,
        salt: str | None = None,
        **params: Any,
    ) -> list[int]:
        sampling_params = {"max_new_tokens": 60, **sampling, **params}
        body = {"input_ids": prompt, "sampling_params": sampling_params, "cache_salt": salt}
        output: list[int] = server.post("/generate", body)["output_ids"]
        seen.append((prompt, output, sampling))
        return output

    with server:
        first = ids(prompts[0])
        output = ask(first)
        goes_on = [*first, *output, *ids("<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n")]
        ask(goes_on)
        ask(ids(prompts[2]), SAMPLED)
        ask(ids(prompts[4]), stop_token_ids=output[5:8])
        ask(goes_on, salt="a tenant")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, [ids(prompt) for prompt in prompts[5:9]]))
        wait_until_recorded(server, len(seen))
    salvage(tmp_path / "recorded")  # as the next server does where this one was killed
    [path] = recordings(tmp_path / "recorded")
    traces = list(read_traces(path, tokenizer))  # refuses another tokenizer's
    rows: list[Row] = [
        (trace.prompt_ids.tolist(), trace.output_ids.tolist(), dict(trace.sampling))
        for trace in traces
    ]
    # Requests that ran at the same time may have ended in any order.
    assert sorted(rows, key=repr) == sorted(seen, key=repr)
    assert {trace.model for trace in traces} == {"demo"}
    assert [trace.turn for trace in traces[:2]] == [0, 1]
    assert traces[0].session == traces[1].session != traces[2].session
    # Another tenant's text does not continue this session.
    assert {trace.namespace for trace in traces[:4]} == {""}
    assert re.fullmatch(r"[0-9a-f]{16}", traces[4].namespace)
    assert traces[4].session != traces[0].session
