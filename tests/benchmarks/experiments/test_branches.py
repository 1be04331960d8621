"""The experiment with branches of cache drafts, on small made-up recordings."""

import json
from pathlib import Path

from benchmarks.experiments.branches import SIZES, main


def test_larger_drafts_have_more_accepted(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    found = tmp_path / "rows.json"
    given = ("--traces", made_up_traces, "--tokenizer", number_tokenizer)
    assert main([*map(str, given), "--starts", "20", "--json", str(found)]) == 0
    rows = {row["file"]: row for row in json.loads(found.read_text())}
    assert set(rows) == {"copying", "other"}
    for row in rows.values():
        assert 0 < row["starts"] <= 20
        for drafts in ("chain", "tree"):
            accepted = row[drafts]
            assert accepted == sorted(accepted)
            # Copies of the prompt, except every seventeenth token.
            assert 1 < accepted[0] <= SIZES[0]
            assert SIZES[1] / 2 < accepted[2] < SIZES[2]
