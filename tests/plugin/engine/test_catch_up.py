"""When a server runs draft-extend."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.engine.catch_up import draft_extend_of


@pytest.mark.parametrize(
    ("settings", "device", "has_mrope", "runs_ahead", "expected"),
    [
        ({}, "cpu", False, False, DraftExtend.WHEN_DRAFTING),
        ({}, "cpu", False, True, DraftExtend.WHEN_DRAFTING),
        ({}, "cuda", False, False, DraftExtend.EVERY_STEP),
        ({}, "cuda", False, True, DraftExtend.AFTER_DRAFTS),
        ({"postpone_extend": "never"}, "cpu", False, False, DraftExtend.EVERY_STEP),
        ({"postpone_extend": "never"}, "cuda", False, True, DraftExtend.EVERY_STEP),
        ({"postpone_extend": "plain"}, "cpu", False, False, DraftExtend.AFTER_DRAFTS),
        ({"postpone_extend": "always"}, "cuda", False, True, DraftExtend.WHEN_DRAFTING),
        # Catching up does not know the positions of images.
        ({}, "cuda", True, True, DraftExtend.EVERY_STEP),
        ({"postpone_extend": "always"}, "cuda", True, False, DraftExtend.EVERY_STEP),
        ({"policy": "cache", "postpone_extend": "plain"}, "cuda", False, False, DraftExtend.NEVER),
        ({"policy": "cache"}, "cpu", True, False, DraftExtend.NEVER),
    ],
)
def test_draft_extend_runs_when_it_is_needed(
    settings: dict[str, Any],
    device: str,
    has_mrope: bool,
    runs_ahead: bool,
    expected: DraftExtend,
) -> None:
    config = HvdConfig(run_ahead=runs_ahead, **settings)
    found = draft_extend_of(config, device=device, has_mrope=has_mrope)
    assert found is expected
