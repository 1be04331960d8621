"""The page is sound markup, safe with any text, has all figures, and says what it lacks."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from sglang_hvd.paper.result_page import sentences, write_page
from sglang_hvd.paper.results import Mode, Result
from sglang_hvd.paper.table_values import RunData
from tests.paper.made_up import (
    CPU,
    LABELS,
    SPEEDS,
    data_set,
    measurement,
    result,
    selection,
)
from tests.replay.report.test_page import HOSTILE, SVG, cells, parse

MADE = "sglang-hvd report"


def whole(**given: object) -> Result:
    """A run with all that a page can show."""
    kept = result(**given)
    names = [one.name for one in kept.data_sets]
    more = [
        *(
            measurement(mode, name, concurrency=8, speed=3 * SPEEDS[mode])
            for mode in LABELS
            for name in names
        ),
        *(
            measurement(mode, name, concurrency=32, rate=rate, speed=60 * rate)
            for mode in ("greedy", "hvd")
            for name in names
            for rate in (1.0, 4.0)
        ),
        *(measurement(mode, "mt-bench", template="none") for mode in ("eagle3", "hvd-paper")),
    ]
    return kept.model_copy(update={"measurements": (*kept.measurements, *more)})


@pytest.fixture(scope="module")
def page() -> str:
    return write_page([whole()], command=MADE)


def text_of(page: str) -> str:
    return " ".join("".join(parse(page).itertext()).split())


def said_of(*results: Result) -> str:
    """The sentences at the top of the page."""
    return " ".join(sentences([RunData.of(one) for one in results]))


def table_of(tree: ElementTree.Element, name: str) -> ElementTree.Element:
    return next(
        one for one in tree.iter("table") if one.get("aria-label", "").startswith(f"{name}.")
    )


def test_each_table_and_figure_of_the_paper_has_its_counterpart(page: str) -> None:
    tree = parse(page)
    for name in (
        *("Table 1", "Table 2", "Table 3", "Table 4", "Table 11", "Table 12", "Table 13"),
        *("Figure 2", "Figure 3", "Figure 4", "Figure 5"),
    ):
        assert len(list(table_of(tree, name).iter("tr"))) > 3, name


def test_the_run_and_the_paper_stand_in_one_row(page: str) -> None:
    rows = {
        "".join(row[0].itertext()): ["".join(cell.itertext()) for cell in row[1:]]
        for table in parse(page).iter("table")
        if table.get("aria-label", "").startswith("Table 1.")
        for row in table.iter("tr")
        if len(row) > 1
    }
    assert rows["MBPP"][:6] == ["2.00", "2.40", "4.49", "1.33", "1.60", "1.17"]
    assert rows["Spider"][:3] == ["not run", "not run", "3.12"]


def test_tables_tell_screen_readers_what_their_cells_are(page: str) -> None:
    tree = parse(page)
    for table in tree.iter("table"):
        assert table.get("aria-label")
        [head] = table.iter("thead")
        widths = {sum(int(cell.get("colspan", 1)) for cell in row) for row in table.iter("tr")}
        assert len(widths) == 1, table.get("aria-label")
        assert all(cell.get("scope") for cell in head.iter("th"))
        for body in table.iter("tbody"):
            for row in body.iter("tr"):
                assert row[0].tag == "th"
                assert row[0].get("scope") in ("row", "rowgroup")
    regions = [one for one in tree.iter("div") if one.get("class") == "scroll"]
    assert len(regions) == len(list(tree.iter("table")))
    assert {(one.get("role"), one.get("tabindex")) for one in regions} == {("region", "0")}


def test_every_plot_is_there_and_named(page: str) -> None:
    tree = parse(page)
    plots = [svg for svg in tree.iter(f"{SVG}svg") if svg.get("role") == "img"]
    assert len(plots) == len(list(tree.iter("figcaption"))) == 16
    assert all(svg.get("aria-label") for svg in plots)
    ids = [
        element.attrib["id"] for svg in plots for element in svg.iter() if "id" in element.attrib
    ]
    assert len(ids) == len(set(ids))
    for svg in plots:
        width, height = map(float, svg.attrib["viewBox"].split()[2:])
        for text in svg.iter(f"{SVG}text"):
            if "x" not in text.attrib:  # of several lines, which are moved together
                continue
            assert 0 <= float(text.attrib["x"]) <= width
            assert 0 <= float(text.attrib["y"]) <= height


def test_the_page_says_first_what_the_run_shows(page: str) -> None:
    said = text_of(page)
    assert (
        "HVD (allocate) decodes 2.40 times as fast as greedy decoding and 1.60 times as fast as "
        "EAGLE3 (geometric mean of 5 data sets). It ran on NVIDIA H100 80GB HBM3 with 5 of the "
        "paper's 16 data sets, one request at a time."
    ) in said


def test_a_slower_run_says_so() -> None:
    slow = [measurement(m, "mbpp", speed=50 if m == "hvd" else None) for m in LABELS]
    said = said_of(result(["mbpp"], measurements=tuple(slow)))
    assert "decodes 0.50 times as fast as greedy decoding and 0.33 times as fast as EAGLE3" in said


def test_a_run_of_the_papers_method_alone_says_how_fast_that_is() -> None:
    kept = result(["mbpp"], ["greedy", "hvd-paper"])
    assert "HVD (paper) decodes 2.00 times as fast as greedy decoding (one data set)." in said_of(
        kept
    )


def test_a_mean_over_fewer_data_sets_says_so() -> None:
    kept = result(["mbpp", "mt-bench"], ["greedy", "hvd"])
    fewer = tuple(m for m in kept.measurements if (m.mode, m.data_set) != ("hvd", "mbpp"))
    said = said_of(kept.model_copy(update={"measurements": fewer}))
    assert "times as fast as greedy decoding (geometric mean of 1 of 2 data sets)." in said


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        *(
            ({"data_sets": (data_set("mbpp", **fields),)}, "data sets")
            for fields in (
                *({"revision": "other"}, {"source": "mine.jsonl"}),
                *({"num_measured": 5}, {"num_warm_up": 5}, {"signs": {"paths": 9.0}}),
            )
        ),
        ({"versions": {"sglang": "0.5.24"}}, "versions"),
        ({"modes": (Mode(name="hvd", label="HVD", flags=("--hvd-policy", "both")),)}, "modes"),
        ({"max_new_tokens": 64}, "max new tokens"),
        (
            {"measurements": (measurement("hvd", "mbpp", template="none"),)},
            "template",
        ),
    ],
)
def test_runs_say_what_differs(differs: dict[str, Any], told: str) -> None:
    first = result(["mbpp"], ["hvd"])
    other = first.model_copy(update=differs)
    assert said_of(first, other).endswith(f"than the machine: {told}.")


def test_runs_in_other_folders_are_the_same() -> None:
    runs = [
        result(["mbpp"]).model_copy(
            update={"modes": (Mode(name="hvd", label="HVD", flags=("--hvd-predictor", path)),)}
        )
        for path in ("/one/predictor.safetensors", "/another/predictor.safetensors")
    ]
    assert said_of(*runs).endswith(
        "All runs have the same prompts, seed, limits, flags and versions."
    )


def test_a_difference_within_the_noise_is_called_so() -> None:
    measured = [
        measurement(mode, "mbpp", number, speed=speed)
        for mode, speeds in {
            "greedy": (100, 110, 95),
            "eagle3": (100, 90, 108),
            "hvd": (103, 99, 105),
        }.items()
        for number, speed in enumerate(speeds)
    ]
    said = said_of(result(["mbpp"], measurements=tuple(measured)))
    assert said.startswith("No difference of HVD (allocate) from greedy decoding (1.03 times as")
    assert "fast, within the noise) and EAGLE3 (1.03" in said


def test_a_run_without_a_gpu_on_samples_says_what_it_is_worth() -> None:
    sets = (data_set("mbpp", is_sample=True), data_set("mt-bench"))
    kept = result(["mbpp", "mt-bench"], machine=CPU, model="demo", data_sets_of=sets)
    page = write_page([kept], command=MADE)
    assert (
        "No GPU was used and 1 of 2 data sets are made-up samples. The numbers show that the "
        "pipeline works. They do not show performance."
    ) in text_of(page)
    rows = [
        "".join(row[0].itertext())
        for table in parse(page).iter("table")
        for row in table.iter("tr")
        if row[0].get("scope") == "row"
    ]
    assert "MBPP sample, no GPU" in rows
    assert "Spider" in rows


def test_a_run_with_nothing_measured_has_a_page() -> None:
    empty = result(
        [],
        measurements=(),
        selections=(),
        training=None,
        is_complete=False,
    )
    said = text_of(write_page([empty], command=MADE))
    assert said_of(empty) in said
    assert said_of(empty).startswith("This run does not say how fast HVD (allocate) is. The run")
    assert "is not complete, so figures are missing" in said
    begun = result(["mbpp"], measurements=(), selections=(), training=None, is_complete=False)
    assert "not yet run" in text_of(write_page([begun], command=MADE))


def test_a_selection_without_drafts_has_a_page() -> None:
    nothing = selection(
        "mbpp", num_proposed=0, num_high=0, num_selected=0, num_both=0, calibration=()
    )
    said = text_of(write_page([result(["mbpp"], selections=(nothing,))], command=MADE))
    assert "The predictor selects 0 of 0 cache drafts" in said


def test_a_broken_measurement_is_listed_and_not_counted() -> None:
    kept = result(["mbpp"], ["greedy", "hvd"], {0: 1.0})
    broken = measurement("eagle3", "mbpp", error="CUDA out of memory")
    page = write_page(
        [kept.model_copy(update={"measurements": (*kept.measurements, broken)})], command=MADE
    )
    assert "CUDA out of memory" in cells(parse(page))
    assert "broke off" in cells(parse(page))


def test_a_cell_that_lacks_rounds_says_how_many_it_has() -> None:
    kept = result(["mbpp"])
    broken = tuple(
        one.model_copy(update={"error": "the server ended"})
        if (one.mode, one.round) == ("hvd", 1)
        else one
        for one in kept.measurements
    )
    tree = parse(write_page([kept.model_copy(update={"measurements": broken})], command=MADE))
    for name, said in (
        ("Table 1", "2.402 of 3 rounds"),
        ("Table 11", "252.0240.0 to 264.02 of 3 rounds"),
        ("Figure 2", "34.62 of 3 rounds"),
        ("Each data set", "20.02 of 3 rounds"),
        ("Loads", "20.02 of 3 rounds"),
    ):
        assert said in cells(table_of(tree, name)), name
    assert "of 3 rounds" not in text_of(write_page([kept], command=MADE))


def test_several_runs_begin_with_figure_5_and_say_how_they_differ() -> None:
    runs = [whole(), whole(machine=CPU, seed=7)]
    tree = parse(write_page(runs, command=MADE))
    topics = [one.text for one in tree.iter("p") if one.get("class") == "topic"]
    assert topics[0] == "Figure 5: machines"
    assert topics[1] == "Table 1: speedup, on NVIDIA H100 80GB HBM3"
    assert "Table 1: speedup, on AMD EPYC, 2 cores" in topics
    said = " ".join("".join(tree.itertext()).split())
    assert "The runs differ in more than the machine: seed." in said
    assert (
        "HVD (allocate) decodes 1.60 times as fast as EAGLE3 on NVIDIA H100 80GB HBM3 and 1.60 "
        "times as fast as EAGLE3 on AMD EPYC, 2 cores."
    ) in said
    ids = [element.attrib["id"] for element in tree.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert "AMD EPYC, 2 cores: No GPU was used. The numbers show that the pipeline works." in said


def test_runs_of_like_machines_have_numbers_and_keep_the_warnings() -> None:
    sets = (data_set("mbpp", is_sample=True),)
    runs = [result(["mbpp"], machine=CPU, data_sets_of=sets)] * 2
    tree = parse(write_page(runs, command=MADE))
    said = " ".join("".join(tree.itertext()).split())
    assert "on AMD EPYC, 2 cores (run 1) and on AMD EPYC, 2 cores (run 2)" in said
    assert said.count("No GPU was used and 1 of 1 data sets are made-up samples.") == 1
    topics = [one.text for one in tree.iter("p") if one.get("class") == "topic"]
    assert "Table 1: speedup, on AMD EPYC, 2 cores (run 2)" in topics
    titles = [one.text for one in tree.iter("a")]
    assert len(titles) == len(set(titles))


def test_two_noisy_runs_say_so() -> None:
    measured = [
        measurement(mode, "mbpp", number, speed=speed)
        for mode, speeds in {"eagle3": (100, 90, 108), "hvd": (103, 99, 105)}.items()
        for number, speed in enumerate(speeds)
    ]
    run = result(["mbpp"], machine=CPU, measurements=tuple(measured))
    [first, *_] = sentences(RunData.all_of([run, run]))
    assert first.count("(within the noise: no difference was measured)") == 2


def test_each_section_is_linked_to(page: str) -> None:
    tree = parse(page)
    [nav] = tree.iter("nav")
    linked = [one.attrib["href"].removeprefix("#") for one in nav.iter("a")]
    assert linked == [one.attrib["id"] for one in tree.iter("section")]
    assert len(linked) == 9


def test_the_page_says_what_was_measured_where(page: str) -> None:
    said = text_of(page)
    for part in (
        *("1 x NVIDIA H100 80GB HBM3, Intel Xeon Platinum 8480, 16 cores, 128 GB", "sglang 0.5.23"),
        *("Tengyunw/qwen3_8b_eagle3", "seed 42, up to 8192 new tokens", "--dtype float16"),
        *("python -m benchmarks.paper --model qwen3-8b --out runs", "2026-01-02 03:04 UTC"),
        *("hub:made/up@12345678 mbpp", "CC0", "--hvd-policy eagle3", "kind mlp, epochs 20"),
        "every reply is that of greedy decoding",
    ):
        assert part in said, part


def test_replies_that_differ_are_named() -> None:
    kept = result(["mbpp"], rounds={0: 1.0})
    measured = tuple(
        one.model_copy(update={"is_identical": False}) if one.mode == "hvd" else one
        for one in kept.measurements
    )
    said = text_of(write_page([kept.model_copy(update={"measurements": measured})], command=MADE))
    assert (
        "in 4 of 5 measurements every reply is that of greedy decoding; others of HVD (allocate)"
    ) in said


def test_texts_of_a_result_are_text() -> None:
    kept = result(["mbpp"], ["greedy", "hvd"])
    hostile = kept.model_copy(
        update={
            "target": HOSTILE,
            "command": HOSTILE,
            "machine": CPU.model_copy(update={"cpu": HOSTILE}),
            "versions": {HOSTILE: HOSTILE},
            "data_sets": (
                data_set("mbpp", source=HOSTILE, signs={HOSTILE: 1.0}),
                data_set(HOSTILE, family=HOSTILE),
            ),
            "modes": tuple(m.model_copy(update={"label": HOSTILE}) for m in kept.modes),
        }
    )
    page = write_page([hostile, hostile], command=HOSTILE)
    assert "<img" not in page
    assert not [element for element in parse(page).iter() if element.tag in ("img", "script")]
    page.encode()


def test_the_page_needs_nothing_else(page: str) -> None:
    outside = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", outside)


def test_the_same_results_give_the_same_page(page: str) -> None:
    assert write_page([whole()], command=MADE) == page
