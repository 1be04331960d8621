"""A user's mistake ends the launcher before it serves, with one clear line and an exit code."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import CPU_FLAGS, demo_environment, spawn
from tests.e2e.conftest import HANGS_AFTER_S
from tests.e2e.forked_server import Nursery


@pytest.fixture
def failed_launch(models: DemoModels, tmp_path: Path, nursery: Nursery) -> Callable[..., str]:
    """Run the launcher until it fails, and return what it printed.

    The launcher is forked (tests/e2e/forked_server.py), unless it should start as a user's does.
    """
    log = tmp_path / "launcher.log"

    def run(
        *flags: str,
        target: Path = models.target,
        environment: Mapping[str, str] | None = None,
        is_spawned: bool = False,
    ) -> str:
        command = [sys.executable, "-m", "sglang.launch_server", *CPU_FLAGS]
        command += ["--model-path", str(target), *flags]
        given = {**os.environ, **demo_environment(), **(environment or {})}
        with log.open("wb") as file:
            if is_spawned:
                process = spawn(command, given, file)
            else:
                process = nursery.launch(command, given, file)
            assert process.wait(timeout=HANGS_AFTER_S) != 0
        printed = log.read_text()
        assert "Uvicorn running" not in printed
        return printed

    return run


@pytest.fixture
def fails_with(models: DemoModels, failed_launch: Callable[..., str]) -> Callable[..., str]:
    """Run the launcher with HVD until it fails, and return its last line, the only error."""

    def run(*flags: str, drafter: Path | None = models.drafter, **settings: Any) -> str:
        printed = failed_launch(
            *("--speculative-algorithm", "HVD"),
            *(("--speculative-draft-model-path", str(drafter)) if drafter is not None else ()),
            *(*MODEL_TREE_FLAGS, *flags),
            **settings,
        )
        lines = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, printed[-3000:]
        assert "Traceback" not in printed
        assert "Load weight begin" not in printed
        assert printed.splitlines()[-1] == lines[0]
        return lines[0]

    return run


def test_an_unknown_policy(fails_with: Callable[..., str]) -> None:
    line = fails_with("--hvd-policy", "greedy", is_spawned=True)
    assert "--hvd-policy" in line
    assert "'payoff', 'frequency', 'cache', 'model' or 'both'" in line


def test_a_record_folder_that_cannot_be_written(
    fails_with: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("no folder")
    assert fails_with("--hvd-record", str(folder)) == (
        f"error: {folder}: cannot record there: File exists: choose another folder"
    )


def test_a_threshold_that_is_no_number(fails_with: Callable[..., str]) -> None:
    line = fails_with("--hvd-threshold", "high")
    assert "--hvd-threshold" in line
    assert "number" in line


def test_a_missing_predictor_file(fails_with: Callable[..., str]) -> None:
    assert "nowhere.safetensors" in fails_with("--hvd-predictor", "nowhere.safetensors")


def test_a_corrupt_predictor_file(
    fails_with: Callable[..., str], models: DemoModels, tmp_path: Path
) -> None:
    corrupt = tmp_path / "predictor.safetensors"
    corrupt.write_bytes(models.predictor.read_bytes()[:-100])
    assert str(corrupt) in fails_with("--hvd-predictor", str(corrupt))


def test_a_predictor_for_other_features(
    fails_with: Callable[..., str], models: DemoModels, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(models.predictor, "numpy") as original:
        metadata = dict(original.metadata())
        tensors = {name: original.get_tensor(name) for name in original.keys()}  # noqa: SIM118
    metadata["features"] = metadata["features"].replace("score", "luck", 1)
    other = tmp_path / "predictor.safetensors"
    save_file(tensors, other, metadata)
    line = fails_with("--hvd-predictor", str(other))
    assert str(other) in line
    assert "luck" in line


def test_yaml_with_an_unknown_key(fails_with: Callable[..., str], tmp_path: Path) -> None:
    config = tmp_path / "hvd.yaml"
    config.write_text("policy: cache\ncolour: red\n")
    line = fails_with("--hvd-config", str(config))
    assert str(config) in line
    assert "colour" in line


def _drafter_with(models: DemoModels, folder: Path, **settings: int) -> Path:
    """Copy the demo's drafter and change its config."""
    shutil.copytree(models.drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def test_a_draft_model_of_another_vocabulary(
    fails_with: Callable[..., str], models: DemoModels, tmp_path: Path
) -> None:
    line = fails_with(drafter=_drafter_with(models, tmp_path / "drafter", vocab_size=2112))
    assert "has a vocabulary of 2112 tokens, the target model 2048" in line


def test_a_draft_model_for_another_hidden_size(
    fails_with: Callable[..., str], models: DemoModels, tmp_path: Path
) -> None:
    line = fails_with(drafter=_drafter_with(models, tmp_path / "drafter", hidden_size=96))
    assert "made for a hidden size of 96, the target model has 128" in line


def test_a_draft_model_of_a_shorter_context(
    fails_with: Callable[..., str], models: DemoModels, tmp_path: Path
) -> None:
    drafter = _drafter_with(models, tmp_path / "drafter", max_position_embeddings=1024)
    line = fails_with(drafter=drafter)
    assert "made for contexts of 1024 tokens, the target model is served with 4096: add" in line


def test_an_attention_backend_that_cannot_verify_trees(fails_with: Callable[..., str]) -> None:
    line = fails_with("--attention-backend", "fa4")
    assert "HVD cannot verify trees (topk 4) on attention backend fa4" in line


def test_trees_where_output_must_be_deterministic(fails_with: Callable[..., str]) -> None:
    line = fails_with("--enable-deterministic-inference", "--attention-backend", "triton")
    assert "HVD verifies chains only, not --speculative-eagle-topk 4: use" in line


def test_a_verify_width_as_wide_as_the_context(fails_with: Callable[..., str]) -> None:
    line = fails_with("--hvd-verify-width", "4096", "--hvd-policy", "cache")
    assert "leaves nothing of the context of 4096 tokens" in line


def test_no_drafter_for_the_model(fails_with: Callable[..., str]) -> None:
    assert "--speculative-draft-model-path" in fails_with(drafter=None)


def test_a_draft_model_that_is_no_eagle3_drafter(
    fails_with: Callable[..., str], models: DemoModels
) -> None:
    assert "not an EAGLE3 drafter" in fails_with(drafter=models.target)


def test_more_draft_nodes_than_candidates(fails_with: Callable[..., str]) -> None:
    line = fails_with("--speculative-num-draft-tokens", "60")
    assert "37 with 3 steps and topk 4" in line


def test_a_verify_width_below_the_model_tree(fails_with: Callable[..., str]) -> None:
    assert "narrower" in fails_with("--hvd-verify-width", "8")


def test_a_verify_width_without_room_for_both_drafts(fails_with: Callable[..., str]) -> None:
    tree = MODEL_TREE_FLAGS[MODEL_TREE_FLAGS.index("--speculative-num-draft-tokens") + 1]
    line = fails_with("--hvd-policy", "both", "--hvd-verify-width", tree)
    assert "has no room for a cache draft next to the model drafter's tree" in line


def test_features_that_hvd_does_not_support(fails_with: Callable[..., str]) -> None:
    assert "--enable-mixed-chunk" in fails_with("--enable-mixed-chunk")


def test_adapters_with_graphs_for_each_width(fails_with: Callable[..., str]) -> None:
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj")
    line = fails_with("--attention-backend", "triton", "--hvd-set", "narrow_widths=[4]", *flags)
    assert "HVD does not support --hvd-set narrow_widths with LoRA" in line


# Flags, in addition to those of a server that starts, and what the line says.
WRONG = {
    "--speculative-num-draft-tokens 1": "drafts nothing: give at least 2",
    "--speculative-eagle-topk 0": "drafts nothing: give at least 1",
    "--speculative-num-steps 1 --speculative-eagle-topk 5000 --speculative-num-draft-tokens 8": (
        "5000 is more than the 1024 tokens that draft model"
    ),
    "--context-length 16": "--hvd-verify-width 32 leaves nothing of the context of 16 tokens",
    "--max-total-tokens 95": "--max-total-tokens 95 has no room for a request of 32 tokens and the",
    "--attention-backend fa3": "attention backend fa3 does not run on a CPU",
    "--attention-backend trtllm_mha": "refused by SGLang, ValueError: TRTLLM MHA backend",
    "--attention-backend flex_attention": "refused by SGLang, AssertionError: Speculative",
    "--speculative-draft-attention-backend flashinfer": "flashinfer does not run on a CPU",
    "--kv-cache-dtype fp8_e5m2": "a server on a CPU cannot have --kv-cache-dtype fp8_e5m2",
    "--quantization fp8": "--quantization fp8 needs activations of type bfloat16 or float16, not",
    "--speculative-draft-model-quantization fp8": "needs activations of type bfloat16 or float16",
    "--enable-torch-compile": "a server on a CPU cannot have --enable-torch-compile",
    "--enable-hierarchical-cache": "a server on a CPU cannot have --enable-hierarchical-cache",
    "--enable-lora": "error: ",
    "--speculative-draft-window-size 16": "cannot have --speculative-draft-window-size",
    "--tp-size 9": "9 ranks need as many NUMA nodes on a CPU",
    "--device toaster": "--device toaster: there is no such kind of device",
    "--device cuda": "torch finds no GPU",
    "--page-size 0": "refused by SGLang, ZeroDivisionError: ",
    "--chunked-prefill-size -1": "SGLang leaves a share of -",
    "--nnodes 2": "refused by SGLang, AssertionError: tp_size must be divisible",
    "--json-model-override-args {": "refused by SGLang, JSONDecodeError: Expecting property",
    "--hvd-set run_ahead=true": "--hvd-set run_ahead=true needs a verify width of 1, overlap",
    "--tokenizer-path /nowhere": "--tokenizer-path /nowhere: there is no such folder",
    "--model-path /nowhere": "--model-path /nowhere: there is no such folder",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_the_arguments_tell_ends_in_one_line(
    fails_with: Callable[..., str], flags: str
) -> None:
    assert WRONG[flags] in fails_with(*flags.split())


@pytest.mark.parametrize(
    "tree",
    [
        "--speculative-num-steps 3",
        "--speculative-eagle-topk 4",
        "--speculative-num-draft-tokens 8",
        "--speculative-num-steps 3 --speculative-eagle-topk 4",
    ],
)
def test_a_part_of_the_model_tree(
    failed_launch: Callable[..., str], models: DemoModels, tree: str
) -> None:
    drafter = ("--speculative-draft-model-path", str(models.drafter))
    printed = failed_launch("--speculative-algorithm", "HVD", *drafter, *tree.split())
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith(f"error: {tree} describes a part of the model draft")


def test_hvd_flags_without_hvd(failed_launch: Callable[..., str]) -> None:
    printed = failed_launch("--hvd-policy", "cache")
    assert "--hvd-policy given without --speculative-algorithm HVD" in printed


@pytest.mark.slow  # a process of its own loads SGLang without the plugin
def test_a_plugin_that_is_kept_out(failed_launch: Callable[..., str], models: DemoModels) -> None:
    # SGLang without the plugin knows neither the flags nor the algorithm.
    printed = failed_launch(
        *("--speculative-algorithm", "HVD"),
        *("--speculative-draft-model-path", str(models.drafter), *MODEL_TREE_FLAGS),
        environment={"SGLANG_PLUGINS": "sgl_kernel_cpu"},
    )
    assert "Unknown speculative algorithm name: HVD" in printed
