"""What HVD is doing, in `/server_info`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_hvd.plugin.scheduler_events import worker_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )


def add_hvd_state(
    output: GetInternalStateReqOutput, controller: SchedulerInternalStateController, _request: Any
) -> None:
    """AFTER hook of get_internal_state: `/server_info` -> internal_states[rank]["hvd"]."""
    worker = worker_of(controller.scheduler)
    if worker is not None:
        output.internal_state["hvd"] = worker.describe()
