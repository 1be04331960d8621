"""The experiment with average precision by policy, on small made-up recordings."""

import json
from pathlib import Path

from benchmarks.experiments.deciders import main


def test_a_policy_that_verifies_copies_has_fewer_drafts_inside_them(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    found = tmp_path / "rows.json"
    given = ("--traces", made_up_traces, "--tokenizer", number_tokenizer)
    assert main([*map(str, given), "--json", str(found)]) == 0
    rows = {(row["decides"], row["predictor"]): row for row in json.loads(found.read_text())}
    assert {predictor for _, predictor in rows} == {"default", "mlp", "frequency"}
    always, never = rows["cache always", "default"], rows["model drafter always", "default"]
    assert 0 < always["num_drafts"] < never["num_drafts"]
    assert 0 < rows["allocate", "default"]["num_drafts"] < never["num_drafts"]
    assert 0 < never["average_precision"] < 1
