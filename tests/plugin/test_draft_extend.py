"""When a server runs draft-extend."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.draft_extend import DraftExtend, draft_extend_of


@pytest.mark.parametrize(
    ("settings", "device", "has_mrope", "expected"),
    [
        ({}, "cpu", False, DraftExtend.WHEN_DRAFTING),
        ({}, "cuda", False, DraftExtend.EVERY_STEP),
        ({"postpone_extend": False}, "cpu", False, DraftExtend.EVERY_STEP),
        ({"postpone_extend": True}, "cuda", False, DraftExtend.WHEN_DRAFTING),
        # Catching up does not know the positions of images.
        ({"postpone_extend": True}, "cuda", True, DraftExtend.EVERY_STEP),
        ({"policy": "cache", "postpone_extend": True}, "cpu", False, DraftExtend.NEVER),
    ],
)
def test_draft_extend_runs_when_it_is_needed(
    settings: dict[str, Any], device: str, has_mrope: bool, expected: DraftExtend
) -> None:
    found = draft_extend_of(HvdConfig(**settings), device=device, has_mrope=has_mrope)
    assert found is expected
