"""The paper's tables of speed for a run that is easy to work out by hand."""

from __future__ import annotations

from sglang_hvd.paper import published
from sglang_hvd.paper.rounds import Measured, Missing
from sglang_hvd.paper.speed_tables import (
    breakdown,
    loads,
    machines,
    other_models,
    runs,
    runs_by_data_set,
    served,
    speedups,
    templates,
)
from sglang_hvd.paper.table_values import Quoted, RunData, Table, TableRow
from tests.paper.made_up import CPU, FAMILIES, LABELS, SPEEDS, data_set, measurement, result


def row(table: Table, name: str, number: int = 0) -> TableRow:
    return [one for one in table.rows if one.name == name and one.cells][number]


def shown(table: Table, name: str, number: int = 0) -> list[float | str]:
    """Each cell as the page shows it, spreads left out."""
    cells: list[float | str] = []
    for cell, column in zip(row(table, name, number).cells, table.columns, strict=True):
        if isinstance(cell, Missing):
            cells.append(cell.why)
        else:
            scale = column.scale if isinstance(cell, Measured) else 1
            cells.append(round(scale * cell.value, column.decimals))
    return cells


def columns(table: Table) -> list[str]:
    return [f"{column.group}: {column.head}" for column in table.columns]


def test_table_1_has_both_methods_and_the_paper_over_each_baseline() -> None:
    table = speedups(RunData.of(result()))
    assert columns(table)[:3] == [
        "over Greedy: HVD (paper)",
        "over Greedy: HVD (allocate)",
        "over Greedy: paper",
    ]
    assert shown(table, "MBPP") == [
        *(2.0, 2.4, 4.49),
        *(1.33, 1.6, 1.17),
        *(2.5, 3.0, 4.78),
        *(1.25, 1.5, 1.54),
        0.0,
    ]
    assert shown(table, "RepoBench")[:3] == ["not run", "not run", 2.54]
    assert shown(table, "Arithmetic mean (paper: of 16)")[:6] == [2.0, 2.4, 3.16, 1.33, 1.6, 1.15]
    assert shown(table, "Arithmetic mean (paper: of 16)")[-1] == "\u2013"


def test_table_1_has_means_of_families_and_of_all() -> None:
    measured = [
        measurement(mode, name, speed=SPEEDS[mode] * (4 if (mode, name) == fast else 1))
        for mode in LABELS
        for name in FAMILIES
        for fast in [("hvd", "infinitebench")]
    ]
    table = speedups(RunData.of(result(measurements=tuple(measured))))
    families = [one.name for one in table.rows if not one.cells]
    assert families == [
        *dict.fromkeys(of.family for of in published.DATA_SETS.values()),
        *["all data sets"],
    ]
    # Only long-context has two data sets: 9.6 and 2.4. The other mean is that of all.
    means = [shown(table, "Geometric mean", i)[1] for i in range(2)]
    assert means == [4.8, round(2.4 * 4 ** (1 / 5), 2)]
    assert len([one for one in table.rows if one.is_mean]) == 3


def test_rows_of_which_nothing_was_measured_stand_apart() -> None:
    kept, rest = speedups(RunData.of(result(["mbpp"], ["greedy", "hvd"]))).split()
    assert [one.name for one in kept.rows] == [
        *("code / repository", "MBPP"),
        *("all data sets", "Geometric mean", "Arithmetic mean (paper: of 16)"),
    ]
    assert len([one for one in rest.rows if one.cells]) == len(published.DATA_SETS) - 1
    assert columns(kept)[:2] == ["over Greedy: HVD (allocate)", "over Greedy: paper"]
    served_kept, served_rest = served(RunData.of(result(["mbpp"]))).split()
    assert (len(served_kept.rows), len(served_rest.rows)) == (0, 2)
    assert not machines([RunData.of(result())]).split()[1].rows


def test_a_slower_method_shows_as_slower() -> None:
    slow = [measurement(m, "mbpp", speed=50 if m == "hvd" else None) for m in LABELS]
    assert shown(speedups(RunData.of(result(["mbpp"], measurements=tuple(slow)))), "MBPP")[:2] == [
        2.0,
        0.5,
    ]


def test_rows_say_what_their_figures_come_from() -> None:
    sets = (data_set("mbpp", is_sample=True), data_set("mt-bench"))
    on_cpu = RunData.of(result(["mbpp", "mt-bench"], machine=CPU, data_sets_of=sets))
    table = speedups(on_cpu)
    assert row(table, "MBPP").marks == ("sample", "no GPU")
    assert row(table, "MT-Bench").marks == ("no GPU",)
    assert row(table, "RepoBench").marks == ()
    assert row(table, "Geometric mean").marks == ("some samples", "no GPU")
    assert row(runs(on_cpu), "EAGLE3").marks == ("some samples", "no GPU")
    on_gpu = RunData.of(result(["mbpp", "mt-bench"]))
    assert {mark for one in speedups(on_gpu).rows for mark in one.marks} == set()


def test_a_data_set_that_the_paper_does_not_have_has_a_row() -> None:
    table = speedups(RunData.of(result(["code-edit"], model="demo")))
    assert shown(table, "code-edit")[:3] == [2.0, 2.4, "\u2013"]


