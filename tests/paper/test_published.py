"""The paper's figures, quoted a second time by hand: by column and as the text says them."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.workloads.paper import PAPER
from sglang_hvd.paper import published

# Table 1 of the paper by model and baseline, from the top row to the last before "Avg.".
COLUMNS = {
    ("qwen3-8b", "greedy"): "3.25 3.57 2.54 3.70 3.31 4.49 2.31 3.12 2.57 3.55 2.73 5.03 2.33 2.03 "
    "2.73 3.34",
    (
        "qwen3-8b",
        "eagle3",
    ): "1.44 1.51 1.09 1.09 1.08 1.17 .98 .97 .95 .95 .96 2.42 .94 .95 .97 .98",
    ("qwen3-8b", "suffix"): "2.14 2.30 2.15 3.21 3.79 4.78 3.13 2.98 3.77 2.88 3.28 3.04 3.85 3.36 "
    "3.84 4.68",
    ("qwen3-8b", "frequency"): "1.06 1.32 1.15 1.28 1.34 1.54 1.27 1.33 1.37 1.17 1.40 1.21 1.34 "
    "1.18 1.40 1.41",
    ("qwen3-4b", "greedy"): "3.40 4.21 3.57 2.50 1.73 2.73 2.19 1.56 2.03 2.12 2.01 5.53 1.79 1.52 "
    "2.06 1.59",
    ("qwen3-4b", "eagle3"): "1.90 2.67 1.56 1.08 1.02 .90 .98 1.01 .81 1.18 1.19 2.51 .99 1.01 .85 "
    ".99",
    ("qwen3-4b", "suffix"): "1.64 1.72 1.44 1.52 1.82 2.11 2.47 1.79 1.97 1.35 1.65 2.40 2.75 2.08 "
    "2.40 2.06",
    ("qwen3-4b", "frequency"): "1.18 1.22 .81 .88 .87 1.01 1.13 .88 1.02 1.05 .98 1.16 1.02 1.02 "
    ".83 .87",
    ("llama3.1-8b", "greedy"): "3.46 7.56 2.12 3.31 5.86 3.68 1.02 4.46 2.23 3.00 2.52 2.23 2.43 "
    ".95 3.14 3.24",
    ("llama3.1-8b", "eagle3"): "3.38 5.49 2.99 2.11 2.51 .99 .90 1.85 .93 3.22 1.04 2.84 .94 1.31 "
    ".96 1.18",
    (
        "llama3.1-8b",
        "suffix",
    ): ".81 1.15 1.09 2.60 4.28 4.65 1.32 3.61 2.70 1.15 2.49 1.47 3.83 .98 5.68 4.76",
    ("llama3.1-8b", "frequency"): "1.24 1.20 1.26 1.26 1.27 1.05 1.01 1.24 .96 1.97 .87 2.94 1.04 "
    "1.15 1.05 1.10",
}


def column(model: str, base: str) -> list[float]:
    place = list(published.MODELS).index(model), published.BASELINES.index(base)
    return [of.speedups[place[0]][place[1]] for of in published.DATA_SETS.values()]


@pytest.mark.parametrize(("model", "base"), COLUMNS)
def test_table_1_is_the_papers(model: str, base: str) -> None:
    assert column(model, base) == [float(text) for text in COLUMNS[model, base].split()]


@pytest.mark.parametrize(("model", "base"), COLUMNS)
def test_its_averages_are_the_arithmetic_means_of_its_columns(model: str, base: str) -> None:
    place = list(published.MODELS).index(model), published.BASELINES.index(base)
    assert published.AVERAGES[place[0]][place[1]] == pytest.approx(
        fmean(column(model, base)), abs=0.006
    )


def test_section_4_3_counts_the_same_cases() -> None:
    """Faster than greedy decoding in 47 of 48, than SuffixDecoding in 46; on average 2.97x, 2.64x.
    On agentic workflows 2.73x over EAGLE3 (abstract)."""
    greedy, suffix = (
        [value for model in published.MODELS for value in column(model, base)]
        for base in ("greedy", "suffix")
    )
    assert (len(greedy), sum(v > 1 for v in greedy), sum(v > 1 for v in suffix)) == (48, 47, 46)
    assert (fmean(greedy), fmean(suffix)) == pytest.approx((2.97, 2.64), abs=0.01)
    agentic = [column(model, "eagle3")[:2] for model in published.MODELS]
    assert fmean(value for pair in agentic for value in pair) == pytest.approx(2.73, abs=0.005)


def test_tables_11_to_13_are_the_papers() -> None:
    lines = {
        "qwen3-8b": "39.9 998.7 - - - / 109.5 240.2 3.16 0 100 / 42.1 397.8 1.51 97.6 0 / "
        "105 188.4 4.31 8 92 / 133 189.7 4.27 9.7 90.3",
        "qwen3-4b": "38.3 1000 - - - / 76.7 309.7 2.23 0 100 / 54.6 346.1 1.89 97.6 0 / "
        "104.5 223.9 3.47 8.2 91.8 / 101.1 228.6 3.37 8.8 91.2",
        "llama3.1-8b": "40.7 1000 - - - / 47.7 571 .75 0 100 / 78.2 264 2.79 93.9 0 / "
        "98.3 234.9 3.26 9.4 90.6 / 126.2 200.1 4 18.6 81.4",
    }
    for model, text in lines.items():
        quoted = [
            tuple(None if word == "-" else float(word) for word in line.split())
            for line in text.split("/")
        ]
        found = [
            (run.throughput, run.cycles, run.accepted, run.cache, run.eagle3)
            for run in published.RUNS[model].values()
        ]
        assert found == quoted
        assert list(published.RUNS[model]) == [*published.BASELINES, published.METHOD]


def test_figure_4_agrees_with_table_13() -> None:
    """The text rounds the cycles, and the product of both is the time of 1000 tokens."""
    assert published.BREAKDOWN == {
        "eagle3": (571, 36.7),
        "suffix": (264, 48.4),
        "frequency": (235, 43.3),
        "hvd-paper": (200, 39.6),
    }
    for mode, (cycles, cycle_ms) in published.BREAKDOWN.items():
        run = published.RUNS[published.BREAKDOWN_MODEL][mode]
        assert round(run.cycles) == cycles
        assert 1e6 / (run.throughput * run.cycles) == pytest.approx(cycle_ms, abs=0.06)


def test_tables_2_to_4_and_figure_5_are_the_papers() -> None:
    selections = [
        (s.high, s.selected, s.precision, s.recall) for s in published.SELECTIONS.values()
    ]
    high, selected, precision, recall = zip(*selections, strict=True)
    assert (high, selected) == ((4.8, 6.6, 8.9), (3.8, 5.4, 8.1))
    assert (precision, recall) == ((78.2, 82.9, 87.6), (61.4, 67.8, 79.8))
    for of in selections:  # both are shares of the drafts that are selected and worth it
        assert of[1] * of[2] == pytest.approx(of[0] * of[3], rel=0.02)
    assert published.SERVED == {"mt-bench": (2.31, 1.21), "cnn-dailymail": (3.56, 1.16)}
    templates = {
        (template, mode): (run.accepted, run.cycles, run.throughput)
        for (template, mode), run in published.TEMPLATES.items()
    }
    assert templates == {
        ("none", "eagle3"): (1.20, 455, 55.6),
        ("official", "eagle3"): (4.21, 192, 134.4),
        ("none", "hvd-paper"): (7.32, 120, 194.2),
    }
    gpus = [(of.gpu, of.speedup, of.eagle3_cycles, of.method_cycles) for of in published.GPUS]
    assert gpus == [
        ("RTX 5090", 1.59, 260.0, 152.9),
        ("H100", 1.73, 257.1, 135.2),
        ("B200", 1.06, 256.8, 230.3),
    ]


def test_the_data_sets_are_those_of_the_benchmark() -> None:
    names = {workload.name: workload.family for workload in PAPER}
    assert {name: of.family for name, of in published.DATA_SETS.items()} == names
    assert list(published.DATA_SETS) == [workload.name for workload in PAPER]
