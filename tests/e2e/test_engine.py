"""`sgl.Engine` has no flags: HVD_CONFIG names a YAML file instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hvd.demo.server import demo_environment
from tests.e2e.conftest import HANGS_AFTER_S

OPERATE_PAGE = Path(__file__).parents[2] / "docs" / "operate.md"

PROGRAM = """
import json, sys
import sglang as sgl

if __name__ == "__main__":
    target, drafter, prompts = json.load(sys.stdin)
    engine = sgl.Engine(
        model_path=target,
        speculative_algorithm="HVD",
        speculative_draft_model_path=drafter,
        speculative_num_steps=3,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=16,
        device="cpu",
        mem_fraction_static=0.1,
    )
    answers = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 96})
    state = engine.get_server_info()["internal_states"][0]["hvd"]
    json.dump([[a["output_ids"] for a in answers], state], open(sys.argv[1], "w"))
    engine.shutdown()
"""


def _run(models: Any, prompts: list[str], folder: Path, config: str) -> Any:
    (folder / "hvd.yaml").write_text(config)
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(folder / "program.py"), str(folder / "answers.json")],
        input=json.dumps([str(models.target), str(models.drafter), prompts]),
        env={**os.environ, **demo_environment(), "HVD_CONFIG": str(folder / "hvd.yaml")},
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        check=False,
    )


def test_an_engine_takes_its_settings_from_the_file(
    models: Any, prompts: list[str], plain_ids: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    expected = plain_ids(prompts)
    done = _run(models, prompts, tmp_path, "policy: cache\nmax_draft_tokens: 20\n")
    assert done.returncode == 0, done.stderr[-3000:]
    output_ids, state = json.loads((tmp_path / "answers.json").read_text())
    assert output_ids == expected
    page = OPERATE_PAGE.read_text()
    assert [key for key in state if f"`{key}`" not in page] == []
    assert state["config"]["policy"] == "cache"
    assert state["verify_width"] == 21
    assert state["num_cycles"]["cache"] > 0
    assert state["num_model_draft_rounds"] == 0


def test_a_mistake_in_the_file_raises_before_the_engine_starts(
    models: Any, prompts: list[str], tmp_path: Path
) -> None:
    done = _run(models, prompts, tmp_path, "policy: cash\n")
    assert done.returncode != 0
    assert "hvd.yaml: policy" in done.stderr
    assert "ValueError" in done.stderr
