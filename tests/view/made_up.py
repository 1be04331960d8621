"""Cycles that no server ran."""

from __future__ import annotations

from typing import Any

from sglang_hvd.view.cycles import Cycle, CycleSource


def cycle(at: int, source: CycleSource = "plain", accepted: int = 0, **given: Any) -> Cycle:
    """A cycle whose draft was as long as what was accepted, unless more is given."""
    with_cache, with_model = source in ("cache", "both"), source in ("model", "both")
    values: dict[str, Any] = {
        "origin": "prompt" if with_cache else None,
        "match": 5 if with_cache else None,
        "found": accepted if with_cache else 0,
        "cache": accepted if with_cache else 0,
        "model": 15 if with_model else 0,
        "steps": 3 if with_model else 0,
        "cache_right": accepted if with_cache else None,
        "model_right": accepted if with_model else None,
        "expected": 2.5 if source != "plain" else 0.0,
        "if_cache": 2.5 if with_cache else None,
        "if_model": 1.25,
        "if_both": 2.75 if with_cache else None,
        "width": 16,
        "requests": 1,
        "ms": 10.0,
    }
    return Cycle(at=at, source=source, accepted=accepted, **{**values, **given})
