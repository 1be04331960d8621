"""Prompts, and how a workload's measured and warm-up prompts are drawn."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Appendix D, and the split seed of table 6.
NUM_MEASURED = 20
SEED = 42

# The paper says neither how many prompts warm the cache nor how it chose them.
NUM_WARM_UP = 40

# Half of the paper's longest sequence (16384 tokens, table 6) is left for the output. A token of
# code has about three characters.
MAX_CHARS = 24_000

Message = Mapping[str, Any]


class Template(Protocol):
    """A chat template, such as ChatTemplate of sglang_hvd.traces."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ..., /) -> str:
        """What is sent to the model for these messages."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. It has messages, or a text that is sent as it is, or token ids.

    messages, tools: of the OpenAI API.
    follow_ups: what the user says after each of the model's replies.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    follow_ups: tuple[str, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @classmethod
    def of_user(cls, content: str, *follow_ups: str, system: str | None = None) -> "Prompt":
        """A prompt of one user message, perhaps after a system message."""
        said = [{"role": "user", "content": content}]
        if system is not None:
            said.insert(0, {"role": "system", "content": system})
        return cls(tuple(said), follow_ups=follow_ups)

    @property
    def num_chars(self) -> int:
        """Characters of its messages, tools and text."""
        said = [str(message.get("content") or "") for message in self.messages]
        return sum(map(len, (*said, *map(json.dumps, self.tools), self.text or "")))

    @property
    def key(self) -> bytes:
        """Equal prompts have equal keys."""
        fields = (self.messages, self.tools, self.follow_ups, self.text, self.token_ids)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()

    def after(self, reply: str) -> "Prompt | None":
        """The next prompt of the conversation, given the reply to this one. None: it has ended."""
        if not self.follow_ups:
            return None
        said, *left = self.follow_ups
        more = ({"role": "assistant", "content": reply}, {"role": "user", "content": said})
        return replace(self, messages=(*self.messages, *more), follow_ups=tuple(left))

    def request(self, template: Template | None) -> dict[str, Any]:
        """What is sent to /generate: a text or token ids.

        template: None: messages are joined without a template, as in the paper's table 4.

        Raises ValueError if the template refuses the messages.
        """
        if self.token_ids is not None:
            return {"input_ids": list(self.token_ids)}
        if self.text is not None:
            return {"text": self.text}
        if template is not None:
            return {"text": template.prompt(self.messages, self.tools)}
        described = [json.dumps(tool) for tool in self.tools]
        return {"text": "\n\n".join([*described, *(m["content"] for m in self.messages)])}


# The prompts of each row, document or session. A draw puts all of a group on one side.
Groups = Sequence[Sequence[Prompt]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A source of prompts.

    family: one of the paper's six, or what the workload is.
    source, licence, size, note: for people to read.
    load: reads it. Its argument is a folder with copies of data sets, or None for the hub. It
        raises ValueError, in one line, if the data cannot be read or has another form.
    revision: commit or branch of the data; None for what has none.
    """

    name: str
    family: str
    source: str
    licence: str
    size: str
    load: Callable[[Path | None], Groups]
    note: str = ""
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Prompts of a workload. No warm-up prompt equals a measured one or shares its group."""

    measured: tuple[Prompt, ...]
    warm_up: tuple[Prompt, ...]


def draw(
    workload: Workload,
    *,
    folder: Path | None = None,
    num_measured: int = NUM_MEASURED,
    num_warm_up: int = NUM_WARM_UP,
    seed: int = SEED,
) -> Drawn:
    """Draws prompts without replacement. A small workload gives fewer warm-up prompts.

    Prompts longer than MAX_CHARS and repeated prompts are left out. At most half of the groups are
    measured, so that some are left for the warm-up.

    Raises ValueError, in one line, if there are too few prompts to measure.
    """
    groups = workload.load(folder)
    order = np.random.default_rng(seed).permutation(len(groups))
    suitable = _suitable(groups[int(index)] for index in order)
    for_measuring = list(islice(suitable, min(num_measured, (len(groups) + 1) // 2)))
    measured = tuple(islice(_in_turns(for_measuring), num_measured))
    if len(measured) < num_measured:
        raise ValueError(
            f"{workload.name}: {num_measured} prompts are to be measured, but only "
            f"{len(measured)} of {len(groups)} groups' prompts are suitable: give more data"
        )
    warm_up = tuple(islice(chain.from_iterable(suitable), num_warm_up))
    return Drawn(measured, warm_up)


def _suitable(groups: Iterable[Sequence[Prompt]]) -> Iterator[list[Prompt]]:
    seen: set[bytes] = set()
    for group in groups:
        kept = []
        for prompt in group:
            if prompt.num_chars <= MAX_CHARS and (key := prompt.key) not in seen:
                seen.add(key)
                kept.append(prompt)
        if kept:
            yield kept


def _in_turns(groups: Iterable[Sequence[Prompt]]) -> Iterator[Prompt]:
    """The first prompt of each group, then the second of each, and so on."""
    rounds = zip_longest(*groups)
    return (prompt for one_round in rounds for prompt in one_round if prompt is not None)
