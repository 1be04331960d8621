"""The commands that replay, train and judge, on small made-up recordings."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sglang_hvd.allocation import StepCosts
from sglang_hvd.cli import main
from sglang_hvd.config import HvdConfig, Policy, PostponeExtend
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor
from sglang_hvd.payoff.predictor import PAPER_PREDICTORS, Kind
from sglang_hvd.payoff.training_rows import Lessons
from sglang_hvd.replay import policies, ship
from sglang_hvd.replay.evaluate import judge, judging_walks
from sglang_hvd.replay.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.replay.recordings import Recording, find_recordings
from sglang_hvd.replay.totals import CycleTotals
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.replay.train import (
    TrainPlan,
    _fit,
    _weighed,
    first_round,
    held_out_sessions,
    lessons_of,
    train_predictors,
)
from sglang_hvd.replay.walk import RecordingWalk, SessionWalk, WalkSettings, walk_recordings
from sglang_hvd.traces.writer import TraceWriter
from tests.payoff.made_up import constant_survival, linear
from tests.replay.conftest import WriteTraces
from tests.replay.made_up import rows, walk
from tests.traces.made_up import trace

KEYS = {
    "file", "family", "predictor", "num_drafts", "oracle_share", "precision", "recall",
    "average_precision", "calibration_error", "mean_absolute_error", "at",
}  # fmt: skip


def run(command: str, traces: Path, tokenizer: Path, *more: object) -> int:
    flags = ["--traces", traces, "--tokenizer", tokenizer, "--processes", 1, *more]
    try:
        return main([command, *map(str, flags)])
    except SystemExit as ended:  # what the parser finds
        return int(str(ended.code))


def walked(
    traces: Path, tokenizer: Path, settings: WalkSettings, *, num_processes: int = 1
) -> list[RecordingWalk]:
    return walk_recordings(
        find_recordings(traces),
        TraceTokenizer(tokenizer, "<|im_end|>"),
        settings,
        label="test",
        num_processes=num_processes,
    )


@pytest.fixture
def trained(made_up_traces: Path, number_tokenizer: Path, tmp_path: Path) -> Path:
    output = tmp_path / "trained.safetensors"
    assert run("train", made_up_traces, number_tokenizer, "--output", output) == 0
    return output


def test_train_writes_a_predictor_that_says_where_it_comes_from(
    trained: Path, made_up_traces: Path
) -> None:
    predictor = AcceptancePredictor.load(trained)
    assert predictor.kind == "survival"
    assert predictor.provenance["recordings"] == [
        {"name": name, "repository": "github.com/nobody/nothing", "licence": "MIT"}
        for name in ("copying", "other")
    ]
    assert len(predictor.trained_sessions) == 12
    heldout = predictor.provenance["heldout"]
    assert isinstance(heldout, list)
    assert [row["file"] for row in heldout] == ["copying", "other", "mean"]
    assert str(made_up_traces) not in json.dumps(dict(predictor.provenance))


def test_train_learns(made_up_traces: Path, number_tokenizer: Path, trained: Path) -> None:
    [_, _, mean] = AcceptancePredictor.load(trained).provenance["heldout"]  # type: ignore[misc]
    assert 0.05 < mean["oracle_share"] < 0.95
    assert mean["average_precision"] > mean["oracle_share"] + 0.2


def test_evaluate_judges_the_sessions_that_no_predictor_was_trained_on(
    trained: Path, made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    found = tmp_path / "rows.json"
    flags = ("--predictor", trained, "--json", found)
    assert run("evaluate", made_up_traces, number_tokenizer, *flags) == 0
    rows = json.loads(found.read_text())
    assert all(set(row) >= KEYS for row in rows)
    assert {(row["file"], row["predictor"], row["at"]) for row in rows} == {
        (file, predictor, at)
        for file in ("copying", "other", "mean")
        for predictor in ("given", "default", "mlp", "frequency")
        for at in ("cycle", "position")
    }
    numbers = {(row["file"], row["at"]): set() for row in rows}
    for row in rows:
        numbers[row["file"], row["at"]].add(row["num_drafts"])
        assert (row["calibration_error"] is None) == (row["predictor"] in ("mlp", "frequency"))
    assert all(len(num) == 1 for num in numbers.values())  # the same drafts for all predictors
    # Of 8 sessions 2 were held out; each output has 61 tokens, of which prefill generates one.
    assert numbers["copying", "position"] <= set(range(100, 121))
    assert numbers["copying", "cycle"] < numbers["copying", "position"] or max(
        numbers["copying", "cycle"]
    ) < max(numbers["copying", "position"])


@pytest.mark.parametrize("command", ["evaluate", "analyze"])
def test_a_predictor_of_bare_numbers_is_judged_too(
    command: str, made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    flags = ("--predictor", PAPER_PREDICTORS["votes"], "--json", found)
    assert run(command, made_up_traces, number_tokenizer, *flags) == 0
    assert found.is_file()


def test_evaluate_without_a_session_left_says_so(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "all.safetensors"
    flags = ("--output", output, "--held-out", 0)
    assert run("train", made_up_traces, number_tokenizer, *flags) == 0
    assert "nothing was held out: not judged" in capsys.readouterr().out
    assert run("evaluate", made_up_traces, number_tokenizer, "--predictor", output) == 2
    assert "no session is left to judge" in capsys.readouterr().err


def test_sessions_without_a_draft_are_told_from_none(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = json.loads((made_up_traces / "other.jsonl").read_text().splitlines()[0])
    nothing_twice = {"prompt": "1 2 3", "output": " ".join(map(str, range(50, 90)))}
    drafts = made_up_traces / "no_drafts.jsonl"
    drafts.write_text(json.dumps({**line, **nothing_twice, "session": "alone"}))
    assert run("evaluate", drafts, number_tokenizer) == 2
    assert "no cycle of the traces had a cache draft" in capsys.readouterr().err
    # Of a file with two sessions the last one is held out.
    copies = {**line, "prompt": "1 2 3 4 " * 20, "output": "1 2 3 4 " * 10}
    drafts.write_text(
        "".join(
            json.dumps(fields) + "\n"
            for fields in (copies, line | nothing_twice | {"session": "alone"})
        )
    )
    flags = ("--output", tmp_path / "p.safetensors", "--rounds", 1)
    assert run("train", drafts, number_tokenizer, *flags) == 0
    assert "no held-out session had a cache draft: not judged" in capsys.readouterr().out


@pytest.fixture
def flat_costs(tmp_path: Path) -> Path:
    path = tmp_path / "flat_costs.yaml"
    path.write_text(
        "{about: made up, batch_sizes: [1, 2], widths: [1, 2], verify: [[10, 12], [10, 12]], "
        "draft_round: [0.5, 0.5], draft_extend: [[1, 1], [1, 1]]}"
    )
    return path


def test_replay_compares_the_policies(
    made_up_traces: Path, number_tokenizer: Path, flat_costs: Path, tmp_path: Path
) -> None:
    found = tmp_path / "rows.json"
    flags = ("--json", found, "--costs", flat_costs, "--warm-up", 0.5)
    assert run("replay", made_up_traces, number_tokenizer, *flags) == 0
    rows = {(row["file"], row["policy"]): row for row in json.loads(found.read_text())}
    assert len(rows) == 3 * 6
    model = rows["copying", "model"]
    # 4 measured sessions of 60 tokens in cycles of 3. A chain of 8 is verified at width 16, 12 ms
    # and 2 for each node more, after 7 rounds.
    assert model["cycles_per_1k_tokens"] == pytest.approx(1000 / 3)
    assert model["tokens_per_ms"] == pytest.approx(3 / (40 + 1 + 3.5))
    assert (model["cache_share"], model["mean_accepted"]) == (0, 2)
    cache = rows["copying", "cache"]
    assert cache["cycles_per_1k_tokens"] < model["cycles_per_1k_tokens"]
    assert cache["recall"] == 1
    assert cache["precision"] == cache["oracle_share"]
    assert rows["mean", "model"]["tokens_per_ms"] == pytest.approx(3 / 44.5)
    assert rows["mean", "allocate"]["tokens_per_ms"] > rows["mean", "model"]["tokens_per_ms"]


def test_replay_leaves_allocate_out_where_it_cannot_be(
    made_up_traces: Path,
    number_tokenizer: Path,
    flat_costs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = tmp_path / "rows.json"
    papers = ("--predictor", PAPER_PREDICTORS["votes"], "--costs", flat_costs)
    for flags, lacks in (
        ((), "--costs FILE (configs/costs)"),
        (papers, "a predictor of kind survival"),
    ):
        assert run("replay", made_up_traces, number_tokenizer, "--json", found, *flags) == 0
        policies_of_rows = {row["policy"] for row in json.loads(found.read_text())}
        assert policies_of_rows == {"payoff", "frequency", "cache", "model", "both"}
        assert f"policy allocate is left out: it needs {lacks}\n" in capsys.readouterr().err


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
    # Nothing else changes where draft-extend, which costs 1 ms, runs for requests that draft; in
    # their first cycle they lack nothing.
    at_once = by("frequency")[1]
    later = by("frequency", postpones="always")[1]
    assert replace(later, ms=0) == replace(at_once, ms=0)
    num_without, num_sessions = at_once.num_cycles - at_once.num_model, 8
    assert num_without > 0
    assert later.ms == pytest.approx(at_once.ms - num_without - num_sessions)


def test_replay_does_not_measure_sessions_that_the_predictor_was_trained_on(
    trained: Path, made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    def cycles_per_1k(traces: Path, *more: object) -> dict[tuple[str, str], float]:
        found = tmp_path / "rows.json"
        flags = ("--predictor", trained, "--json", found, *more)
        assert run("replay", traces, number_tokenizer, *flags) == 0
        rows = json.loads(found.read_text())
        return {(row["file"], row["policy"]): row["cycles_per_1k_tokens"] for row in rows}

    # Of 8 sessions the last 2 were held out: the same as with the first 6 as a warm-up.
    assert cycles_per_1k(made_up_traces) == cycles_per_1k(made_up_traces, "--warm-up", 0.75)


# Commands that judge, and the modules that walk for them.
MODULES = {"replay": "policies", "evaluate": "evaluate", "analyze": "analyze"}


@pytest.mark.parametrize("command", MODULES)
def test_sessions_that_a_predictor_was_trained_on_are_told_of(
    command: str,
    made_up_traces: Path,
    number_tokenizer: Path,
    write_traces: WriteTraces,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, found = tmp_path / "all.safetensors", tmp_path / "found.json"
    flags = ("--output", output, "--held-out", 0, "--rounds", 1)
    assert run("train", made_up_traces, number_tokenizer, *flags) == 0
    write_traces(made_up_traces / "new.jsonl", family="new", num_sessions=3, step=11)
    flags = ("--predictor", output, "--json", found)
    capsys.readouterr()
    assert run(command, made_up_traces, number_tokenizer, *flags) == 0
    told = capsys.readouterr().err
    assert "16 of 19 sessions (in copying, other) only fill the cache: a predictor was" in told
    if command == "analyze":
        about = json.loads(found.read_text())["about"]
        assert (about["files"], about["num_sessions"]) == (["new"], 3)
    (made_up_traces / "new.jsonl").unlink()

    def walk(*args: object, **kwargs: object) -> None:
        pytest.fail("nothing is to be walked")

    monkeypatch.setattr(f"sglang_hvd.replay.{MODULES[command]}.walk_recordings", walk)
    assert run(command, made_up_traces, number_tokenizer, *flags) == 2
    assert "no session is left to judge" in capsys.readouterr().err


@pytest.mark.parametrize("command", MODULES)
def test_replies_without_a_word_are_told_from_sessions_that_were_trained_on(
    command: str, tmp_path: Path, number_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": None}]
    chat.write_text(json.dumps({"messages": messages}))
    assert run(command, chat, number_tokenizer, "--json", tmp_path / "found.json") == 2
    assert "error: nothing was decoded in the sessions" in capsys.readouterr().err


def test_replay_verifies_as_widely_as_the_server_would(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, found = tmp_path / "hvd.yaml", tmp_path / "rows.json"
    accepted = []
    for width in (10, 32):
        config.write_text(f"verify_width: {width}")
        flags = ("--config", config, "--json", found)
        assert run("replay", made_up_traces, number_tokenizer, *flags) == 0
        rows = {(row["file"], row["policy"]): row for row in json.loads(found.read_text())}
        accepted.append(rows["mean", "cache"]["mean_accepted"])
    assert accepted[0] < accepted[1]
    config.write_text("verify_width: 9")
    assert run("replay", made_up_traces, number_tokenizer, "--config", config) == 2
    assert "verify_width 9 has no room" in capsys.readouterr().err


def test_a_local_cache_sees_its_own_session_only(
    tmp_path: Path, number_tokenizer: Path, write_traces: WriteTraces
) -> None:
    # Two sessions of two turns each in turns, as a live server records them. Both turns of a
    # session have the same output, the sessions different ones.
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
        """Of the same generation once for each."""
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


def test_recordings_need_no_token_that_ends_an_output(
    tmp_path: Path, number_tokenizer: Path, made_up_traces: Path
) -> None:
    recorded = tmp_path / "recorded.hvdt"
    tokenizer = TraceTokenizer(number_tokenizer, "<|im_end|>")
    [recording, _] = find_recordings(made_up_traces)
    with TraceWriter(recorded, tokenizer_fingerprint=tokenizer.fingerprint) as writer:
        for trace in recording.traces(tokenizer):
            writer.write(trace)
    assert run("replay", recorded, number_tokenizer, "--eos-token", "<none>") == 0
    assert run("replay", made_up_traces, number_tokenizer, "--eos-token", "<none>") == 2
    assert run("replay", made_up_traces, number_tokenizer, "--eos-token", "") == 0


def test_the_mean_calibration_leaves_out_families_without_a_curve() -> None:
    def family(name: str, num_drafts: int, accepted: int) -> RecordingWalk:
        return walk(name, rows([accepted] * num_drafts), num_cycles=num_drafts, num_cache=0)

    # Every draft is said to reach the threshold with probability .5 ** 6.
    few, many = family("few", 4, 0), family("many", 100, 31)
    for walks in ([few, many], [many, few]):
        evaluations = judge(walks, {"half": constant_survival(0.5)}, cache_mode="votes", at="cycle")
        [mean] = [e for e in evaluations if (e.file, e.predictor) == ("mean", "half")]
        assert mean.quality.calibration_error == pytest.approx(1 - 0.5**6)


def test_no_predictor_is_judged_by_where_a_text_was_cut(number_tokenizer: Path) -> None:
    recorded = number_tokenizer.with_name("cut.hvdt")
    unknown = {"model": "", "tokenizer_fingerprint": ""}
    random = np.random.default_rng(0)
    with TraceWriter(recorded, **unknown) as writer:
        for session in range(4):
            prompt = random.permutation(199)[:100]
            copied = prompt[10:50]  # every draft is right, as far as anybody knows
            writer.write(
                trace(prompt, copied, session=str(session), family="f", is_cut=True, **unknown)
            )
    every_token = WalkSettings(HvdConfig(policy="model"), model_drafter=ModelDrafter(0))
    [recording] = walked(recorded, number_tokenizer, every_token)
    seen, judged = recording.rows(), recording.judged_rows()
    assert seen is not None
    assert judged is not None
    assert len(judged) == len(seen) - 4 * 5
    # One that takes all drafts of six tokens or more is never wrong.
    by_length = {"by length": linear({"draft_len": 1})}
    for evaluation in judge([recording], by_length, cache_mode="votes", at="position"):
        assert evaluation.quality.num_drafts == len(judged)
        if evaluation.predictor == "by length":
            assert evaluation.quality.precision == evaluation.quality.average_precision == 1


def test_several_processes_find_the_same(made_up_traces: Path, number_tokenizer: Path) -> None:
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


def test_of_some_cycles_one_gives_a_row(made_up_traces: Path, number_tokenizer: Path) -> None:
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
            # Each is found, behind the one before.
            assert all(row.tobytes() in others for row in some.rows.features)


def test_of_too_many_rows_some_stand_for_all(made_up_traces: Path, number_tokenizer: Path) -> None:
    every_token = WalkSettings(HvdConfig(policy="model"), model_drafter=ModelDrafter(0))

    def at_most(num: int) -> list[RecordingWalk]:
        return walked(made_up_traces, number_tokenizer, replace(every_token, max_rows=num))

    every = walked(made_up_traces, number_tokenizer, every_token)
    num_rows = [len(walk.rows() or ()) for walk in every]
    # Each of the two recordings has half of what is asked for; one with as many rows keeps them.
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
    # They count as much as all of them would.
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


def test_a_process_that_ends_is_told_of(made_up_traces: Path) -> None:
    with pytest.raises(ValueError, match=r"one of 2 processes ended with code 1$"):
        walk_recordings(
            find_recordings(made_up_traces),
            cast("TraceTokenizer", _Deadly()),
            WalkSettings(HvdConfig(policy="cache")),
            label="test",
            num_processes=2,
        )


def test_the_first_round_begins_cycles_in_the_middle_of_copies(
    made_up_traces: Path, number_tokenizer: Path
) -> None:
    recordings = find_recordings(made_up_traces)
    tokenizer = TraceTokenizer(number_tokenizer, "<|im_end|>")
    plan = TrainPlan(HvdConfig(), num_processes=1)
    of_first = [walks[0].totals() for walks in first_round(recordings, tokenizer, plan)]
    cycles_per_token = [totals.num_cycles / totals.num_tokens for totals in of_first]
    by_model, by_token, by_cache = cycles_per_token
    assert by_token == 1
    assert by_model == pytest.approx(1 / 3, abs=0.02)
    assert by_cache < 1 / 3


def test_both_kinds_learn_from_the_same_cycles(
    made_up_traces: Path, number_tokenizer: Path
) -> None:
    trained = train_predictors(
        find_recordings(made_up_traces),
        [TraceTokenizer(number_tokenizer, "<|im_end|>")],
        TrainPlan(HvdConfig(), num_rounds=1, num_processes=1),
        ("survival", "mlp"),
    )
    assert {kind: predictor.kind for kind, predictor in trained.items()} == {
        "survival": "survival",
        "mlp": "mlp",
    }
    assert len({str(predictor.provenance["num_rows"]) for predictor in trained.values()}) == 1
    assert trained["survival"].trained_sessions == trained["mlp"].trained_sessions


@pytest.fixture
def digit_tokenizer(tmp_path: Path) -> Path:
    """Each digit is a token."""
    vocab = {"<|im_end|>": 0} | {str(digit): 1 + digit for digit in range(10)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    path = tmp_path / "digits.json"
    tokenizer.save(str(path))
    return path


def test_texts_are_learned_from_as_each_tokenizer_cuts_them(
    made_up_traces: Path, number_tokenizer: Path, digit_tokenizer: Path
) -> None:
    recordings = find_recordings(made_up_traces)
    numbers, digits = (
        TraceTokenizer(path, "<|im_end|>") for path in (number_tokenizer, digit_tokenizer)
    )

    def provenance(*tokenizers: TraceTokenizer, max_rows: int = 10**6) -> Mapping[str, Any]:
        plan = TrainPlan(HvdConfig(), num_rounds=2, num_processes=1, max_rows=max_rows)
        return train_predictors(recordings, tokenizers, plan, ["survival"])["survival"].provenance

    by_numbers, by_digits, by_both = (
        provenance(*given) for given in ([numbers], [digits], [numbers, digits])
    )
    num_rows = [int(trained["num_rows"]) for trained in (by_numbers, by_digits, by_both)]
    assert num_rows[1] > num_rows[0]
    # What the first round has of each is the same; what a predictor decides is its own.
    assert num_rows[2] == pytest.approx(num_rows[0] + num_rows[1], rel=0.2)
    assert by_both["trained_sessions"] == by_numbers["trained_sessions"]
    assert by_both["tokenizers"] == [numbers.fingerprint, digits.fingerprint]
    judged = [sum(row["num_drafts"] for row in t["heldout"]) for t in (by_both, by_digits)]
    assert judged[0] < 0.7 * judged[1]  # with the first
    assert provenance(numbers, digits, max_rows=300)["num_rows"] == 300


def test_rows_of_other_tokenizers_count_less_and_the_papers_predictor_sees_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Lessons] = {}

    def note(lessons: Lessons, *, kind: Kind, **settings: Any) -> AcceptancePredictor:
        seen[kind] = lessons
        return constant_survival(0.5)

    monkeypatch.setattr("sglang_hvd.replay.train.train", note)
    parts = [
        Lessons.of(rows([accepted] * num)).weighted(weight)
        for accepted, num, weight in ((1, 30, 1.0), (2, 50, 7.0))
    ]
    for kind in ("survival", "mlp"):
        _fit(parts, TrainPlan(HvdConfig()), kind)
    of_first = seen["survival"].accepted_lens == 1
    assert seen["survival"].weights[of_first] == pytest.approx(1)
    assert seen["survival"].weights[~of_first] == pytest.approx(0.4)
    assert (of_first.sum(), (~of_first).sum()) == (30, 50)
    assert seen["mlp"].accepted_lens.tolist() == [1] * 30
    assert seen["mlp"].weights.tolist() == [1] * 30


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


@pytest.fixture
def provenance_of(made_up_traces: Path, number_tokenizer: Path) -> Callable[..., Mapping[str, Any]]:
    """What a predictor says of itself that was trained by such a plan."""
    recordings = find_recordings(made_up_traces)
    tokenizer = TraceTokenizer(number_tokenizer, "<|im_end|>")

    def trained(**plan: Any) -> Mapping[str, Any]:
        whole_plan = TrainPlan(HvdConfig(), num_processes=1, **plan)
        trained = train_predictors(recordings, [tokenizer], whole_plan, ["survival"])
        return trained["survival"].provenance

    return trained


def test_later_rounds_learn_from_the_first_too(
    provenance_of: Callable[..., Mapping[str, Any]],
) -> None:
    one, two = (provenance_of(num_rounds=num)["num_rows"] for num in (1, 2))
    assert two > one


def test_a_predictor_is_judged_by_what_was_held_out_alone(
    provenance_of: Callable[..., Mapping[str, Any]],
) -> None:
    def num_judged(share: float) -> int:
        judged = provenance_of(held_out=share, num_rounds=1)["heldout"]
        return sum(row["num_drafts"] for row in judged)

    assert num_judged(0.5) > 1.5 * num_judged(0.25) > 0


def test_the_rows_of_a_recording_count_as_a_power_of_their_number() -> None:
    large, small = (walk("f", rows([1] * num), num_cycles=1, num_cache=1) for num in (90, 10))
    weights = lessons_of([large, small], without=frozenset()).weights
    assert weights.mean() == pytest.approx(1)
    assert weights[:90].sum() / weights[90:].sum() == pytest.approx(9**0.7)
    trained_on = frozenset(session.fingerprint for session in large.sessions)
    other = walk("other", rows([1] * 10), num_cycles=1, num_cache=1)
    assert len(lessons_of([large, other], without=trained_on)) == 10


@pytest.mark.parametrize(
    ("num_sessions", "share", "num_held_out"),
    [(8, 0.25, 2), (3, 0.25, 1), (2, 0.1, 1), (1, 0.25, 0), (8, 0.0, 0)],
)
def test_the_last_sessions_are_held_out(num_sessions: int, share: float, num_held_out: int) -> None:
    sessions = tuple(SessionWalk(f"s{n}", CycleTotals(), None, 0) for n in range(num_sessions))
    held_out = held_out_sessions([RecordingWalk("file", "family", sessions)], share)
    assert held_out == {f"s{n}" for n in range(num_sessions - num_held_out, num_sessions)}


@pytest.mark.parametrize(
    ("licence", "is_permissive"),
    [
        ("MIT", True),
        ("Apache-2.0 (repo); source texts keep their own terms", True),
        ("MIT (repo); HotpotQA CC BY-SA 4.0", True),
        ("MIT (repo); Alpaca instructions CC BY-NC 4.0", False),
        ("GPL-3.0", False),
    ],
)
def test_only_permissive_recordings_ship(
    tmp_path: Path, write_traces: WriteTraces, licence: str, is_permissive: bool
) -> None:
    path = write_traces(tmp_path / "one.jsonl", licence=licence)
    [recording] = find_recordings(path)
    assert isinstance(recording, Recording)
    assert recording.is_permissive is is_permissive


def test_what_ships_is_replaced_only_where_that_is_asked_for(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--traces", str(made_up_traces), "--tokenizer", str(number_tokenizer)]
    with pytest.raises(SystemExit, match="2"):
        ship.main(given)
    assert "required: --output" in capsys.readouterr().err
    assert ship.main([*given, "--output", str(tmp_path / "gone")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    empty, blank, broken = (tmp_path / name for name in ("empty", "blank", "broken"))
    for folder in (empty, blank, broken):
        folder.mkdir()
    (blank / "blank.jsonl").touch()
    (broken / "broken.jsonl").write_text((made_up_traces / "copying.jsonl").read_text()[:-40])
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"PK\x03\x04" * 50)
    costs = tmp_path / "costs.yaml"
    costs.write_text("{verify: 10}")
    served = tmp_path / "hvd.yaml"
    served.write_text("costs: costs.yaml")
    keyless = tmp_path / "keyless.jsonl"
    first = json.loads((made_up_traces / "copying.jsonl").read_text().splitlines()[0])
    del first["licence"]
    keyless.write_text(json.dumps(first))
    mixed, called_mean = tmp_path / "mixed.hvdt", tmp_path / "called_mean.hvdt"
    for path, families in ((mixed, ["a", "b"]), (called_mean, ["mean"])):
        with TraceWriter(path) as writer:
            for family in families:
                writer.write(trace([5], [6], family=family, model="", tokenizer_fingerprint=""))
    for command, traces, tokenizer, more, says in (
        ("train", empty, number_tokenizer, ["--output", output], "no traces (*.jsonl, *.hvdt)"),
        ("train", blank, number_tokenizer, ["--output", output], "blank.jsonl: empty"),
        ("train", broken, number_tokenizer, ["--output", output], "broken.jsonl:8: "),
        ("train", made_up_traces, tmp_path / "none.json", ["--output", output], "cannot read the"),
        ("train", made_up_traces, number_tokenizer, ["--output", output / "p"], "no folder"),
        ("evaluate", made_up_traces, number_tokenizer, ["--json", output / "p"], "no folder"),
        ("train", made_up_traces, number_tokenizer, ["--output", empty], "is a folder"),
        ("train", keyless, number_tokenizer, ["--output", output], "text trace without licence"),
        ("train", made_up_traces, number_tokenizer, ["--output", number_tokenizer], "is read as"),
        ("evaluate", mixed, number_tokenizer, ["--json", mixed], "is read as well"),
        (
            "evaluate",
            made_up_traces,
            number_tokenizer,
            ["--json", made_up_traces / "x.jsonl"],
            "next",
        ),
        (
            *("analyze", made_up_traces, number_tokenizer),
            *(["--json", output, "--html", output], "is written by --json as well"),
        ),
        (
            *("train", made_up_traces, number_tokenizer),
            *(["--output", output, "--seed", "-1"], "from 0 to below 2^32"),
        ),
        ("train", made_up_traces, number_tokenizer, ["--output", output, "--rounds", "x"], "whole"),
        ("evaluate", made_up_traces, number_tokenizer, ["--predictor", foreign], "is corrupt"),
        (
            *("evaluate", made_up_traces, number_tokenizer),
            *(["--predictor", output], "out is not a file: give another"),
        ),
        ("evaluate", made_up_traces, number_tokenizer, ["--eos-token", "<x>"], "has no token <x>"),
        ("replay", made_up_traces, number_tokenizer, ["--costs", costs], "cost table: about: "),
        ("replay", made_up_traces, number_tokenizer, ["--config", served], "cost table: about: "),
        ("replay", made_up_traces, number_tokenizer, ["--warm-up", 1.5], "from 0 to below 1"),
        ("replay", tmp_path / "gone", number_tokenizer, [], "cannot read the traces"),
        ("replay", mixed, number_tokenizer, [], "of the families a, b: "),
        ("replay", called_mean, number_tokenizer, [], "of the families mean: "),
    ):
        before = set(tmp_path.rglob("*"))
        assert run(command, traces, tokenizer, *more) == 2
        error = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert len(error) == 1
        assert error[0].startswith("error: ")
        assert says in error[0], (command, error[0])
        assert set(tmp_path.rglob("*")) == before


def test_a_reader_that_wants_no_more_is_no_error(
    made_up_traces: Path, number_tokenizer: Path
) -> None:
    code = "from sglang_hvd.cli import main; raise SystemExit(main())"
    flags = ["--traces", str(made_up_traces), "--tokenizer", str(number_tokenizer)]
    command = [sys.executable, "-c", code, "replay", *flags, "--processes", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read().decode()
    assert "Traceback" not in told
    assert process.returncode == 141


def test_the_mean_gives_every_family_the_same_weight(
    made_up_traces: Path, number_tokenizer: Path, write_traces: WriteTraces, tmp_path: Path
) -> None:
    write_traces(made_up_traces / "copying_too.jsonl", num_sessions=30)
    found = tmp_path / "rows.json"
    assert run("replay", made_up_traces, number_tokenizer, "--json", found) == 0
    rows = {
        row["file"]: row["cycles_per_1k_tokens"]
        for row in json.loads(found.read_text())
        if row["policy"] == "cache"
    }
    copying = (rows["copying"] + rows["copying_too"]) / 2
    assert math.isclose(rows["mean"], (copying + rows["other"]) / 2)


def test_a_predictor_of_other_settings_can_be_trained_and_judged(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output, found = (tmp_path / n for n in ("hvd.yaml", "p.safetensors", "rows.json"))
    config.write_text("{min_token_prob: 0.2, history_window: 4, cache_mode: paper}")
    flags = ("--config", config, "--output", output, "--rounds", 1)
    assert run("train", made_up_traces, number_tokenizer, *flags) == 0
    settings = AcceptancePredictor.load(output).settings
    assert [settings[n] for n in ("min_token_prob", "history_window", "cache_mode")] == [
        0.2,
        4,
        "paper",
    ]
    flags = ("--predictor", output, "--json", found)
    assert run("evaluate", made_up_traces, number_tokenizer, *flags) == 0
    rows = json.loads(found.read_text())
    assert {row["cache_mode"] for row in rows} == {"paper"}
    assert {row["predictor"] for row in rows} == {"given", "default", "mlp", "frequency"}
    assert run("replay", made_up_traces, number_tokenizer, "--predictor", output) == 0
    capsys.readouterr()
    flags = ("--predictor", output, "--cache-mode", "votes")
    assert run("replay", made_up_traces, number_tokenizer, *flags) == 2
    assert "was trained for cache_mode paper, asked for is votes" in capsys.readouterr().err
    config.write_text("history_window: 5")
    assert run("replay", made_up_traces, number_tokenizer, *flags[:2], "--config", config) == 2
    assert "was trained for history_window 4, asked for is 5" in capsys.readouterr().err
    config.write_text("min_token_prob: null")  # the default of the predictor's cache mode
    assert run("replay", made_up_traces, number_tokenizer, *flags[:2], "--config", config) == 2
    assert "was trained for min_token_prob 0.2, asked for is 0.1" in capsys.readouterr().err
    config.write_text("predictor: p.safetensors")  # as the server's, from the file's folder
    assert run("evaluate", made_up_traces, number_tokenizer, "--config", config, *flags[2:]) == 2
    assert "was trained for cache_mode paper, asked for is votes" in capsys.readouterr().err
    config.write_text("min_token_prob: high")
    assert run("replay", made_up_traces, number_tokenizer, "--config", config) == 2
    assert "hvd.yaml: min_token_prob" in capsys.readouterr().err


def test_a_predictor_of_another_cache_mode_is_refused_by_the_mode(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, predictor = tmp_path / "p.safetensors", constant_survival(0.5)
    settings = {**predictor.settings, "cache_mode": "paper", "max_depth": 32}
    replace(predictor, settings=settings).save(path)
    flags = ("--predictor", path, "--cache-mode", "votes")
    assert run("evaluate", made_up_traces, number_tokenizer, *flags) == 2
    assert "trained for cache_mode paper, asked for is votes: drop" in capsys.readouterr().err


def test_what_is_not_installed_is_named_with_the_remedy(tmp_path: Path) -> None:
    command = "import sys; sys.modules['torch'] = None; from sglang_hvd.cli import main; main()"
    flags = ("train", "--traces", ".", "--tokenizer", ".", "--output", tmp_path / "p")
    done = subprocess.run(
        [sys.executable, "-c", command, *map(str, flags)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == (
        "error: train needs torch: run pip install --editable '.[train]' in this project's folder\n"
    )


def test_recordings_without_prompts_are_refused(
    tmp_path: Path, number_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recorded.jsonl"
    fingerprint = TraceTokenizer(number_tokenizer, None).fingerprint
    of_model = {"model": "m", "tokenizer_fingerprint": fingerprint}
    with TraceWriter(path, **of_model) as writer:
        writer.write(trace([], [1, 2, 3], has_prompt=False, **of_model))
    assert run("replay", path, number_tokenizer) == 2
    error = capsys.readouterr().err
    assert "recorded without prompts" in error
    assert error.count("\n") == 1


def test_predictors_are_judged_uncorrected() -> None:
    assert HvdConfig().calibrate
    walks = judging_walks(HvdConfig(), without=frozenset())
    assert not any(settings.config.calibrate for settings in walks.values())
