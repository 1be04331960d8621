"""What a server with these flags would do: its flags are resolved as a start resolves them, and no
weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from rich.filesize import decimal
from safetensors import SafetensorError, safe_open
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view, resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.hf_transformers_utils import get_context_length

from sglang_hvd.config import CONFIG_ENV, HvdConfig
from sglang_hvd.payoff.predictor import predictor_file
from sglang_hvd.plugin.hooks.server_args import ALGORITHM_NAME, config_of, refusals_of
from sglang_hvd.plugin.startup.environment import Finding, Section, Status, quiet
from sglang_hvd.plugin.startup.launch import HvdLaunch, launch_of
from sglang_hvd.plugin.startup.memory_needs import (
    are_loaded_as_stored,
    graph_bytes,
    kv_bytes,
    memory_bytes,
)
from sglang_hvd.plugin.startup.refusals import draft_config, draft_context_len, target_config
from sglang_hvd.plugin.startup.verify_widths import slots_ahead
from sglang_hvd.plugin.startup.weight_files import weight_bytes

# What a resolution reads of a model; no weights, and no tokenizer.
_CONFIG_FILES = ["config.json", "generation_config.json", "hf_quant_config.json", "*.py"]


@dataclass
class Examination:
    """What was found of a launch.

    figures: the numbers among the findings, for scripts; empty if the flags were not resolved.
    """

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, section: Section, topic: str, text: str, status: Status = "ok") -> None:
        self.findings.append(Finding(section, topic, " ".join(text.split()), status))


def examine_launch(flags: Sequence[str]) -> Examination:
    """Examines the flags of `python -m sglang.launch_server`.

    Raises ValueError, in one line, for flags that SGLang does not know or cannot read.
    """
    found = Examination()
    with quiet() as records:
        args = _parsed(flags)
        local = dict(_local_folders(args, found))
        if any(finding.status == "fault" for finding in found.findings):
            return found
        _examine_models(_parsed(flags, local), found)
        config = _examine_config(_parsed(flags, local), found)
        if config is not None and not any(f.status == "fault" for f in found.findings):
            _examine_resolved(_parsed(flags, local), found, named=set(local.values()))
    for text in dict.fromkeys(record.getMessage() for record in records):
        found.add("launch", "warning", text.removeprefix("HVD: "), "note")
    # The user gave the names of models, not the folders of their configs.
    for name, folder in local.items():
        found.findings = [_renamed(finding, folder, name) for finding in found.findings]
    return found


def _parsed(flags: Sequence[str], local: Mapping[str, str] | None = None) -> ServerArgs:
    """The record of the flags, not resolved yet.

    local: model name -> folder that has its config.
    """
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            args = prepare_server_args([*flags])
    except SystemExit:
        # argparse prints the usage, and then the error in one line.
        *_, last = errors.getvalue().splitlines() or ["SGLang cannot read these flags"]
        raise ValueError(last.partition("error: ")[2] or last) from None
    name = (args.speculative_algorithm or "").upper()
    if name != ALGORITHM_NAME:
        raise ValueError(f"doctor examines --speculative-algorithm HVD, got {name}: leave it out")
    for field_name in ("model_path", "speculative_draft_model_path"):
        given = getattr(args, field_name)
        setattr(args, field_name, (local or {}).get(given, given))
    return args


def _local_folders(args: ServerArgs, found: Examination) -> Iterator[tuple[str, str]]:
    """Model name -> folder with its config, of the models that are named and not folders. What a
    model hub has and this machine lacks is downloaded, if it can be reached; weights are not."""
    cfg = resolving_view(args)
    named = (
        ("target model", cfg.model_path, cfg.revision),
        ("drafter", cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision),
    )
    for topic, name, revision in named:
        if name is None or Path(name).exists() or envs.SGLANG_USE_MODELSCOPE.get():
            continue
        try:
            yield name, snapshot_download(name, revision=revision, allow_patterns=_CONFIG_FILES)
        except HFValidationError:
            found.add("models", topic, f"there is no folder {name}: give one that exists", "fault")
        except (OSError, HfHubHTTPError) as error:
            reason = str(error).splitlines()[0].removeprefix("Got: ")
            found.add(
                "models",
                topic,
                f"{name} is neither a folder nor in this machine's cache, and cannot be looked up "
                f"({reason}): give a folder, or download it",
                "fault",
            )


def _examine_models(args: ServerArgs, found: Examination) -> None:
    cfg = resolving_view(args)
    try:
        target = target_config(cfg)
        found.add("models", "target model", f"{cfg.model_path}: {_shape(target)}")
        if cfg.speculative_draft_model_path is None:
            return
        draft = draft_config(cfg)
    except ValueError as error:
        found.add("models", "config", str(error), "fault")
        return
    found.add("models", "drafter", f"{cfg.speculative_draft_model_path}: {_shape(draft)}")
    num_drafted = draft.to_dict().get("draft_vocab_size") or draft.vocab_size
    if num_drafted != draft.vocab_size:
        text, status = _vocabulary_map(Path(cfg.speculative_draft_model_path), num_drafted)
        text = f"{num_drafted:,} of the {draft.vocab_size:,} tokens are drafted; {text}"
        found.add("models", "draft vocabulary", text, status)


def _shape(config: Any) -> str:
    text_config = config.get_text_config()
    num_layers = text_config.num_hidden_layers
    return (
        f"{', '.join(config.architectures or ['no named architecture'])}, "
        f"{num_layers} layer{'s'[: num_layers > 1]}, hidden size {text_config.hidden_size:,}, "
        f"vocabulary {text_config.vocab_size:,}, context {get_context_length(text_config):,}"
    )


def _vocabulary_map(folder: Path, num_drafted: int) -> tuple[str, Status]:
    """What the headers of the drafter's weights tell of its map to the target's vocabulary."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return "the map (d2t) is in its weights, which are not looked at", "ok"
    try:
        shapes = [
            weights.get_slice(name).get_shape()
            for file in files
            for weights in [safe_open(file, "numpy")]
            for name in weights.keys()  # noqa: SIM118
            if "d2t" in name
        ]
    except (OSError, SafetensorError) as error:
        return f"its weights cannot be read ({error}): download them again", "fault"
    if shapes != [[num_drafted]]:
        what = f"its map (d2t) has the shape {shapes[0]}" if shapes else "its weights have no map"
        return f"{what}, so that wrong tokens would be drafted: use another drafter", "fault"
    return "its weights have the map (d2t)", "ok"


