"""What HVD leaves on SGLang's requests, by attributes that no other file names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def mark_held(req: Req, held: object) -> None:
    """The drafter knows this request; held: as what."""
    req._hvd_held = held


def is_held(req: Req) -> bool:
    """Whether the drafter has known this request, or one that it is a copy of."""
    return "_hvd_held" in req.__dict__


def held_of(req: Req) -> Any:
    """As what the drafter knows this request; None for a request that was never marked."""
    return req.__dict__.get("_hvd_held")


def leave_figures(req: Req, figures: dict[str, Any]) -> None:
    """The request has ended; figures: what its response shows."""
    req._hvd_figures = figures


def figures_of(req: Req) -> dict[str, Any] | None:
    """What the response shows; None for a request that has not ended, or had no decode step."""
    return req.__dict__.get("_hvd_figures")
