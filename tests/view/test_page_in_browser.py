"""The token view in headless Chromium: pointer, keys, sizes, colours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.view.replies import ViewedReply
from sglang_hvd.view.reply_page import write_page
from tests.view.made_up import cycle
from tests.view.test_reply_page import HOSTILE, REPLY

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LONG = ViewedReply(
    title="A long reply: " + "word" * 60,
    about="policy allocate",
    prompt="x" * 500,
    tokens=tuple(f" {HOSTILE if i == 7 else 'word'}{i}" for i in range(600)),
    cycles=tuple(cycle(1 + 4 * i, ("cache", "model")[i % 2], 3) for i in range(140)),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium on PATH: none of {', '.join(NAMES)}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A page that records what goes wrong."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.tab = context.new_page()
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.faults.append(message.text))
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri())

    def selected(self) -> list[str]:
        """The cycles that are selected in the timeline of the first reply."""
        bars = self.tab.locator("#r1 .bar[aria-selected=true]")
        return [bar.get_attribute("data-cycle") for bar in bars.all()]

    def why(self) -> str:
        return str(self.tab.locator("#r1 .why h4").inner_text())


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Page]:
    path = tmp_path / "page.html"
    write_page(path, [REPLY, LONG])
    page = Page(browser, path, 1400, "light")
    yield page
    assert page.faults == []
    assert page.requests == [path.as_uri()]
    page.tab.context.close()


def test_the_first_cycle_is_selected_at_first(page: Page) -> None:
    assert page.selected() == ["0"]
    assert page.why() == "Cycle 1 of 4"
    assert page.tab.locator("#r1 .tokens .selected").all_inner_texts() == [" f()"]


def test_the_pointer_on_a_token_shows_why(page: Page) -> None:
    page.tab.locator("#r1 .tokens [data-cycle='3']").hover()
    assert page.why() == "Cycle 4 of 4"
    assert page.selected() == ["0"]
    page.tab.locator("h1").hover()
    assert page.why() == "Cycle 1 of 4"
    page.tab.locator("#r1 .bar").nth(1).hover()
    assert page.why() == "Cycle 2 of 4"


@pytest.mark.parametrize("part", [".tokens", ".timeline"])
def test_keys_step_through_the_cycles(page: Page, part: str) -> None:
    page.tab.locator(f"#r1 {part}").focus()
    for key, place in (
        *(("ArrowRight", "1"), ("ArrowRight", "2"), ("ArrowLeft", "1"), ("End", "3")),
        *(("ArrowRight", "3"), ("Home", "0"), ("ArrowLeft", "0")),
    ):
        page.tab.keyboard.press(key)
        assert page.selected() == [place], key
        assert page.why() == f"Cycle {int(place) + 1} of 4"
    timeline = page.tab.locator("#r1 .timeline")
    assert timeline.get_attribute("aria-activedescendant") == "r1-b0"


def test_a_click_selects(page: Page) -> None:
    page.tab.locator("#r1 .bar").nth(2).click()
    assert page.selected() == ["2"]
    page.tab.locator("#r1 .tokens [data-cycle='3']").click()
    assert page.selected() == ["3"]


def test_arrow_keys_work_before_anything_has_the_focus(page: Page) -> None:
    page.tab.keyboard.press("ArrowRight")
    assert page.selected() == ["1"]


def test_the_tab_key_reaches_all_parts_and_shows_where_it_is(page: Page) -> None:
    reached = []
    for _ in range(8):
        page.tab.keyboard.press("Tab")
        active = "document.activeElement"
        reached.append(page.tab.evaluate(f"{active}.className || {active}.tagName"))
        style = page.tab.evaluate(f"getComputedStyle({active}).outlineStyle")
        assert style == "solid", reached[-1]
    assert reached[:5] == ["SUMMARY", "timeline", "tokens", "scroll", "scroll"]


def test_the_selected_bar_of_a_long_timeline_is_in_view(page: Page) -> None:
    page.tab.locator("#r2 .timeline").focus()
    page.tab.keyboard.press("End")
    timeline = page.tab.locator("#r2 .timeline").bounding_box()
    bar = page.tab.locator("#r2 .bar").last.bounding_box()
    assert bar["x"] + bar["width"] <= timeline["x"] + timeline["width"] + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_the_screen_in_the_colours_of_the_system(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    path = tmp_path / "page.html"
    write_page(path, [REPLY, LONG])
    page = Page(browser, path, width, scheme)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    background = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 384
    assert is_dark == (scheme == "dark")
    page.tab.keyboard.press("Tab")
    page.tab.keyboard.press("Tab")
    timeline = page.tab.locator("#r1 .timeline").bounding_box()
    why = page.tab.locator("#r1 .why").bounding_box()
    is_to_the_right = why["x"] >= timeline["x"] + timeline["width"]
    assert is_to_the_right or timeline["y"] + timeline["height"] <= why["y"]
    page.tab.locator("#r2 .tokens [data-cycle='100']").scroll_into_view_if_needed()
    assert page.tab.locator("#r2 .why").evaluate(
        "why => { const box = why.getBoundingClientRect();"
        " return box.bottom <= innerHeight + 1 && box.top >= 0; }"
    )
    assert page.faults == []
    page.tab.context.close()