def _examine_config(args: ServerArgs, found: Examination) -> HvdConfig | None:
    try:
        config = config_of(args)
    except ValueError as error:
        found.add("launch", "settings", str(error), "fault")
        return None
    for refusal in refusals_of(config, resolving_view(args)):
        found.add("launch", "refused", str(refusal), "fault")
    if not config.predicts:
        found.add("files", "predictor", f"none: policy {config.policy} predicts nothing")
    else:
        found.add("files", "predictor", str(predictor_file(config)))
    if config.costs is not None:
        found.add("files", "costs", f"{config.costs}, used unchanged")
    if os.environ.get(CONFIG_ENV):
        found.add("files", "settings", f"{CONFIG_ENV}={os.environ[CONFIG_ENV]}", "note")
    recorded = "nothing is recorded" if config.record is None else f"{config.record} can be written"
    found.add("files", "recordings", recorded)
    return config


def _examine_resolved(args: ServerArgs, found: Examination, *, named: Set[str]) -> None:
    """named: folders of models that the flags name, whose weights a start downloads."""
    try:
        args.resolve_once()
        cfg = resolved_view(args)
        target = model_config_of(cfg)
        draft = ModelConfig.from_server_args(
            args,
            model_path=cfg.speculative_draft_model_path,
            model_revision=cfg.speculative_draft_model_revision,
            is_draft_model=True,
            context_length=target.context_len,
        )
    except SystemExit as error:
        found.add(
            "launch",
            "refused",
            str(error).removeprefix("error: ").removeprefix("refused "),
            "fault",
        )
        return
    except Exception as error:  # noqa: BLE001, SGLang refuses by errors of every type
        text = f"by SGLang, {type(error).__name__}: {error}"
        found.add("launch", "refused", text, "fault")
        return
    launch = launch_of(args)
    assert launch is not None, "the flags were resolved without HVD"
    if cfg.device.startswith("cuda") and not torch.cuda.is_available():
        text = f"torch finds no GPU, and the device is {cfg.device}: serve on a machine with one"
        found.add("launch", "device", text, "fault")
    _describe_launch(launch, cfg, found)
    made_for = draft_context_len(cfg)
    if made_for < target.context_len:
        text = (
            f"the drafter was made for {made_for:,} tokens, and the environment lets it draft "
            "beyond them"
        )
        found.add("models", "drafter's context", text, "note")
    num_bytes = _examine_weights(cfg, (target, draft), found, named=named)
    slots = slots_ahead(launch.widths.widest, cfg)
    slot_bytes = sum(kv_bytes(model, cfg) for model in (target, draft))
    found.add("launch", "context", f"{target.context_len:,} tokens, all usable")
    found.add(
        "launch",
        "KV cache",
        f"each running request reserves {slots} slots of {decimal(slot_bytes)} (of both models), "
        f"{decimal(slots * slot_bytes)} in all",
    )
    found.figures = {
        "policy": launch.config.policy,
        "attention_backends": sorted(launch.attention.backends),
        "may_branch": launch.attention.may_branch(cfg.speculative_eagle_topk),
        "model_tree_width": launch.model_tree_width,
        "verify_widths": list(launch.widths.values),
        "verify_width": launch.widths.base,
        "context_len": target.context_len,
        "kv_slots_per_request": slots,
        "kv_bytes_per_slot": slot_bytes,
        "weight_bytes": num_bytes,
    }


