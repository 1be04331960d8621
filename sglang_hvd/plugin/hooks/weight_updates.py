"""Sends weight updates to the target model only.

SGLang loads updated weights into the draft model too, unless the request names one of the models.
An EAGLE3 drafter has different weights, some under the same names: a weight of another shape, such
as the head of a smaller vocabulary, would end the server, and others, such as the last norm, would
be overwritten. The drafter's embedding is shared with the target and follows it.
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
    """AROUND hook of SchedulerWeightUpdaterManager._select_runners. Updates from disk and by IPC
    pass no selector if the request names no model."""
    if selector is None:
        selector = "target" if _has_hvd(manager) else "all"
    return select_runners(manager, selector)


def send_to_target(
    update: Callable[..., Any], manager: SchedulerWeightUpdaterManager, request: _Request
) -> Any:
    """AROUND hook of SchedulerWeightUpdaterManager.update_weights_from_tensor and
    .update_weights_from_distributed. Here a request that names no model has the selector "all"."""
    if request.selector == "all" and _has_hvd(manager):
        request = msgspec.structs.replace(request, selector="target")
    return update(manager, request)


def _has_hvd(manager: SchedulerWeightUpdaterManager) -> bool:
    return manager.scheduler is not None and worker_of(manager.scheduler) is not None
