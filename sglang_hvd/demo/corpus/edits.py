"""Generated files with numbered lines, and changes to their lines."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A text file as its lines; `language` is the tag of its code fence."""

    name: str
    language: str
    lines: tuple[str, ...]

    def fenced(self) -> str:
        """The whole file as a Markdown code block, its lines numbered from 1."""
        return f"```{self.language}\n{numbered(dict(enumerate(self.lines)))}\n```"


def numbered(lines: Mapping[int, str]) -> str:
    """Lines by index as `number|text`."""
    return "\n".join(f"{index + 1}|{line}" for index, line in sorted(lines.items()))
