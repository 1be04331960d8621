"""Weights that a running server is sent are the target model's.

SGLang loads them into the draft model, too, unless a request names one of the two. An EAGLE3
drafter has other weights, of which some have the target's names: those of another shape, as the
head of a smaller vocabulary, end the server, and others, as its last norm, would replace its own.
Its embedding is the target's, and follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sglang_hvd.plugin.hooks.scheduler_events import worker_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        UpdateWeightsFromDistributedReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    _Request = TypeVar(
        "_Request", UpdateWeightsFromDistributedReqInput, UpdateWeightsFromTensorReqInput
    )


def select_target(
    select_runners: Callable[..., list[tuple[str, Any]]],
    manager: SchedulerWeightUpdaterManager,
    selector: str | None = None,
) -> list[tuple[str, Any]]:
    """AROUND hook of SchedulerWeightUpdaterManager._select_runners. Updates whose requests name no
    model, from disk and by IPC, give it no selector."""
    if selector is None:
        selector = "target" if _has_hvd(manager) else "all"
    return select_runners(manager, selector)


def send_to_target(
    update: Callable[..., Any], manager: SchedulerWeightUpdaterManager, request: _Request
) -> Any:
    """AROUND hook of SchedulerWeightUpdaterManager.update_weights_from_tensor, and
    .update_weights_from_distributed. A request that names no model has the selector "all"."""
    if request.selector == "all" and _has_hvd(manager):
        request = msgspec.structs.replace(request, selector="target")
    return update(manager, request)


def _has_hvd(manager: SchedulerWeightUpdaterManager) -> bool:
    return manager.scheduler is not None and worker_of(manager.scheduler) is not None
