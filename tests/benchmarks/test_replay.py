"""The benchmark of policies under cost tables, on small made-up recordings."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import run
from benchmarks.replay.__main__ import main
from benchmarks.replay.disturbed import DISTURBANCES
from benchmarks.replay.rows import Row, plain_table_of, summary_of

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


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


SPEEDS = {
    # By file: code, chat, chat.
    "model": (1.0, 2.0, 4.0),
    "plain": (1.0, 1.0, 4.0),
    "payoff": (2.0, 3.0, 4.0),
    "allocate": (3.0, 3.0, 3.0),
    "oracle": (4.0, 4.0, 4.0),
}


def made_up_rows(batch_size: int) -> list[Row]:
    return [
        Row(
            **{"file": f"f{number}", "family": "chat" if number else "code", "costs": "made up"},
            **{"batch_size": batch_size, "model_drafter": "usual", "policy": policy},
            **{"setting": "", "tokens_per_ms": speed, "cycles_per_1k": 0, "mean_accepted": 0},
            **{"cache_share": 0, "both_share": 0, "seed_spread": 0},
            **{"num_sessions": 1, "num_text_tokens": 100},
        )
        for policy, speeds in SPEEDS.items()
        for number, speed in enumerate(speeds)
    ]


def test_the_last_table_has_all_cells_and_figures_of_single_files() -> None:
    header, _, *lines = summary_of([*made_up_rows(1), *made_up_rows(8)]).splitlines()
    assert cells_of(header) == ["tokens/ms over model", "1, usual", "8, usual"]
    assert [cells_of(line) for line in lines] == [
        ["model", "1.00", "1.00"],
        ["plain", "0.88", "0.88"],
        ["payoff", "1.62", "1.62"],
        ["allocate", "2.06", "2.06"],
        ["oracle", "2.75", "2.75"],
        ['regret of "allocate" to "oracle"', "0.250", "0.250"],
        ["allocate over the best other policy, worst file", "0.75", "0.75"],
        ["files of 3 below 0.98", "1", "1"],
    ]


def test_speeds_over_plain_serving_are_shown_by_family_and_for_the_lowest_file() -> None:
    lines = plain_table_of(made_up_rows(1)).splitlines()
    assert cells_of(lines[0]) == ["tokens/ms over plain", "mean", "lowest file", "code", "chat"]
    assert cells_of(lines[5]) == ["allocate", "2.44", "0.75", "3.00", "1.88"]


def test_every_policy_has_its_best_setting_and_its_regret(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(flags, tmp_path, "--batch-sizes", "1", "4", "--thresholds", "2", "4")
    summary = capsys.readouterr().out.split("\ncosts\n\n")[1].splitlines()
    assert cells_of(summary[0])[1:3] == ["1, usual, independent", "1, usual, correlated"]
    assert cells_of(summary[-1])[0] == "files of 2 below 0.98"
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
        # Wider verifications cost little here, and copies have many tokens accepted.
        assert by_key[*cell, "cache"]["tokens_per_ms"] > by_key[*cell, "plain"]["tokens_per_ms"]
    for file, batch_size, _ in cells:
        for policy in ("plain", "cache"):  # these have no model drafter, whatever is drawn for it
            kinds = ("usual, independent", "usual, correlated")
            first, second = (by_key[file, batch_size, kind, policy] for kind in kinds)
            assert first["tokens_per_ms"] == second["tokens_per_ms"]
            assert first["setting"].split(", ")[1] == second["setting"].split(", ")[1]


def test_some_steps_need_not_wait_for_the_host(flags: list[str], tmp_path: Path) -> None:
    more = ("--batch-sizes", "4", "--kinds", "correlated", "--policies", "plain", "cache")
    speeds = {
        (wait, row["file"], row["policy"]): row["tokens_per_ms"]
        for wait, waiting in (("0", ()), ("50", ("allocate, waits",)))
        for row in rows_of(flags, tmp_path, *more, "allocate", *waiting, "--wait", wait)
    }
    for file in ("copying", "other"):
        assert speeds["50", file, "plain"] == speeds["0", file, "plain"]
        assert speeds["50", file, "cache"] < 0.6 * speeds["0", file, "cache"]
        assert speeds["50", file, "allocate"] > 0.85 * speeds["50", file, "plain"]
        assert speeds["50", file, "allocate, waits"] < speeds["0", file, "allocate"]


def test_a_server_with_a_wrong_table_learns_the_right_one(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(DISTURBANCES)
    more = ("--batch-sizes", "2", "--kinds", "correlated", "--tokens", "1500")
    rows = rows_of(
        flags, tmp_path, *more, "--disturbed", *names, "--documents", "other", "--wait", "1"
    )
    table = capsys.readouterr().out.splitlines()
    assert [row["policy"] for row in rows if row["file"] == "other"] == ["allocate", *names]
    assert [line.split(" | ")[0] for line in table[-len(names) :]] == [f"| {n}" for n in names]
    speeds = {(row["file"], row["policy"]): row["tokens_per_ms"] for row in rows}
    for file in ("copying", "other"):
        right = speeds[file, "allocate"]
        for name in names:
            assert speeds[file, name] > 0.9 * right, (file, name)


def test_seeds_draw_other_drafts(flags: list[str], tmp_path: Path) -> None:
    more = ("--batch-sizes", "1", "--kinds", "independent", "--policies", "cache", "payoff")
    once, twice = (rows_of(flags, tmp_path, *more, "--seeds", seeds) for seeds in ("1", "2"))
    # The first seed decides which settings are shown.
    of_setting = [[(row["policy"], row["setting"]) for row in rows] for rows in (once, twice)]
    assert of_setting[0] == of_setting[1]
    of_model = [[row for row in rows if row["policy"] == "model"] for rows in (once, twice)]
    assert all(row["seed_spread"] == 0 for row in of_model[0])
    assert all(0 < row["seed_spread"] < 1 for row in of_model[1])


def test_a_missing_folder_is_reported_before_anything_is_measured(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--json", str(tmp_path / "gone" / "rows.json")])
    assert "there is no folder" in capsys.readouterr().err


def error_of(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that reports a mistake."""
    with pytest.raises(SystemExit, match="2"):
        run(lambda: main(flags))
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line


def test_mistakes_end_in_one_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--batch-sizes", "--tokens", "--tokens-per-request", "--seeds", "--processes"):
        line = error_of([*flags, flag, "0"], capsys)
        assert f"argument {flag}: a whole number from 1 on, got 0" in line
    for flag in ("--wait", "--thresholds", "--size-effect", "--spread"):
        assert f"argument {flag}: at least 0, got -5" in error_of([*flags, flag, "-5"], capsys)
    line = error_of([*flags, "--disturbed", "contexts change"], capsys)
    assert "--documents: give one of the recordings, copying, other, got None" in line
    costs = tmp_path / "costs.yaml"
    asked = [*flags, "--policies", "plain", "allocate, waits"]
    assert '"allocate, waits" equals "allocate" with a table that has no wait' in error_of(
        asked, capsys
    )
    other = tmp_path / "other" / "costs.yaml"
    other.parent.mkdir()
    other.write_text(COSTS.replace("10, 12", "5, 6"))
    line = error_of([*flags, "--costs", str(costs), str(other)], capsys)
    assert "--costs: rows would call two tables costs" in line
    costs.write_text("{verify: 10}")
    assert "costs.yaml: cost table: about: " in error_of(flags, capsys)
