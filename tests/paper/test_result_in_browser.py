"""The page of a result in headless Chromium: sizes, colours, keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.paper.result_page import write_page
from tests.paper.made_up import CPU
from tests.paper.test_result_page import MADE, whole
from tests.view.test_page_in_browser import Page, browser  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(write_page([whole(), whole(machine=CPU)], command=MADE))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_the_screen_in_the_colours_of_the_system(
    browser: Any,  # noqa: F811
    path: Path,
    width: int,
    scheme: str,
) -> None:
    page = Page(browser, path, width, scheme)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    background = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 384
    assert is_dark == (scheme == "dark")
    for summary in page.tab.locator("summary").all():
        summary.click()
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.tab.evaluate(
        "[...document.querySelectorAll('figure, h2, dl, .caption')]"
        ".filter(one => one.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert outside == 0
    assert page.faults == []
    assert page.requests == [path.as_uri()]
    page.tab.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_the_page(
    browser: Any,  # noqa: F811
    path: Path,
    scheme: str,
) -> None:
    page = Page(browser, path, 1400, scheme)
    lowest = page.tab.evaluate(
        """() => {
          const light = colour => {
            const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => {
              v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
            return .2126 * r + .7152 * g + .0722 * b;
          };
          const ground = light(getComputedStyle(document.body).backgroundColor);
          const of = one => {
            const style = getComputedStyle(one);
            const l = light(one.tagName === 'text' ? style.fill : style.color);
            return (Math.max(l, ground) + .05) / (Math.min(l, ground) + .05);
          };
          return Math.min(...[...document.querySelectorAll('p, th, td, dd, dt, a, text')].map(of));
        }"""
    )
    assert lowest >= 4.5
    page.tab.context.close()


def test_the_tab_key_reaches_the_tables_and_shows_where_it_is(
    browser: Any,  # noqa: F811
    path: Path,
) -> None:
    page = Page(browser, path, 400, "light")
    page.tab.locator("nav a").first.focus()
    page.tab.keyboard.press("Enter")
    reached = []
    for _ in range(7):
        page.tab.keyboard.press("Tab")
        active = "document.activeElement"
        label = f"{active}.getAttribute('aria-label') || {active}.tagName"
        reached.append(page.tab.evaluate(label).partition(".")[0])
        assert page.tab.evaluate(f"getComputedStyle({active}).outlineStyle") == "solid"
    assert reached == [
        "Figure 5",
        "Table 1",
        "SUMMARY",
        *("Table 11", "Figure 4", "SUMMARY", "SUMMARY"),
    ]
    table = page.tab.locator(".scroll").nth(1)
    table.focus()
    page.tab.keyboard.press("ArrowRight")
    page.tab.wait_for_function("document.activeElement.scrollLeft > 0")
    page.tab.context.close()
