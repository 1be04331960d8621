"""A reported cycle tells the source of each of its tokens, and survives the way through JSON."""

from __future__ import annotations

import json

import pytest

from sglang_hvd.view.cycles import Cycle, sources_of
from tests.view.made_up import cycle

MISSING = object()


def test_a_report_survives_json() -> None:
    made = cycle(3, "both", 2, cache_right=1, ms=None)
    assert Cycle.from_report(json.loads(json.dumps(made.report()))) == made
    whole_numbers = {**made.report(), "ms": 3, "a_later_key": 1}
    assert Cycle.from_report(whole_numbers).ms == 3


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("width", MISSING, "width: Field required"),
        ("accepted", "two", "accepted: Input should be a valid integer"),
        ("accepted", 10**9, "accepted: Input should be less than or equal to 65536"),
        ("at", -1, "at: Input should be greater than or equal to 0"),
        ("source", None, "source: Input should be 'cache', 'model', 'both' or 'plain'"),
        ("origin", "elsewhere", "origin: Input should be 'prompt', 'output' or 'shared'"),
        ("ms", float("inf"), "ms: Input should be a finite number"),
    ],
)
def test_what_is_no_cycle_is_refused(key: str, value: object, fault: str) -> None:
    report = cycle(0).report()
    report[key] = value
    if value is MISSING:
        del report[key]
    with pytest.raises(ValueError, match=fault) as refused:
        Cycle.from_report(report)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="not a cycle"):
        Cycle.from_report(["cache", 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("origin", ["prompt", "output", "shared"])
def test_tokens_of_a_cache_draft_have_its_origin(origin: str) -> None:
    assert cycle(1, "cache", 2, origin=origin).token_sources == [origin, origin, "target"]


def test_tokens_of_both_drafts_are_told_apart() -> None:
    longer_cache = cycle(1, "both", 3, model_right=1)
    assert longer_cache.token_sources == ["both", "prompt", "prompt", "target"]
    longer_model = cycle(1, "both", 3, cache_right=0)
    assert longer_model.token_sources == ["model", "model", "model", "target"]
    assert cycle(1).token_sources == ["target"]


def test_nodes_that_were_not_accepted_are_counted() -> None:
    made = cycle(1, "both", 3, cache=7, cache_right=3, model=15, model_right=1)
    assert made.num_nodes == 22
    assert made.num_rejected == 4 + 14


def test_a_reply_may_end_inside_a_cycle() -> None:
    cycles = [cycle(1, "cache", 2), cycle(4, "model", 2)]
    assert sources_of(cycles, 5) == ["target", "prompt", "prompt", "target", "model"]


def test_a_cycle_after_a_retraction_replaces_the_lost_one() -> None:
    cycles = [cycle(1, "cache", 2), cycle(2, "model", 1)]
    assert sources_of(cycles, 4) == ["target", "prompt", "model", "target"]
