"""Walks of recordings: what they count, which rows they keep, and what the cache holds."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from sglang_hvd.config import HvdConfig, Policy, PostponeExtend
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff import FEATURE_NAMES
from sglang_hvd.replay.core.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.replay.core.recording_walk import RecordingWalk
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings
from sglang_hvd.replay.core.totals import CycleTotals
from sglang_hvd.replay.core.walk import WalkSettings, walk_recordings
from sglang_hvd.replay.training.train import (
    _weighed,
)
from sglang_hvd.traces.writer import TraceWriter
from tests.replay.conftest import WriteTraces
from tests.replay.made_up import walked
from tests.traces.made_up import trace


def test_allocate_is_replayed_with_the_choices_of_a_server(
    made_up_traces: Path, number_tokenizer: Path, flat_costs: Path
) -> None:
    def by(
        policy: Policy, *, postpones: PostponeExtend = "never"
    ) -> tuple[WalkSettings, CycleTotals]:
        settings = WalkSettings(
            HvdConfig(postpone_extend=postpones).for_policy(policy),
            model_drafter=ModelDrafter(2.0, ODDS_RATIOS["independent"]),
            costs=StepCosts.load(flat_costs),
        )
        return settings, walked(made_up_traces, number_tokenizer, settings)[0].totals()

    chosen, of_allocate = by("allocate")
    assert chosen.model_drafts == ((3, 7, 15, 31), (2, 4, 6, 8))
    assert replace(chosen, model_drafter=ModelDrafter()).model_drafts == ((8,), (8,))
    fixed, of_both = by("both")
    assert fixed.model_drafts == ((8,), (8,))
    assert of_allocate.num_tokens / of_allocate.ms > of_both.num_tokens / of_both.ms
    # If draft-extend, which costs 1 ms, runs only for requests that draft, nothing else changes. In
    # a session's first cycle nothing is missing.
    at_once = by("frequency")[1]
    later = by("frequency", postpones="always")[1]
    assert replace(later, ms=0) == replace(at_once, ms=0)
    num_without, num_sessions = at_once.num_cycles - at_once.num_model, 8
    assert num_without > 0
    assert later.ms == pytest.approx(at_once.ms - num_without - num_sessions)


def test_a_local_cache_sees_its_own_session_only(
    tmp_path: Path, number_tokenizer: Path, write_traces: WriteTraces
) -> None:
    # Two interleaved sessions of two turns each, as a live server records them. Both turns of a
    # session have the same output, and the sessions have different ones.
    path = write_traces(tmp_path / "interleaved.jsonl", num_sessions=4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        output = " ".join(str(1 + (n * 7 + number % 2) % 199) for n in range(60))
        line |= {"session": f"s{number % 2}", "prompt": "5", "output": output}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = TraceTokenizer(number_tokenizer, None)

    def num_cycles(shares_cache: bool, *numbers: int) -> int:
        some = tmp_path / "some.jsonl"
        some.write_text("".join(json.dumps(lines[number]) + "\n" for number in numbers))
        [walk] = walk_recordings(
            find_recordings(some),
            tokenizer,
            WalkSettings(HvdConfig(policy="cache"), shares_cache=shares_cache),
            label="test",
            num_processes=1,
        )
        return walk.totals().num_cycles

    apart = num_cycles(False, 0, 2) + num_cycles(False, 1, 3)
    assert num_cycles(False, 0, 1, 2, 3) == apart
    assert num_cycles(False, 0, 2) < 1.5 * num_cycles(False, 0)  # the second turn copies the first


def test_namespaces_are_replayed_apart(tmp_path: Path, number_tokenizer: Path) -> None:
    tokenizer = TraceTokenizer(number_tokenizer, None)

    def num_cycles(*namespaces: str) -> int:
        """Cycles of one generation that is recorded once in each of these namespaces."""
        recorded = tmp_path / "recorded.hvdt"
        with TraceWriter(recorded, tokenizer_fingerprint=tokenizer.fingerprint) as writer:
            for number, namespace in enumerate(namespaces):
                writer.write(
                    trace(
                        [5],
                        range(60, 120),
                        session=str(number),
                        namespace=namespace,
                        model="",
                        tokenizer_fingerprint=tokenizer.fingerprint,
                    )
                )
        [walk] = walk_recordings(
            find_recordings(recorded),
            tokenizer,
            WalkSettings(HvdConfig(policy="cache")),
            label="test",
            num_processes=1,
        )
        recorded.unlink()
        return walk.totals().num_cycles

    assert num_cycles("a", "b") == num_cycles("a") + num_cycles("b")
    assert num_cycles("a", "a") < 1.5 * num_cycles("a")


def test_several_processes_give_the_same_results(
    made_up_traces: Path, number_tokenizer: Path
) -> None:
    walks = [
        walked(
            *(made_up_traces, number_tokenizer, WalkSettings(HvdConfig(policy="cache"))),
            num_processes=num_processes,
        )
        for num_processes in (1, 2)
    ]
    for one, other in zip(*walks, strict=True):
        assert (one.name, one.family, one.totals()) == (other.name, other.family, other.totals())
        first, second = one.rows(), other.rows()
        assert first is not None
        assert second is not None
        assert first.features.tobytes() == second.features.tobytes()


def test_one_cycle_in_row_stride_gives_a_row(made_up_traces: Path, number_tokenizer: Path) -> None:
    def by(row_stride: int) -> list[RecordingWalk]:
        every_token = WalkSettings(
            HvdConfig(policy="model"), model_drafter=ModelDrafter(0), row_stride=row_stride
        )
        return walked(made_up_traces, number_tokenizer, every_token)

    for every, third in zip(by(1), by(3), strict=True):
        assert every.totals() == third.totals()
        for all_rows, some in zip(every.sessions, third.sessions, strict=True):
            assert all_rows.rows is not None
            assert some.rows is not None
            assert len(some.rows) == pytest.approx(len(all_rows.rows) / 3, abs=3)
            others = iter([row.tobytes() for row in all_rows.rows.features])
            # Each row is among them, in the same order.
            assert all(row.tobytes() in others for row in some.rows.features)


def test_of_too_many_rows_every_nth_is_kept(made_up_traces: Path, number_tokenizer: Path) -> None:
    every_token = WalkSettings(HvdConfig(policy="model"), model_drafter=ModelDrafter(0))

    def at_most(num: int) -> list[RecordingWalk]:
        return walked(made_up_traces, number_tokenizer, replace(every_token, max_rows=num))

    every = walked(made_up_traces, number_tokenizer, every_token)
    num_rows = [len(walk.rows() or ()) for walk in every]
    # Each of the two recordings may have half of the rows.
    assert [walk.thinning for walk in at_most(2 * max(num_rows))] == [1, 1]
    thinned = at_most(2 * min(num_rows) // 3)
    for all_rows, some in zip(every, thinned, strict=True):
        assert some.thinning == 4
        assert some.totals() == all_rows.totals()
        assert some.num_drafts() == all_rows.num_drafts() == len(all_rows.rows() or ())
        rows_of = [walk.rows() for walk in (all_rows, some)]
        features = [rows.features.tobytes() for rows in rows_of if rows is not None]
        expected = np.frombuffer(features[0], np.float32).reshape(-1, len(FEATURE_NAMES))[::4]
        assert features[1] == expected.tobytes()
    # Their weights sum up to those of all rows.
    weights = [_weighed(walks, without=frozenset()) for walks in (every, thinned)]
    for of_all, of_some in zip(*weights, strict=True):
        assert of_some.weights.sum() == pytest.approx(of_all.weights.sum(), rel=0.02)


def test_sessions_that_are_not_judged_give_no_rows(
    made_up_traces: Path, number_tokenizer: Path
) -> None:
    def by(without: frozenset[str]) -> RecordingWalk:
        settings = WalkSettings(HvdConfig(policy="cache"), without=without)
        return walked(made_up_traces, number_tokenizer, settings)[0]

    every = by(frozenset())
    some = by(frozenset({every.sessions[1].fingerprint}))
    assert some.totals() == every.totals()
    assert [session.rows is None for session in some.sessions] == [False, True] + [False] * 6
    assert every.sessions[1].rows is not None


class _Deadly:
    """Ends the process that it is sent to."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (1,)


def test_a_process_that_ends_is_reported(made_up_traces: Path) -> None:
    with pytest.raises(ValueError, match=r"one of 2 processes ended with code 1$"):
        walk_recordings(
            find_recordings(made_up_traces),
            cast("TraceTokenizer", _Deadly()),
            WalkSettings(HvdConfig(policy="cache")),
            label="test",
            num_processes=2,
        )