def test_tables_11_to_13_have_all_data_sets_together() -> None:
    table = runs(RunData.of(result()))
    assert table.name == "Table 11"
    assert shown(table, "Greedy") == [
        *(100.0, 1000.0, *["\u2013"] * 5),
        *(39.9, 998.7, "\u2013", "\u2013", "\u2013"),
    ]
    assert shown(table, "HVD (paper)") == [
        *(200.0, 300.0, 2.33, 26.7, 73.3, 0.0, 0.0),
        *(133.0, 189.7, 4.27, 9.7, 90.3),
    ]
    assert shown(table, "HVD (allocate)")[-5:] == ["\u2013"] * 5
    assert columns(table)[6] == "this run: none, %"
    spread = row(table, "Greedy").cells[0]
    assert isinstance(spread, Measured)
    assert (round(spread.low), round(spread.high), spread.num_rounds) == (90, 110, 3)


def test_the_table_is_that_of_the_model() -> None:
    of_llama = RunData.of(result(model="llama3.1-8b"))
    assert runs(of_llama).name == "Table 13"
    assert shown(runs(of_llama), "EAGLE3")[7] == 47.7
    assert [table.name for table in other_models(of_llama)] == ["Table 11", "Table 12"]
    of_demo = RunData.of(result(model="demo"))
    assert runs(of_demo).name == "Tables 11 to 13"
    assert [table.name for table in other_models(of_demo)] == ["Table 11", "Table 12", "Table 13"]
    quoted = {type(c) for t in other_models(of_demo) for r in t.rows for c in r.cells}
    assert quoted == {Quoted, Missing}


def test_a_mode_that_lacks_a_data_set_does_not_change_what_is_compared() -> None:
    kept = result(["mbpp", "mt-bench"])
    fewer = tuple(
        one for one in kept.measurements if (one.mode, one.data_set) != ("suffix", "mbpp")
    )
    table = runs(RunData.of(kept.model_copy(update={"measurements": fewer})))
    assert "MT-Bench" in table.caption
    assert "MBPP" not in table.caption


def test_each_data_set_has_its_own_figures_and_latencies() -> None:
    table = runs_by_data_set(RunData.of(result(["mbpp"])))
    assert [one.name for one in table.rows if not one.cells] == ["MBPP"]
    assert shown(table, "EAGLE3") == [150.0, 500.0, 1.0, 0.0, 100.0, 0.0, 0.0, 20.0, 5.0]


def test_table_3_has_the_two_served_data_sets() -> None:
    table = served(RunData.of(result()))
    assert shown(table, "MT-Bench") == [1.33, 1.6, 2.31, 2.5, 3.0, 1.21]
    assert shown(table, "CNN/DailyMail") == [1.33, 1.6, 3.56, 2.5, 3.0, 1.16]


def test_table_4_has_the_template_and_none() -> None:
    kept = result(["mt-bench"])
    without = (
        measurement("eagle3", "mt-bench", template="none", speed=75, num_cycles=800),
        measurement("hvd-paper", "mt-bench", template="none", speed=220),
    )
    run = RunData.of(kept.model_copy(update={"measurements": (*kept.measurements, *without)}))
    table = templates(run)
    assert shown(table, "EAGLE3, template omitted") == [0.62, 800, 75.0, 1.2, 455, 55.6]
    assert shown(table, "EAGLE3, official template") == [1.0, 500, 150.0, 4.21, 192, 134.4]
    assert shown(table, "HVD (paper), template omitted")[2:] == [220.0, 7.32, 120, 194.2]
    assert shown(table, "HVD (allocate), template omitted")[:3] == ["not run"] * 3


def test_figure_4_multiplies_to_the_time_of_a_token() -> None:
    table = breakdown(RunData.of(result()))
    cycles, cycle_ms, *paper = shown(table, "HVD (paper)")
    assert isinstance(cycles, float)
    assert isinstance(cycle_ms, float)
    assert abs(cycles * cycle_ms - 1e6 / SPEEDS["hvd-paper"]) < 5
    assert paper == [200.0, 39.6]


def test_figure_5_has_a_row_for_each_machine() -> None:
    table = machines([RunData.of(result()), RunData.of(result(["mbpp"], machine=CPU))])
    assert shown(table, "NVIDIA H100 80GB HBM3: InfiniteBench") == [
        *(150.0, 500.0, 200.0, 300.0, 240.0, 260.0),
        *(1.33, 1.6),
    ]
    assert row(table, "AMD EPYC, 2 cores: MBPP").marks == ("no GPU",)
    assert shown(table, "RTX 5090")[1::2] == [260.0, 152.9, "\u2013", "\u2013"]
    assert shown(table, "B200")[6] == 1.06


def test_loads_have_throughput_speedup_and_percentiles() -> None:
    more = [
        measurement(mode, "mbpp", concurrency=8, speed=4 * SPEEDS[mode], **given)
        for mode in ("greedy", "hvd")
        for given in ({}, {"rate": 2.5, "ttft_ms": (1.0, 2.0, 3.0), "tpot_ms": None})
    ]
    table = loads(RunData.of(result(["mbpp"], ["greedy", "hvd"], measurements=tuple(more))))
    headings = [one.name for one in table.rows if not one.cells]
    assert headings == ["8 requests at a time", "2.5 requests per second"]
    assert shown(table, "HVD (allocate)", 0) == [960.0, 2.4, 20.0, 40.0, 60.0, 5.0, 6.0, 9.0]
    assert shown(table, "HVD (allocate)", 1)[2:] == [1.0, 2.0, 3.0, *["\u2013"] * 3]
