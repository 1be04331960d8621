"""A reply on a terminal: each token in the style of its source, or with a letter below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from rich.theme import Theme

from sglang_hvd.view.cycles import TokenSource
from sglang_hvd.view.pages import plain
from sglang_hvd.view.reply_page import TOKEN_LOOKS

# Both colours of a token are set, so that it is readable on a dark terminal and on a light one. Who
# cannot tell the colours apart sees bold, italic and underlined text.
THEME = Theme(
    {
        "prompt": "bold #000000 on #5fd75f",
        "output": "italic #000000 on #5fd7d7",
        "shared": "bold italic #000000 on #ffd700",
        "model": "underline #000000 on #87afff",
        "both": "bold underline #000000 on #ff87ff",
        "target": "none",
        # rich draws the rest of a bar in dark grey, which stands out on a light terminal.
        "bar.back": "dim",
        "bar.complete": "cyan",
    }
)


class TokenText:
    """A rich renderable: a text whose tokens show their sources.

    Without colours each line is followed by one that has the letter of the source below each
    character.
    """

    def __init__(
        self, tokens: Sequence[str], sources: Sequence[TokenSource], *, max_lines: int | None = None
    ) -> None:
        """max_lines: shows only the last lines, an even number of them; at least 2."""
        pairs = zip(tokens, sources, strict=True)
        self._text = Text.assemble(*((plain(token), source) for token, source in pairs))
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(self._lines(console, options.max_width))
        if self._max_lines is not None:
            # Letters never stand without the line above them.
            lines = lines[-(self._max_lines - self._max_lines % 2) :]
        yield from lines

    def _lines(self, console: Console, width: int) -> Iterator[Text]:
        text = self._text.copy()
        text.rstrip()
        for line in text.wrap(console, width, overflow="fold", tab_size=4):
            yield line
            if not has_colours(console):
                yield _letters(line)


def has_colours(console: Console) -> bool:
    """Whether the console shows colours."""
    return console.color_system is not None and not console.no_color


def legend(console: Console) -> Columns:
    """The sources in their styles, as many in a line as there is room for."""
    return Columns(
        [
            Text(name if has_colours(console) else f"{letter} {name}", source)
            for source, (letter, name, _) in TOKEN_LOOKS.items()
        ],
        padding=(0, 2),
    )


def _letters(line: Text) -> Text:
    """The letter of each character's source, below it."""
    letters = [" "] * len(line)
    letter_of: dict[object, str] = {
        source: letter for source, (letter, _, _) in TOKEN_LOOKS.items()
    }
    for start, end, source in line.spans:
        letters[start:end] = letter_of[source] * (end - start)
    return Text(
        "".join(letter * cell_len(of) for letter, of in zip(letters, line.plain, strict=True))
    )
