"""Printed tables."""

from dataclasses import replace

from sglang_hvd.replay.core.policies import PolicyResult
from sglang_hvd.replay.core.recordings import MEAN
from sglang_hvd.replay.training.evaluate import Evaluation
from sglang_hvd.replay.training.quality import PayoffQuality
from sglang_hvd.replay.training.tables import evaluation_table, policy_table

_RESULT = PolicyResult("b", "f", "payoff", 250.0, *[0.5] * 6, None, None)
_QUALITY = PayoffQuality(1200, *[0.5] * 9)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]


def test_columns_are_aligned() -> None:
    results = [_RESULT, replace(_RESULT, file="a name that is long", cycles_per_1k_tokens=1.5)]
    lines = policy_table(results).splitlines()
    places = [[at for at, sign in enumerate(line) if sign == "|"] for line in lines]
    assert places.count(places[0]) == len(lines) == 4
    assert " 1.500 |" in lines[2]
    assert "250.000 |" in lines[3]


def test_rows_are_sorted_by_file_and_means_come_last() -> None:
    results = [
        replace(_RESULT, file=file, policy=policy)
        for policy in ("payoff", "cache")
        for file in ("b", "z", MEAN, "a")
    ]
    rows = [cells(line)[:2] for line in policy_table(results).splitlines()[2:]]
    files = ["a", "b", "z", MEAN]
    assert rows == [[file, policy] for file in files for policy in ("payoff", "cache")]


def test_drafts_of_a_mean_are_those_of_all_files() -> None:
    evaluations = [
        Evaluation(file, "", "votes", "default", "cycle", replace(_QUALITY, num_drafts=num))
        for file, num in (("a", 10), (MEAN, 30))
    ]
    assert [cells(line)[3] for line in evaluation_table(evaluations).splitlines()[2:]] == [
        "10",
        "30 in all",
    ]


def test_a_bar_in_a_name_makes_no_column() -> None:
    head, _, row = policy_table([replace(_RESULT, file="a|b")]).splitlines()
    assert "a\\|b" in row
    assert len(cells(row)) == len(cells(head))
