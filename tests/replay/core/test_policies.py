"""The figures of a policy on a recording."""

import pytest

from sglang_hvd.replay.core import policies
from sglang_hvd.replay.core.recording_walk import RecordingWalk, SessionWalk
from sglang_hvd.replay.core.totals import CycleTotals


@pytest.mark.parametrize(
    ("warm_up", "num_tokens"), [(0.0, [10, 20, 80]), (0.25, [20, 80]), (0.5, [80]), (0.9, [80])]
)
def test_sessions_that_warm_the_cache_are_not_measured(
    warm_up: float, num_tokens: list[int]
) -> None:
    sessions = tuple(
        SessionWalk(f"of {num} tokens", CycleTotals(num_cycles=10, num_tokens=num), None, 0)
        for num in (10, 20, 40, 80)
    )
    of_file = RecordingWalk("file", "family", sessions)
    trained_on = frozenset({"of 40 tokens"})
    measured = policies._result(of_file, "cache", warm_up, trained_on)
    assert measured is not None
    expected = 1000 * 10 * len(num_tokens) / sum(num_tokens)
    assert measured.cycles_per_1k_tokens == pytest.approx(expected)
