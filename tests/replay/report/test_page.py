"""The page is sound markup, safe with any text, and has all figures in its tables."""

import re
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sglang_hvd.replay.report.page import write_page
from tests.replay.made_up import small_analysis

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<img src=x onerror=alert(1)>\"'&\x00\ud800]]>"


def parse(page: str) -> ElementTree.Element:
    """The page is XML, too: every tag closed, every text escaped."""
    first, rest = page.split("\n", 1)
    assert first == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


def cells(tree: ElementTree.Element) -> set[str]:
    """The texts in the bodies of the tables."""
    rows = [cell for body in tree.iter("tbody") for row in body.iter("tr") for cell in row]
    return {"".join(cell.itertext()) for cell in rows}


def figures(value: object) -> Iterator[float]:
    match value:
        case dict():
            for part in value.values():
                yield from figures(part)
        case list() | tuple():
            for part in value:
                yield from figures(part)
        case float() | int():
            yield value


def test_every_plot_is_there_and_named() -> None:
    tree = parse(write_page(small_analysis(), command="sglang-hvd analyze"))
    plots = [svg for svg in tree.iter(f"{SVG}svg") if svg.get("role") == "img"]
    assert len(plots) == 10
    assert len(list(tree.iter("figcaption"))) == 10
    assert all(svg.get("aria-label") for svg in plots)
    for svg in plots:
        width, height = map(float, svg.attrib["viewBox"].split()[2:])
        for text in svg.iter(f"{SVG}text"):
            assert 0 <= float(text.attrib["x"]) <= width
            assert 0 <= float(text.attrib["y"]) <= height


def test_all_figures_are_in_the_tables() -> None:
    analysis = small_analysis()
    found = analysis.as_json()
    shown = cells(parse(write_page(analysis, command="")))
    for part in ("structure", "payoffs", "quality", "curves", "importance"):
        for value in figures(found[part]):
            forms = {str(value), f"{value:.1f}", f"{100 * value:.1f}", f"{value:.3f}"}
            assert forms & shown, (part, value)
    for one in found["calibration"]:  # type: ignore[attr-defined]
        for b in one["bins"]:
            for value in (b["predicted"], b["real"], b["num_drafts"]):
                assert {str(value), f"{value:.1f}", f"{100 * value:.1f}"} & shown


def test_names_from_traces_are_text() -> None:
    analysis = small_analysis((HOSTILE, "chat"))
    about = replace(analysis.about, traces=HOSTILE, files=(HOSTILE,), predictor=HOSTILE)
    page = write_page(replace(analysis, about=about), command=f"analyze {HOSTILE}")
    assert "<img" not in page
    tree = parse(page)
    assert HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd") in cells(tree)
    assert not [element for element in tree.iter() if element.tag in ("img", "script")]
    page.encode()  # nothing that UTF-8 cannot hold


def test_the_page_needs_nothing_else() -> None:
    page = write_page(small_analysis(), command="")
    outside = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", outside)


def test_the_page_says_what_it_was_made_from() -> None:
    page = write_page(small_analysis(), command="sglang-hvd analyze --traces 'my traces'")
    text = "".join(parse(page).itertext())
    for said in ("one, two", "1 more only fill", "votes", "threshold 6 tokens", "fedcba98"):
        assert said in text
    assert "sglang-hvd analyze --traces 'my traces'" in text


def test_the_two_errors_of_probabilities_are_told_apart() -> None:
    analysis = small_analysis()
    [length, *_] = [one for one in analysis.calibration if one.predictor == "predictor"]
    calibration = (*analysis.calibration, replace(length, of="probability"))
    text = "".join(
        parse(write_page(replace(analysis, calibration=calibration), command="")).itertext()
    )
    assert "calibration error of the worst tenth, %" in text
    assert "percentage points on average over the drafts" in text


def test_a_family_has_one_colour_on_the_whole_page() -> None:
    tree = parse(write_page(small_analysis(), command=""))
    styles: dict[str, set[str]] = {"chat": set(), "code": set()}
    for element in tree.iter():
        title = element.find(f"{SVG}title")
        if title is not None and title.text:
            for family, found in styles.items():
                if title.text.startswith(family):
                    found |= set(re.findall(r"--(f\d)", ElementTree.tostring(element, "unicode")))
    assert styles == {"chat": {"f0"}, "code": {"f1"}}


def test_an_analysis_without_drafts_worth_verifying_has_a_page() -> None:
    analysis = replace(small_analysis(), curves=(), importance=None)
    assert "nothing to find" in write_page(analysis, command="")


def test_a_predictor_that_selects_nothing_has_a_page() -> None:
    analysis = small_analysis()
    curves = tuple(replace(curve, precision=None, recall=0.0) for curve in analysis.curves)
    parse(write_page(replace(analysis, curves=curves), command=""))


def test_the_parts_of_a_bar_lie_end_to_end_and_are_as_long_as_their_shares() -> None:
    tree = parse(write_page(small_analysis(), command=""))
    ends = {}
    for group in tree.iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        path = group.find(f"{SVG}path")
        if title is not None and path is not None and (title.text or "").startswith("chat: "):
            xs = [float(x) for x, _ in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.attrib["d"])]
            ends[title.text] = min(xs), max(xs)
    own, finished = (
        ends["chat: 10.0 % from its own output"],
        ends["chat: 5.0 % from finished requests"],
    )
    assert own[1] - own[0] == pytest.approx(2 * (finished[1] - finished[0]), abs=0.01)
    assert own[1] == pytest.approx(finished[0], abs=0.01)


def test_a_long_table_scrolls_by_keyboard_and_has_a_name() -> None:
    tree = parse(write_page(small_analysis(), command=""))
    regions = [element for element in tree.iter("div") if element.get("class") == "scroll"]
    assert len(regions) == len(list(tree.iter("table"))) == 12
    assert all(region.get("tabindex") == "0" and region.get("aria-label") for region in regions)


def test_no_two_elements_have_one_id() -> None:
    tree = parse(write_page(small_analysis(), command=""))
    ids = [element.attrib["id"] for element in tree.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    used = {element.attrib["href"] for element in tree.iter(f"{SVG}use")}
    assert used == {f"#{name}" for name in ids}
