"""Writes replies as one HTML page that needs no network: the source of each token, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from sglang_hvd.view.cycles import TOKEN_SOURCES, Cycle, TokenSource
from sglang_hvd.view.pages import page_environment
from sglang_hvd.view.replies import ViewedReply
from sglang_hvd.whole_file import write_whole

# Of each source of tokens: its letter, its name, and what it means.
TOKEN_LOOKS: dict[TokenSource, tuple[str, str, str]] = {
    "prompt": ("P", "prompt copy", "a cache draft found in the request's own prompt"),
    "output": ("O", "own output", "a cache draft found in the request's own output"),
    "shared": ("S", "another request", "a cache draft found in a finished request"),
    "model": ("M", "model drafter", "the draft of the EAGLE3 model"),
    "both": ("B", "both drafts", "the cache draft and the model drafter agree"),
    "target": ("T", "target model", "no draft: the bonus token of a cycle, or the prefill's"),
}
assert tuple(TOKEN_LOOKS) == TOKEN_SOURCES

# What a cycle verified, by its source and the origin of its cache draft.
_KINDS = {
    ("cache", "prompt"): "cache draft from the prompt",
    ("cache", "output"): "cache draft from the output",
    ("cache", "shared"): "cache draft from another request",
    ("cache", None): "cache draft that only branches",
    ("model", None): "model drafter's draft",
    ("both", None): "both drafts in one tree",
    ("plain", None): "no draft",
}

_BAR_HEIGHT, _MAX_TOKEN_HEIGHT = 96.0, 12.0  # pixels


def write_page(
    path: Path,
    replies: Sequence[ViewedReply],
    *,
    title: str = "Replies",
    is_private: bool = False,
) -> None:
    """Writes the token view of one reply or more.

    path: the page. Call whole_file.check_place first, before any work is done for the page.
    title: the page's heading.
    is_private: see whole_file.write_whole.

    Raises ValueError, in one line, if the page cannot be written.
    """
    write_whole(path, render(replies, title=title).encode(), is_private=is_private)


def render(replies: Sequence[ViewedReply], *, title: str) -> str:
    """The page as text."""
    return (
        page_environment("sglang_hvd.view")
        .get_template("replies.html")
        .render(title=title, pages=[_Shown.of(reply) for reply in replies], TOKEN_LOOKS=TOKEN_LOOKS)
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens that no other cycle's tokens separate. cycle: its place; None outside all cycles."""

    cycle: int | None
    tokens: list[tuple[str, TokenSource]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The cycles of a reply that verified drafts of one kind.

    expected: mean accepted tokens that the policy expected; None if it predicts nothing.
    """

    name: str
    num_cycles: int
    num_nodes: int
    num_accepted: int
    num_rejected: int
    expected: float | None


@dataclass(frozen=True, slots=True)
class _Shown:
    """A reply as the template reads it.

    unit, rejected_unit: height of a token and of a rejected node in the timeline, in pixels.
    decode_ms: time of all cycles together; None if not known.
    """

    reply: ViewedReply
    pieces: list[_Piece]
    runs: list[list[tuple[TokenSource, int]]]
    counts: dict[TokenSource, int]
    kinds: list[_Kind]
    unit: float
    rejected_unit: float
    decode_ms: float | None

    @classmethod
    def of(cls, reply: ViewedReply) -> _Shown:
        sources = reply.sources
        place_of = _cycle_of_tokens(reply)
        tokens = zip(place_of, reply.tokens, sources, strict=True)
        pieces = [
            _Piece(place, [(text, source) for _, text, source in group])
            for place, group in groupby(tokens, key=lambda token: token[0])
        ]
        runs = [
            [(source, len(list(group))) for source, group in groupby(cycle.token_sources)]
            for cycle in reply.cycles
        ]
        times = [cycle.ms for cycle in reply.cycles if cycle.ms is not None]
        longest = max((cycle.accepted + 1 for cycle in reply.cycles), default=1)
        widest = max((cycle.num_rejected for cycle in reply.cycles), default=0)
        return cls(
            reply=reply,
            pieces=pieces,
            runs=runs,
            counts={source: sources.count(source) for source in TOKEN_SOURCES},
            kinds=_kinds(reply.cycles),
            unit=min(_BAR_HEIGHT / longest, _MAX_TOKEN_HEIGHT),
            rejected_unit=min(_BAR_HEIGHT / 3 / max(widest, 1), _MAX_TOKEN_HEIGHT / 3),
            decode_ms=sum(times) if times and len(times) == len(reply.cycles) else None,
        )

    @property
    def num_decoded(self) -> int:
        """Tokens that the cycles committed, of the reply."""
        return sum(len(piece.tokens) for piece in self.pieces if piece.cycle is not None)


def _cycle_of_tokens(reply: ViewedReply) -> list[int | None]:
    """The place of the cycle that committed each token; None outside the cycles."""
    places: list[int | None] = [None] * len(reply.tokens)
    for place, cycle in enumerate(reply.cycles):
        for token in range(cycle.at, min(cycle.at + cycle.accepted + 1, len(places))):
            places[token] = place
    return places


def _kinds(cycles: Sequence[Cycle]) -> list[_Kind]:
    kinds = []
    for (source, origin), name in _KINDS.items():
        found = [
            cycle
            for cycle in cycles
            if cycle.source == source and (source != "cache" or cycle.origin == origin)
        ]
        expected = [cycle.expected for cycle in found if cycle.expected is not None]
        if found:
            kind = _Kind(
                name,
                num_cycles=len(found),
                num_nodes=sum(cycle.num_nodes for cycle in found),
                num_accepted=sum(cycle.accepted for cycle in found),
                num_rejected=sum(cycle.num_rejected for cycle in found),
                expected=sum(expected) / len(expected) if expected else None,
            )
            kinds.append(kind)
    return kinds
