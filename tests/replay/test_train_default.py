"""The command that makes the shipped predictor, on a small made-up recording."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sglang_hvd.payoff import PayoffPredictor
from sglang_hvd.replay.train_default import Recording, main


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    vocab = {"<|im_end|>": 0} | {str(number): number for number in range(1, 200)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write(path: Path, licence: str = "MIT", num_sessions: int = 8) -> None:
    """Sessions that copy a passage of their prompt; the passage differs from session to session."""
    lines = []
    for session in range(num_sessions):
        passage = " ".join(str(1 + (session * 7 + step * 3) % 199) for step in range(30))
        lines.append(
            {
                "family": "copying",
                "dataset": f"made up, {licence}",
                "licence": licence,
                "source_repo": "nobody/nothing",
                "session": f"s{session}",
                "turn": 0,
                "prompt_kind": "full",
                "prompt": passage,
                "output": passage,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    write(folder / "copying.jsonl")
    return folder


def run(traces: Path, tokenizer_file: Path, output: Path) -> int:
    flags = {"--traces": traces, "--tokenizer": tokenizer_file, "--output": output, "--epochs": 1}
    return main([str(part) for flag in flags.items() for part in flag])


def test_it_writes_a_predictor_that_says_where_it_comes_from(
    traces: Path, tokenizer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(traces / "private.jsonl", licence="MIT (repo); texts CC BY-NC 4.0")
    output = tmp_path / "predictor.safetensors"
    assert run(traces, tokenizer_file, output) == 0
    provenance = PayoffPredictor.load(output).provenance
    assert provenance["datasets"] == [
        {
            "dataset": "made up, MIT",
            "repository": "github.com/nobody/nothing",
            "licence": "MIT",
            "num_sessions": 8,
            "num_heldout_sessions": 2,
        }
    ]
    [heldout] = provenance["heldout"]  # type: ignore[misc]
    assert heldout["dataset"] == "made up, MIT"
    assert heldout["num_drafts"] > 0
    assert str(traces) not in json.dumps(provenance)
    report = capsys.readouterr().out
    assert "| copying | made up, MIT | " in report
    assert all(f"| {policy} | " in report for policy in ("payoff", "frequency", "cache", "model"))


def test_the_last_quarter_of_the_sessions_is_held_out(traces: Path) -> None:
    assert Recording.open(traces / "copying.jsonl").heldout_sessions == {"s6", "s7"}
    write(traces / "copying.jsonl", num_sessions=3)
    assert Recording.open(traces / "copying.jsonl").heldout_sessions == {"s2"}


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
def test_only_permissive_recordings_are_used(
    traces: Path, licence: str, is_permissive: bool
) -> None:
    write(traces / "copying.jsonl", licence=licence)
    assert Recording.open(traces / "copying.jsonl").is_permissive is is_permissive


def test_what_is_missing_is_said_in_one_line(
    traces: Path, tokenizer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "predictor.safetensors"
    empty = tmp_path / "empty"
    empty.mkdir()
    blank = tmp_path / "blank"
    blank.mkdir()
    (blank / "blank.jsonl").touch()
    for bad_traces, bad_tokenizer, bad_output, says in (
        (empty, tokenizer_file, output, "no traces (*.jsonl) with a permissive licence"),
        (blank, tokenizer_file, output, "blank.jsonl: no traces"),
        (traces, tmp_path / "missing.json", output, "cannot read the tokenizer"),
        (traces, tokenizer_file, tmp_path / "missing" / "p", "no folder to write it to"),
    ):
        assert run(bad_traces, bad_tokenizer, bad_output) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert says in line
    assert not output.exists()
