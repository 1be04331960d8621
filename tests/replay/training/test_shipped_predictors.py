"""The shipped predictors, judged by the current code on sessions that they were not trained on."""

import json
from pathlib import Path

import pytest

from sglang_hvd.cli import main
from sglang_hvd.config import CacheMode
from sglang_hvd.payoff import DEFAULT_PREDICTORS, AcceptancePredictor
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings, session_fingerprints

# Short recordings of two families. Their sessions are split like those of all recordings.
FILES = ("structured_tool__spider_intercode_gpt4", "multihop_qa__hotpotqa_react_reflexion")


@pytest.mark.parametrize("mode", ["votes", pytest.param("paper", marks=pytest.mark.slow)])
def test_the_shipped_predictor_knows_more_than_the_papers_and_the_score(
    traces_dir: Path, tokenizer_file: Path, tmp_path: Path, mode: CacheMode
) -> None:
    folder, found = tmp_path / "traces", tmp_path / "rows.json"
    folder.mkdir()
    for name in FILES:
        (folder / f"{name}.jsonl").symlink_to(traces_dir.resolve() / f"{name}.jsonl")
    flags = ["--traces", folder, "--tokenizer", tokenizer_file, "--cache-mode", mode]
    assert main(["evaluate", *map(str, flags), "--processes", "1", "--json", str(found)]) == 0
    rows = {
        (row["file"], row["at"], row["predictor"]): row for row in json.loads(found.read_text())
    }
    trained_on = AcceptancePredictor.load(DEFAULT_PREDICTORS[mode]).trained_sessions
    tokenizer = TraceTokenizer(tokenizer_file, None)
    for recording in find_recordings(folder):
        sessions = set(session_fingerprints(recording.traces(tokenizer)).values())
        # Training held out a quarter; it must recognise the other sessions.
        assert 0.7 < len(sessions & trained_on) / len(sessions) < 0.85
    assert {file for file, _, _ in rows} == {*FILES, "mean"}
    for at in ("cycle", "position"):
        ours, papers, score = (
            rows["mean", at, name]["average_precision"] for name in ("default", "mlp", "frequency")
        )
        # Loose bounds: wrong features or weights give about the oracle share, .1 to .2.
        assert ours > 0.4
        assert ours > papers + 0.03
        assert ours > score
