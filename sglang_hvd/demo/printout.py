"""What the demo prints at its end: a reply per workload by source, the table, what it means."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from sglang_hvd.demo.modes import Mode
from sglang_hvd.demo.report import Row, differences, meaning, table
from sglang_hvd.demo.token_text import THEME, TokenText, legend
from sglang_hvd.view.pages import plain
from sglang_hvd.view.replies import ViewedReply

_FILE_WIDTH = 100  # columns of a file and of the picture


@dataclass(frozen=True, slots=True)
class Printout:
    """Attributes:
    rows: of the table.
    caption: what the rows were measured on.
    hvd: the mode of HVD that wrote the replies and that the sentences are about; None if no mode
        is of HVD.
    replies: one per workload.
    """

    rows: Sequence[Row]
    caption: str
    hvd: Mode | None
    replies: Sequence[ViewedReply]

    def print_to(self, console: Console) -> None:
        """Prints all of it, as wide as the console is."""
        if self.hvd is not None:
            console.print(Text(f"\nWhat policy {self.hvd} wrote, by the source of each token:"))
            console.print(legend(console))
            for reply in self.replies:
                console.print(Text(f"\n{plain(reply.title)}", style="bold"))
                console.print(TokenText(reply.tokens, reply.sources))
        console.print(table(self.rows, console, caption=self.caption))
        if different := differences(self.rows):
            console.print(
                Text(f"The text differs from plain decoding: {', '.join(different)}.", "bold red")
            )
        if self.hvd is not None:
            console.print("", *meaning(self.rows, self.hvd), sep="\n")

    def as_svg(self) -> str:
        """A picture of a terminal that shows it. The picture needs no network."""
        console = Console(
            file=io.StringIO(),
            record=True,
            width=_FILE_WIDTH,
            force_terminal=True,
            color_system="truecolor",
            no_color=False,
            highlight=False,
            theme=THEME,
        )
        self.print_to(console)
        svg = console.export_svg(title="sglang-hvd demo")
        return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def demo_console() -> Console:
    """The console of stdout. It has a width in a file, and its own width on a dumb terminal."""
    console = Console(highlight=False, theme=THEME)
    if not console.is_terminal:
        console.size = ConsoleDimensions(_FILE_WIDTH, console.height)
    elif console.is_dumb_terminal:
        console.size = ConsoleDimensions(*shutil.get_terminal_size())
    return console
