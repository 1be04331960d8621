"""What the demo draws while it plays: the reply being written, and the speed of each mode."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sglang_hvd.demo.modes import Mode
from sglang_hvd.demo.play import Reply, asked
from sglang_hvd.demo.token_text import TokenText, legend
from sglang_hvd.view.pages import plain
from sglang_hvd.view.replies import ViewedReply

_FRAMES_PER_S = 20
_MIN_REPLY_LINES = 4


def can_redraw(console: Console) -> bool:
    """Whether the console is a terminal that can draw over what it shows."""
    return console.is_terminal and not console.is_dumb_terminal


class Screen:
    """Draws over itself, and leaves nothing when it is closed. Where nothing can be drawn over, it
    draws nothing.

    It draws only between the measured requests, because drawing takes time of a core.
    """

    def __init__(self, console: Console, modes: Sequence[Mode], *, num_turns: int) -> None:
        self._console = console
        self._num_turns = num_turns
        self._num_played = 0
        self._tokens = dict.fromkeys(modes, 0)
        self._seconds = dict.fromkeys(modes, 0.0)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._is_shown = can_redraw(console)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Draws from here on."""
        with self._live if self._is_shown else nullcontext():
            yield

    def count(self, turn: Mapping[Mode, Reply]) -> None:
        """One more turn was played."""
        self._num_played += 1
        for mode, reply in turn.items():
            self._tokens[mode] += reply.num_tokens
            self._seconds[mode] += reply.seconds

    def write(self, reply: Reply, viewed: ViewedReply) -> None:
        """Shows a reply cycle by cycle, in the time that each cycle took; at once if its cycles are
        not known."""
        if not self._is_shown:
            return
        num_played = f"turn {self._num_played} of {self._num_turns}"
        heading: list[RenderableType] = [
            Text(f"{reply.family}, {num_played}", style="bold"),
            Text(plain(asked(reply)), no_wrap=True, overflow="crop"),
        ]
        if viewed.cycles:
            heading.insert(0, legend(self._console))
        drawn = due = time.perf_counter()
        for cycle in viewed.cycles:
            due += (cycle.ms or 0) / 1000
            if due - drawn >= 1 / _FRAMES_PER_S:
                time.sleep(max(0, due - time.perf_counter()))
                self._draw(heading, viewed, cycle.at + cycle.accepted + 1)
                drawn = due
        self._draw(heading, viewed, len(viewed.tokens))

    def _draw(
        self, heading: Sequence[RenderableType], viewed: ViewedReply, num_tokens: int
    ) -> None:
        bars = self._bars()
        lines_around = Group(*heading, bars, *[""] * 3)
        num_around = len(self._console.render_lines(lines_around, pad=False))
        text = TokenText(
            viewed.tokens[:num_tokens],
            viewed.sources[:num_tokens],
            max_lines=max(self._console.height - num_around, _MIN_REPLY_LINES),
        )
        self._live.update(Group(*heading, "", text, "", bars), refresh=True)

    def _bars(self) -> Table:
        """The speed of each mode so far, in tokens per second."""
        speeds = {
            mode: num / self._seconds[mode] if num else 0.0 for mode, num in self._tokens.items()
        }
        bars = Table.grid(padding=(0, 1))
        bars.add_column()
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)
        bars.expand = True
        for mode, speed in speeds.items():
            bar = ProgressBar(total=max(speeds.values()) or 1, completed=speed)
            bars.add_row(mode, bar, f"{speed:.0f} tokens/s")
        return bars
