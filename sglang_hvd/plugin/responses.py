"""Per-request figures in every response: `meta_info["hvd"]`, one entry when the request ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_hvd.plugin.launch import launch_of
from sglang_hvd.plugin.request_marks import figures_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

META_INFO_KEY = "hvd"


class HvdOutputStreamer(SchedulerOutputStreamer):
    """Adds the figures of finished requests; SGLang carries them to the response's meta_info."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[Any]]]:
        """One list per request in `reqs`: empty until it finishes, then its figures."""
        return {META_INFO_KEY: [_figures(req) for req in reqs]}

    def is_request_level_customized_info_key(self, key: str) -> bool:
        """Our key is one value per request, not one per token."""
        return key == META_INFO_KEY


def stream_hvd_figures(
    get_output_streamer_class: Callable[[Scheduler], type[SchedulerOutputStreamer]],
    scheduler: Scheduler,
) -> type[SchedulerOutputStreamer]:
    """AROUND hook of Scheduler.get_output_streamer_class."""
    if launch_of(scheduler.server_args) is None:
        return get_output_streamer_class(scheduler)
    return HvdOutputStreamer


def _figures(req: Req) -> list[dict[str, Any]]:
    figures = figures_of(req)
    return [figures] if figures is not None and req.finished() else []
