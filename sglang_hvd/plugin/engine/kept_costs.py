"""Keeps the table of costs that a server timed for its next start on the same machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.fields.exec_ import ExecComm, ExecDeterministic, ExecKernel, ExecMoe
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.costs import StepCosts
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.cost_profile import CostProfile
from sglang_hvd.plugin.startup.supported import SUPPORTED_SGLANG
from sglang_hvd.whole_file import write_whole

if TYPE_CHECKING:
    from sglang_hvd.plugin.engine.draft_worker import HvdDraftWorker
    from sglang_hvd.plugin.engine.states.step_states import StepStates

logger = logging.getLogger(__name__)

# The version of the profile. A table of another version is not used.
_PROFILE = 8


def profiled_costs(
    draft_worker: HvdDraftWorker,
    states: StepStates,
    *,
    model_tree_width: int,
    draft_extend: DraftExtend,
    use_kept: bool,
    folder: Path | None,
    max_requests: int,
    ranks: RankGroup,
) -> StepCosts:
    """The table that was kept, or one that is timed now and kept. All ranks call this and get the
    table of the first rank.

    model_tree_width: of the launch.
    use_kept: a kept table may be used.
    folder: holds the kept tables; None: none is kept. A table that cannot be read is reported and
        timed again. One that cannot be written is reported.
    """
    widths = states.widths
    tree = [states.of_draft_steps.num_steps, draft_worker.topk, model_tree_width]
    is_postponed = draft_extend is DraftExtend.WHEN_DRAFTING
    host_plans = [states.has_host_plans, envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR.get()]
    steps = [list(widths.values), widths.base, tree, is_postponed, host_plans, max_requests]
    key = _key(draft_worker, steps)
    path = None if folder is None else folder / f"{key}.yaml"
    kept = None
    # Path.is_file would raise for a home that this user may not enter.
    if ranks.is_first and use_kept and path is not None and os.path.isfile(path):
        try:
            kept = StepCosts.load(path)
        except ValueError as error:
            logger.warning("HVD: %s. Costs are timed again.", error)
    text = ranks.of_first(None if kept is None else kept.to_yaml())
    if text is not None:
        return StepCosts.from_yaml(text)
    profile = CostProfile(draft_worker, states, draft_extend)
    text = ranks.of_first(profile.table(max_requests).to_yaml())
    if ranks.is_first and path is not None:
        _keep(path, text)
    return StepCosts.from_yaml(text)


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except (OSError, ValueError) as error:
        logger.warning("HVD: cannot keep the table of costs: %s", error)


def _key(draft_worker: HvdDraftWorker, steps: list[Any]) -> str:
    """A digest of everything that changes the costs of a step between servers or machines."""
    target, draft_runner = draft_worker.target_worker.model_runner, draft_worker.draft_runner
    graphs = target.decode_cuda_graph_runner
    settings, speculation, parallel = get_exec(), get_spec(), get_parallel()
    facts: dict[str, Any] = {
        "profile": _PROFILE,
        "sglang": SUPPORTED_SGLANG,
        "torch": torch.__version__,
        "target": target.model_config.hf_config.to_dict(),
        "drafter": draft_runner.model_config.hf_config.to_dict(),
        "quantization": [runner.model_config.quantization for runner in (target, draft_runner)],
        "dtype": [str(runner.dtype) for runner in (target, draft_runner)],
        "kv_cache_dtype": str(target.kv_cache_dtype),
        "has_lora": target.lora_manager is not None,
        "ranks": [parallel.tp_size, parallel.moe_ep_size, parallel.nnodes],
        "device": _device_name(draft_worker.device),
        # By their names: one class stands for each pair of backends, and for two versions of FA.
        "attention": [
            [runner.prefill_attention_backend_str, runner.decode_attention_backend_str]
            for runner in (target, draft_runner)
        ],
        "verifies_as": speculation.speculative_attention_mode,
        "page_size": target.page_size,
        "kernels": [
            {name: getattr(chosen, name) for name in names.__struct_fields__}
            for chosen, names in (
                (settings.kernel, ExecKernel),
                (settings.moe, ExecMoe),
                (settings.comm, ExecComm),
                (settings.deterministic, ExecDeterministic),
            )
        ],
        "experts_of_drafter": speculation.speculative_moe_runner_backend,
        "is_compiled": settings.graph.enable_torch_compile,
        "graphs": None if graphs is None else list(graphs.capture_bs),
        "steps": steps,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        model = next((line.strip() for line in lines if line.startswith("model name")), model)
    return f"{device}, {model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