def _examine_weights(
    cfg: Any, models: Sequence[ModelConfig], found: Examination, *, named: Set[str]
) -> int | None:
    """Compares the sizes of the files with the memory that there is. Returns the sum of the sizes;
    None if it is not known."""
    formats = (cfg.load_format, cfg.speculative_draft_load_format or cfg.load_format)
    sizes: list[int] = []
    for model, load_format in zip(models, formats, strict=True):
        folder = model.model_path
        try:
            num_bytes = weight_bytes(Path(folder), load_format)
        except ValueError as error:
            if folder not in named or constants.HF_HUB_OFFLINE:
                found.add("models", "weights", str(error), "fault")
            else:
                text = f"{folder}: not all are on this machine; the start downloads them"
                found.add("models", "weights", text, "note")
            continue
        if num_bytes is None:
            text = f"{folder}: not looked at, load format {load_format}"
            found.add("models", "weights", text, "note")
        else:
            sizes.append(num_bytes)
    if len(sizes) < len(models):
        return None
    num_ranks = 1 if cfg.device == "cpu" else cfg.tp_size * cfg.pp_size
    share, memory = sum(sizes) // num_ranks, memory_bytes(cfg)
    text = f"files of {decimal(sum(sizes))}, of both models"
    if num_ranks > 1:
        text += f", {decimal(share)} on each of {num_ranks} GPUs"
    status: Status = "note"
    if memory is not None:
        text += f"; {'the machine' if cfg.device == 'cpu' else 'a GPU'} has {decimal(memory)}"
        if cfg.device != "cpu" and share > memory and are_loaded_as_stored(cfg, models):
            text += ": use more GPUs (--tp-size) or a quantized model"
            status = "fault"
    found.add("launch", "weights", text, status)
    return sum(sizes)


def _describe_launch(launch: HvdLaunch, cfg: Any, found: Examination) -> None:
    backends = " and ".join(sorted(launch.attention.backends))
    shapes = (
        "trees and chains" if launch.attention.may_branch(cfg.speculative_eagle_topk) else "chains"
    )
    found.add("launch", "attention", f"{backends} on {cfg.device}, verifies {shapes}")
    found.add(
        "launch",
        "model drafter",
        f"{cfg.speculative_num_steps} steps, topk {cfg.speculative_eagle_topk}, tree of "
        f"{launch.model_tree_width} nodes",
    )
    widths = launch.widths
    text = f"policy {launch.config.policy}: at most {widths.base} nodes per request"
    if widths.widest > widths.base:
        text += f", {widths.widest} in steps of one or two requests"
    narrower = [str(width) for width in widths.values if width < widths.base]
    if narrower:
        text += f"; also {', '.join(narrower)}"
    found.add("launch", "verify widths", text)
    if launch.has_width_states:
        text = (
            "each width takes GPU memory for its attention backends and graphs; the start measures "
            "it, and leaves out widths for which --mem-fraction-static leaves too little"
        )
        num_bytes = graph_bytes(launch, cfg)
        if num_bytes:
            text += f"; FlashInfer's index and mask buffers take about {decimal(num_bytes)} of it"
        found.add("launch", "memory", text, "note")


def _renamed(finding: Finding, folder: str, name: str) -> Finding:
    return replace(finding, text=finding.text.replace(folder, name))
