"""Training: which rows are learned from, with which weights, and which sessions are held out."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.payoff.predictor import Kind
from sglang_hvd.replay.core.recording_walk import RecordingWalk, SessionWalk
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings
from sglang_hvd.replay.core.totals import CycleTotals
from sglang_hvd.replay.core.training_rows import Lessons
from sglang_hvd.replay.training import ship
from sglang_hvd.replay.training.train import (
    TrainPlan,
    _fit,
    first_round,
    held_out_sessions,
    lessons_of,
    train_predictors,
)
from tests.payoff.made_up import constant_survival
from tests.replay.made_up import rows, walk


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


def test_texts_are_learned_from_with_each_tokenizer(
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
    # First rounds are the same for each tokenizer; later rounds depend on the predictor.
    assert num_rows[2] == pytest.approx(num_rows[0] + num_rows[1], rel=0.2)
    assert by_both["trained_sessions"] == by_numbers["trained_sessions"]
    assert by_both["tokenizers"] == [numbers.fingerprint, digits.fingerprint]
    judged = [sum(row["num_drafts"] for row in t["heldout"]) for t in (by_both, by_digits)]
    assert judged[0] < 0.7 * judged[1]  # judged with the first tokenizer
    assert provenance(numbers, digits, max_rows=300)["num_rows"] == 300


def test_rows_of_other_tokenizers_count_less_and_the_papers_predictor_sees_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Lessons] = {}

    def note(lessons: Lessons, *, kind: Kind, **settings: Any) -> AcceptancePredictor:
        seen[kind] = lessons
        return constant_survival(0.5)

    monkeypatch.setattr("sglang_hvd.replay.training.train.train", note)
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


@pytest.fixture
def provenance_of(made_up_traces: Path, number_tokenizer: Path) -> Callable[..., Mapping[str, Any]]:
    """The provenance of a predictor that is trained with such a plan."""
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


def test_a_predictor_is_judged_on_held_out_sessions_only(
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


def test_shipped_predictors_are_replaced_only_on_request(
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
