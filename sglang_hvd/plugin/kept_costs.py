"""Tables of costs that were timed at an earlier start of the same server, on the same machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_hvd.allocation import StepCosts
from sglang_hvd.plugin.cost_profile import CostProfile
from sglang_hvd.plugin.entry import SUPPORTED_SGLANG

if TYPE_CHECKING:
    from sglang_hvd.plugin.algorithm import HvdLaunch
    from sglang_hvd.plugin.draft_worker import HvdDraftWorker

logger = logging.getLogger(__name__)


def profiled_costs(
    worker: HvdDraftWorker,
    launch: HvdLaunch,
    *,
    folder: Path,
    most_requests: int,
    ranks: torch.distributed.ProcessGroup | None,
    is_first_rank: bool,
) -> StepCosts:
    """The table that was kept, or one that is timed now and kept. All ranks call it and get that of
    the first; ranks: their group, None for a process that is alone.

    folder: of the kept tables. One that cannot be read or written is reported, and the table is
        timed.
    """
    path = folder / f"{_key(worker, launch, most_requests)}.yaml"
    kept = None
    if is_first_rank and launch.config.cost_profile == "kept" and path.is_file():
        try:
            kept = StepCosts.load(path)
        except ValueError as error:
            logger.warning("HVD: %s. Costs are timed anew.", error)
    text = _of_first_rank(None if kept is None else kept.to_yaml(), ranks)
    if text is not None:
        return StepCosts.from_yaml(text)
    profile = CostProfile(worker, widths=launch.widths, postpones=launch.postpones_extend)
    text = _of_first_rank(profile.table(most_requests).to_yaml(), ranks)
    assert text is not None
    if is_first_rank:
        _keep(path, text)
    return StepCosts.from_yaml(text)


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("HVD: cannot keep the table of costs in %s: %s", path.parent, error)


def _of_first_rank(text: str | None, ranks: torch.distributed.ProcessGroup | None) -> str | None:
    if ranks is None:
        return text
    texts = [text]
    torch.distributed.broadcast_object_list(texts, group=ranks, group_src=0)
    return texts[0]


def _key(worker: HvdDraftWorker, launch: HvdLaunch, most_requests: int) -> str:
    """Tells apart everything that changes what a step costs."""
    target, drafter = worker.target_worker.model_runner, worker.draft_runner
    facts: dict[str, Any] = {
        "sglang": SUPPORTED_SGLANG,
        "torch": torch.__version__,
        "target": target.model_config.hf_config.to_dict(),
        "drafter": drafter.model_config.hf_config.to_dict(),
        "quantization": target.model_config.quantization,
        "dtype": str(target.dtype),
        "tp_size": get_parallel().tp_size,
        "device": _device_name(worker.device),
        "attention": type(target.attn_backend).__name__,
        "has_graphs": target.decode_cuda_graph_runner is not None,
        "widths": launch.widths,
        "tree": [worker.speculative_num_steps, worker.topk, launch.num_model_nodes],
        "postpones_extend": launch.postpones_extend,
        "most_requests": most_requests,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{device}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
