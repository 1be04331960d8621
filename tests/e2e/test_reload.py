"""A running server loads another predictor, and its clients do not notice."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.commands.running_server import reload_predictor
from sglang_hvd.demo.models import DemoModels
from sglang_hvd.payoff import AcceptancePredictor


@pytest.fixture
def server(start_hvd: Callable[..., Any]) -> Any:
    """Verifies many cache drafts."""
    return start_hvd("payoff", "--hvd-threshold", "1.5", "--enable-metrics")


@pytest.fixture
def other(models: DemoModels, tmp_path: Path) -> Path:
    """A predictor that expects less than the demo's."""
    demo = AcceptancePredictor.load(models.predictor)
    path = tmp_path / "other.safetensors"
    replace(demo, biases=(*demo.biases[:-1], demo.biases[-1] - 0.5)).save(path)
    return path


def _predictor_in_metrics(server: Any) -> list[str]:
    """Return the fingerprints that /metrics shows as in use."""
    pattern = r'^sglang:hvd_predictor\{.*fingerprint="(\w+)".*\} 1\.0$'
    return re.findall(pattern, server.process.get("/metrics"), re.MULTILINE)


def test_requests_that_run_during_a_reload_get_the_same_output(
    server: Any, models: DemoModels, other: Path, prompts: list[str]
) -> None:
    expected = [a["output_ids"] for a in server.generate_all(prompts, concurrency=1)]
    num_running = []
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.generate_all, prompts, concurrency=4)
        while not answers.done():
            for path in (models.predictor, other):
                assert reload_predictor(server.process.url, path) == f"the predictor is {path}"
                state = server.hvd_state()
                assert state["predictor"]["file"] == str(path)
                num_running.append(state["num_requests"])
    assert [a["output_ids"] for a in answers.result()] == expected
    assert max(num_running) > 1
    server.generate_all(prompts, concurrency=4)
    server.wait_until_idle()
    state = server.hvd_state()
    fingerprint = AcceptancePredictor.load(other).fingerprint
    assert state["predictor"]["fingerprint"] == fingerprint
    assert fingerprint in _predictor_in_metrics(server)
    calibration = state["predictor"]["calibration"]
    assert set(calibration) == {"prompt", "output", "shared"}
    assert sum(of_origin["num_verified"] for of_origin in calibration.values()) > 0
    of_model = state["predictor"]["model_drafter"]
    assert 0 <= of_model["mean_accepted"] <= 3
    assert of_model["num_verified"] > 0
    assert all(abs(of_origin["shift"]) <= 1 for of_origin in calibration.values())
    assert "Traceback" not in server.process.log


def test_a_corrupt_file_is_refused_and_the_old_predictor_serves_on(
    server: Any, models: DemoModels, other: Path, prompts: list[str]
) -> None:
    reload_predictor(server.process.url, models.predictor)
    expected = server.generate(prompts[0])["output_ids"]
    other.write_bytes(other.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"predictor {other} is corrupt or truncated") as error:
        reload_predictor(server.process.url, other)
    assert "\n" not in str(error.value)
    assert server.hvd_state()["predictor"]["file"] == str(models.predictor)
    assert server.generate(prompts[0])["output_ids"] == expected
    assert "Traceback" not in server.process.log
