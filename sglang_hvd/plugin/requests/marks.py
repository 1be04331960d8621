"""The attributes that HVD sets on SGLang's requests. No other file names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def mark_held(req: Req, held: object) -> None:
    """Marks a request that the drafter knows. held: its state there."""
    req._hvd_held = held


def is_held(req: Req) -> bool:
    """Whether the drafter has known this request, or one that it is a copy of."""
    return "_hvd_held" in req.__dict__


def held_of(req: Req) -> Any:
    """The state of the request in the drafter; None for a request that was never marked."""
    return req.__dict__.get("_hvd_held")


def leave_figures(req: Req, figures: dict[str, Any]) -> None:
    """Leaves the figures of a request that has ended, for its response."""
    req._hvd_figures = figures


def figures_of(req: Req) -> dict[str, Any] | None:
    """The figures that the response shows; None before the request has ended, and for a request
    without a decode step."""
    return req.__dict__.get("_hvd_figures")
