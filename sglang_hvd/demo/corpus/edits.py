"""One edit of a generated file: the file before, the file after and how people speak of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A text file as its lines; `language` is the tag of its code fence."""

    name: str
    language: str
    lines: tuple[str, ...]

    def fenced(self) -> str:
        """The whole file as a Markdown code block."""
        return "\n".join((f"```{self.language}", *self.lines, "```"))


@dataclass(frozen=True, slots=True)
class Edit:
    """`request` is what the user asks for, `summary` the first line of the reply."""

    request: str
    summary: str
    lines: tuple[str, ...]  # the file afterwards


def search_replace(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    """One SEARCH/REPLACE block that covers every changed line and two more on each side."""
    shortest = min(len(before), len(after))
    head = 0
    while head < shortest and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shortest - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    first, context = max(0, head - 2), min(2, tail)
    return "\n".join(
        (
            "<<<<<<< SEARCH",
            *before[first : len(before) - tail + context],
            "=======",
            *after[first : len(after) - tail + context],
            ">>>>>>> REPLACE",
        )
    )
