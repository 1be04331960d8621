"""Replaces the payoff predictor of a running server, and gives orders to its shared cache:
`/update_weights_from_disk` with one of our load formats.

SGLang's own handling of that request waits until no request runs. Ours uses a control request,
which the scheduler answers between two steps, and between the same two steps on every
tensor-parallel rank. The dumper's control request is the one that carries any text and answers with
a reason. SGLang has asked for its admin key by then.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import DumperControlReqInput, DumperControlReqOutput

from sglang_hvd.config import PREDICTOR_LOAD_FORMAT
from sglang_hvd.plugin.hooks.scheduler_events import worker_of
from sglang_hvd.plugin.startup.launch import HvdLaunch, launch_of
from sglang_hvd.suffix_cache.orders import CACHE_LOAD_FORMAT, read_order

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_SEVERAL_WIDTHS = (
    "HVD cannot recapture graphs of several verify widths: start with --hvd-set narrow_widths=[] "
    "and without --hvd-set wide_width"
)
_HOST_PLANS = (
    "HVD cannot recapture graphs with FlashInfer, because it makes FlashInfer's plans on the host: "
    "leave out recapture_cuda_graph, or start with SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN=0 or "
    "another attention backend"
)


async def ask_schedulers(
    update_weights_from_disk: Callable[..., Awaitable[tuple[bool, str, Any]]],
    manager: TokenizerManager,
    obj: UpdateWeightFromDiskReqInput,
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, str, Any]:
    """AROUND hook of TokenizerManager.update_weights_from_disk: success, message, paused."""
    if obj.load_format == CACHE_LOAD_FORMAT:
        body = obj.manifest or {}
    elif obj.load_format == PREDICTOR_LOAD_FORMAT:
        body = {"path": obj.model_path}
    else:
        launch = launch_of(manager.server_args)
        fault = None if launch is None else _update_fault(launch, obj)
        if fault is not None:
            return False, fault, 0
        return await update_weights_from_disk(manager, obj, *args, **kwargs)
    request = DumperControlReqInput(method=obj.load_format, body=body)
    answers = await manager.dumper_control(request)
    # One answer per data-parallel group; each group has its own traffic, predictor and cache.
    faults = [answer.error for answer in answers if not answer.success]
    if faults:
        return False, "; ".join(dict.fromkeys(faults)), 0
    if obj.load_format == CACHE_LOAD_FORMAT:
        return True, json.dumps([said for answer in answers for said in answer.response]), 0
    return True, f"the predictor is {obj.model_path}", 0


def answer_order(
    handle_dumper_control: Callable[..., None], scheduler: Scheduler, request: DumperControlReqInput
) -> DumperControlReqOutput | None:
    """AROUND hook of Scheduler.handle_dumper_control; the return value is the answer."""
    if request.method not in (PREDICTOR_LOAD_FORMAT, CACHE_LOAD_FORMAT):
        handle_dumper_control(scheduler, request)
        return None
    worker = worker_of(scheduler)
    try:
        if worker is None:
            raise ValueError("this server does not run HVD")
        if request.method == CACHE_LOAD_FORMAT:
            said = worker.control_cache(read_order(request.body))
            return DumperControlReqOutput(success=True, response=[said])
        path = request.body.get("path")
        if not isinstance(path, str):
            raise ValueError("the request does not name the path of a predictor")
        worker.use_predictor(Path(path))
    except ValueError as error:
        return DumperControlReqOutput(success=False, response=[], error=str(error))
    return DumperControlReqOutput(success=True, response=[])


def _update_fault(launch: HvdLaunch, obj: UpdateWeightFromDiskReqInput) -> str | None:
    """Why the weights cannot be updated so; None if they may be."""
    formats = [each.value for each in LoadFormat]
    if obj.load_format is not None and obj.load_format.lower() not in formats:  # ends SGLang
        return f"there is no load_format {obj.load_format!r}: give one of {', '.join(formats)}"
    return _recapture_fault(launch) if obj.recapture_cuda_graph else None


def _recapture_fault(launch: HvdLaunch) -> str | None:
    """Why graphs cannot be captured again; None if they can."""
    if launch.has_width_states:
        return _SEVERAL_WIDTHS
    # New graphs would have FlashInfer's own plans (see device/flashinfer_plans.py).
    plans_on_host = envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN
    is_off = plans_on_host.is_set() and not plans_on_host.get()
    return _HOST_PLANS if "flashinfer" in launch.attention.backends and not is_off else None
