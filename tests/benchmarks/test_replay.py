"""The benchmark of policies under cost tables, on small made-up recordings."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import run
from benchmarks.replay.__main__ import main

COSTS = (
    "{about: made up, batch_sizes: [1, 4], widths: [1, 64], verify: [[10, 12], [10, 20]], "
    "draft_round: [0.5, 0.5], draft_extend: [[1, 1], [1, 1]]}"
)
ASKED_FOR = {
    *("file", "family", "costs", "policy", "tokens_per_ms", "cycles_per_1k", "mean_accepted"),
    *("cache_share", "regret_to_oracle"),
}


@pytest.fixture
def flags(made_up_traces: Path, number_tokenizer: Path, tmp_path: Path) -> list[str]:
    costs = tmp_path / "costs.yaml"
    costs.write_text(COSTS)
    given = ("--traces", made_up_traces, "--tokenizer", number_tokenizer, "--costs", costs)
    more = ("--processes", 1, "--tokens", 200, "--tokens-per-request", 16)
    return [*map(str, (*given, *more))]


def rows_of(flags: list[str], folder: Path, *more: str) -> list[dict[str, Any]]:
    found = folder / "rows.json"
    assert main([*flags, "--json", str(found), *more]) == 0
    rows: list[dict[str, Any]] = json.loads(found.read_text())
    return rows


def test_every_policy_has_its_best_setting_and_its_regret(flags: list[str], tmp_path: Path) -> None:
    rows = rows_of(flags, tmp_path, "--batch-sizes", "1", "4", "--thresholds", "2", "4")
    assert all(set(row) >= ASKED_FOR for row in rows)
    by_key = {
        (row["file"], row["batch_size"], row["model_drafter"], row["policy"]): row for row in rows
    }
    cells = {key[:3] for key in by_key}
    assert {file for file, _, _ in cells} == {"copying", "other"}
    assert len(cells) == 2 * 2 * 2
    for cell in cells:
        assert by_key[*cell, "model"]["speedup_vs_model"] == 1
        assert by_key[*cell, "oracle"]["regret_to_oracle"] == 0
        # Nothing is paid twice as wide for copies of one token.
        assert by_key[*cell, "cache"]["tokens_per_ms"] > by_key[*cell, "plain"]["tokens_per_ms"]
    for file, batch_size, _ in cells:
        for policy in ("plain", "cache"):  # these have no model drafter, whatever is drawn for it
            kinds = ("usual, independent", "usual, correlated")
            first, second = (by_key[file, batch_size, kind, policy] for kind in kinds)
            assert first["tokens_per_ms"] == second["tokens_per_ms"]
            assert first["setting"].split(", ")[1] == second["setting"].split(", ")[1]


def test_where_steps_wait_for_the_host_some_need_not(flags: list[str], tmp_path: Path) -> None:
    more = ("--batch-sizes", "4", "--kinds", "correlated", "--policies", "plain", "cache")
    several = (*more, "allocate", "allocate, waits")
    speeds = {
        (wait, row["file"], row["policy"]): row["tokens_per_ms"]
        for wait in ("0", "50")
        for row in rows_of(flags, tmp_path, *several, "--wait", wait)
    }
    for file in ("copying", "other"):
        assert ("0", file, "allocate, waits") not in speeds
        assert speeds["50", file, "plain"] == speeds["0", file, "plain"]
        assert speeds["50", file, "cache"] < 0.6 * speeds["0", file, "cache"]
        assert speeds["50", file, "allocate"] > 0.85 * speeds["50", file, "plain"]
        assert speeds["50", file, "allocate, waits"] < speeds["0", file, "allocate"]


def test_seeds_draw_other_drafts(flags: list[str], tmp_path: Path) -> None:
    more = ("--batch-sizes", "1", "--kinds", "independent", "--policies", "cache", "payoff")
    once, twice = (rows_of(flags, tmp_path, *more, "--seeds", seeds) for seeds in ("1", "2"))
    # The first one decides which settings are shown.
    of_setting = [[(row["policy"], row["setting"]) for row in rows] for rows in (once, twice)]
    assert of_setting[0] == of_setting[1]
    of_model = [[row for row in rows if row["policy"] == "model"] for rows in (once, twice)]
    assert all(row["seed_spread"] == 0 for row in of_model[0])
    assert all(0 < row["seed_spread"] < 1 for row in of_model[1])


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--json", str(tmp_path / "gone" / "rows.json")])
    assert "there is no folder" in capsys.readouterr().err


def test_mistakes_end_in_one_line(flags: list[str], tmp_path: Path) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("{verify: 10}")
    with pytest.raises(SystemExit, match=r"^error: .*costs\.yaml.*about"):
        run(lambda: main(flags))
