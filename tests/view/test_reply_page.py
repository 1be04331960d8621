"""The token view is sound markup, safe with any text, and says where each token came from."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from sglang_hvd.view.cycles import TOKEN_SOURCES, Cycle
from sglang_hvd.view.replies import ViewedReply
from sglang_hvd.view.reply_page import TOKEN_LOOKS, render, write_page
from tests.view.made_up import cycle

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\x00\ud800]]>"
# A token of the prefill, then of a cycle each: 2 of a prompt copy, 1 of both, none, 3 of the model.
REPLY = ViewedReply(
    title="Copy it",
    about="policy allocate",
    prompt="def f(): pass",
    tokens=("def", " f", "(", ")", "\n", " x", "\n", "a", "b", "c"),
    cycles=(
        cycle(1, "cache", 2, cache=7),
        cycle(4, "both", 1, model_right=1),
        cycle(6),
        cycle(7, "model", 3, origin=None),
    ),
    seconds=0.5,
)


def parse(*replies: ViewedReply) -> ElementTree.Element:
    """The page is XML, too: every tag closed, every text escaped."""
    first, rest = render(replies, title="Replies").split("\n", 1)
    assert first == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


def of_class(tree: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [part for part in tree.iter() if name in part.get("class", "").split()]


def text(part: ElementTree.Element) -> str:
    return " ".join(" ".join(part.itertext()).split())


def test_each_token_has_the_class_of_its_source() -> None:
    [tokens] = of_class(parse(REPLY), "tokens")
    shown = of_class(tokens, "token")
    assert [part.text or "" for part in shown] == list(REPLY.tokens)
    assert [part.get("class", "").split()[1] for part in shown] == REPLY.sources
    assert REPLY.sources[:5] == ["target", "prompt", "prompt", "target", "both"]
    assert "".join(tokens.itertext()) == "".join(REPLY.tokens)


def test_each_cycle_has_a_bar_and_an_explanation() -> None:
    tree = parse(REPLY)
    bars = of_class(tree, "bar")
    assert [bar.get("aria-label") for bar in bars] == [
        "Cycle 1: a cache draft from the prompt, 2 tokens accepted, 5 rejected",
        "Cycle 2: a cache draft from the prompt and the model drafter's draft, 1 token accepted, "
        "14 rejected",
        "Cycle 3: no draft, 0 tokens accepted",
        "Cycle 4: the model drafter's draft, 3 tokens accepted, 12 rejected",
    ]
    first, *_, last = tree.iter("template")
    assert "match 5 tokens in the prompt; 2 tokens proposed" in text(first)
    assert "sent 7 nodes of the cache" in text(first)
    assert "accepted 2, expected 2.50" in text(first)
    assert "step 16 wide, 1 request, 10.0 ms" in text(first)
    assert "cache draft 2.50 verified" in text(first)
    assert "15 nodes of the model drafter in 3 steps" in text(last)


def test_the_tables_have_the_totals() -> None:
    rows = [[text(cell) for cell in row] for row in parse(REPLY).iter("tr")]
    assert ["P prompt copy", "2", "20"] in rows
    assert ["M model drafter", "3", "30"] in rows
    assert ["B both drafts", "1", "10"] in rows
    assert ["T target model", "4", "40"] in rows
    assert ["cache draft from the prompt", "1", "7", "5", "2.50", "2.00"] in rows
    assert ["no draft", "1", "0", "0", "0.00", "0.00"] in rows
    figures = [text(part) for part in of_class(parse(REPLY), "figures")[0]]
    assert figures == [
        *("tokens 10", "cycles 4", "tokens per cycle 2.25", "ms per cycle 10.0"),
        *("tokens/s, decoding 225.0", "tokens/s, with prefill 20.0"),
    ]


def test_a_policy_that_predicts_nothing_is_said_to() -> None:
    unknown = {"expected": None, "if_cache": None, "if_model": None, "if_both": None}
    tree = parse(ViewedReply("a", "", "", ("a", "b"), (cycle(0, "cache", 1, ms=None, **unknown),)))
    [why] = tree.iter("template")
    assert "The policy predicted nothing here." in text(why)
    assert "ms" not in text(why).split()


def test_a_step_that_ran_ahead_is_no_choice_of_the_policy() -> None:
    nothing = {"expected": None, "if_cache": None, "if_model": None, "if_both": None}
    tree = parse(ViewedReply("a", "", "", ("a",), (cycle(0, ran_ahead=True, **nothing),)))
    [why] = tree.iter("template")
    assert "Launched before its tokens were known" in text(why)
    assert "predicted nothing" not in text(why)


def test_a_branch_is_shown_where_the_cache_proposed_no_chain() -> None:
    branch = cycle(0, "cache", 1, origin=None, match=None, found=0)
    assert Cycle.from_report(branch.report()) == branch
    tree = parse(ViewedReply("a", "", "", ("a", "b"), (branch,)))
    [why] = tree.iter("template")
    assert "It verified a cache draft from earlier text." in text(why)
    assert "cache draft that only branches" in text(tree)


@pytest.mark.parametrize("cycles", [(), (cycle(1),)])
def test_a_reply_without_tokens_or_cycles_has_a_page(cycles: tuple[()]) -> None:
    tree = parse(ViewedReply("empty", "", "", (), cycles), REPLY)
    assert len(of_class(tree, "reply")) == 2
    assert len({part.get("id") for part in tree.iter() if part.get("id")}) == len(
        [part for part in tree.iter() if part.get("id")]
    )


def test_any_text_is_shown_as_text() -> None:
    hostile = ViewedReply(HOSTILE, HOSTILE, HOSTILE, (HOSTILE, "a"), (cycle(0, "cache", 1),))
    tree = parse(hostile)
    assert not list(tree.iter("img"))
    assert "onerror=alert(1)" in text(of_class(tree, "tokens")[0])


def test_nothing_comes_from_the_network() -> None:
    page = render([REPLY], title="Replies")
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page
    assert "url(" not in page
    assert not {"link", "img", "iframe"} & {part.tag for part in parse(REPLY).iter()}


def test_every_source_has_its_letter_and_its_line() -> None:
    assert tuple(TOKEN_LOOKS) == TOKEN_SOURCES
    letters = [letter for letter, *_ in TOKEN_LOOKS.values()]
    assert len(set(letters)) == len(letters)
    page = render([REPLY], title="Replies")
    for source in TOKEN_SOURCES[1:]:
        assert f".token.{source} {{" in page


def test_a_page_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder") as failed:
        write_page(tmp_path / "no" / "page.html", [REPLY])
    assert "\n" not in str(failed.value)
    write_page(tmp_path / "page.html", [REPLY], title="Two words")
    assert "<title>Two words</title>" in (tmp_path / "page.html").read_text()
    write_page(tmp_path / "mine.html", [REPLY], is_private=True)
    assert (tmp_path / "mine.html").stat().st_mode & 0o777 == 0o600
