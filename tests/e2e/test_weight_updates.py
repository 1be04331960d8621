"""A running server loads new weights for the target only; the draft model keeps its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sglang_hvd.demo.models import DemoModels
from tests.e2e.conftest import Server, StartServer


@pytest.fixture
def other_target(models: DemoModels, tmp_path: Path) -> Path:
    """The demo's target with slightly different weights."""
    folder = tmp_path / "other"
    shutil.copytree(models.target, folder)
    random = np.random.default_rng(0)
    [file] = folder.glob("*.safetensors")
    weights = {
        name: weight + 0.3 * weight.std() * random.standard_normal(weight.shape, np.float32)
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_weights_from_disk_are_the_targets(
    start_hvd: Callable[..., Server],
    start_server: StartServer,
    models: DemoModels,
    other_target: Path,
    prompts: list[str],
) -> None:
    def answers(server: Server) -> list[list[int]]:
        found = server.generate_all(prompts, concurrency=4, max_new_tokens=24)
        return [answer["output_ids"] for answer in found]

    def served(server: Server) -> tuple[list[list[int]], int]:
        """Return the answers, and how many tokens of the model drafter were accepted for them."""
        before = server.hvd_state()["num_accepted_drafts"]["model"]
        return answers(server), server.hvd_state()["num_accepted_drafts"]["model"] - before

    def update(server: Server, target: Path) -> None:
        # SGLang drops a request in the turn after its reply, and answers this one not earlier.
        # While a request is there, it updates the weights but refuses to flush.
        server.hvd_state()
        reply = server.process.post("/update_weights_from_disk", {"model_path": str(target)})
        assert reply["success"], reply
        # Text that the old weights generated is no draft any more.
        assert server.hvd_state()["num_shared_tokens"] == 0

    expected_of_other = answers(start_server("--model-path", str(other_target)))
    server = start_hvd("model")
    first, num_accepted = served(server)
    assert num_accepted > len(prompts)
    update(server, other_target)
    assert answers(server) == expected_of_other != first
    update(server, models.target)
    assert served(server) == (first, num_accepted)
