"""What a trace file holds: a header, and a record per trace.

A record stores a prompt without what the file holds already: the beginning that it shares with the
text of its session's previous turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import TokenIds

FORMAT = "sglang_hvd.trace"
VERSION = 3

# Records of version 1 have no namespace; records of versions 1 and 2 do not say whether the output
# was cut.
_READ_VERSIONS = (1, 2, VERSION)
_LACKING = {"namespace": "", "is_cut": False}

_HEADER_KEYS = {"format", "version", "model", "tokenizer"}

# A part of the format: writer and reader forget the same texts at the same record. 64 MiB.
MAX_TURN_TEXT_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Header:
    """What all traces of a file have in common."""

    model: str
    tokenizer_fingerprint: str

    def fields(self) -> dict[str, object]:
        """The JSON object that is written."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "tokenizer": self.tokenizer_fingerprint,
        }

    @staticmethod
    def of_fields(fields: object) -> Header:
        """The inverse of `fields`. Raises ValueError that says what is wrong."""
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"not the header of a {FORMAT} file")
        if fields.get("version") not in _READ_VERSIONS:
            raise ValueError(
                f"version {fields.get('version')!r} of the format, this release reads "
                f"{', '.join(map(str, _READ_VERSIONS))}"
            )
        if fields.keys() != _HEADER_KEYS:
            raise ValueError(f"a header has {', '.join(sorted(_HEADER_KEYS))}, got {[*fields]}")
        model, tokenizer = fields["model"], fields["tokenizer"]
        if not isinstance(model, str) or not isinstance(tokenizer, str):
            raise ValueError("model and tokenizer of a header are strings")
        return Header(model, tokenizer)


@dataclass(frozen=True, slots=True)
class Labels:
    """The part of a record that is not tokens.

    num_kept: how many tokens at the beginning of the prompt are those of the session's text before
        this turn.
    """

    session: str
    turn: int
    family: str
    sampling: Mapping[str, float]
    namespace: str
    is_cut: bool
    num_kept: int

    def fields(self) -> dict[str, Any]:
        """The JSON object that is written."""
        return asdict(self)

    @staticmethod
    def of_fields(fields: dict[str, Any]) -> Labels:
        """The inverse of `fields`. Raises ValueError that says what is wrong."""
        fields = {**_LACKING, **fields}
        if fields.keys() != set(Labels.__slots__):
            wanted = ", ".join(sorted(Labels.__slots__))
            raise ValueError(f"not a trace: wanted {wanted}, got {', '.join(sorted(fields))}")
        labels = Labels(**fields)
        for name, is_right in (
            ("session", isinstance(labels.session, str)),
            ("turn", _is_count(labels.turn)),
            ("family", isinstance(labels.family, str)),
            ("sampling", _is_sampling(labels.sampling)),
            ("namespace", isinstance(labels.namespace, str)),
            ("is_cut", isinstance(labels.is_cut, bool)),
            ("num_kept", _is_count(labels.num_kept)),
        ):
            if not is_right:
                raise ValueError(f"not a trace: {name} cannot be {fields[name]!r}")
        return labels


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A trace as it is stored: its prompt without the beginning that its session's text has.

    new_prompt_ids: int32[num_tokens]; None: the prompt was left out.
    output_ids: int32[num_tokens].
    """

    labels: Labels
    new_prompt_ids: TokenIds | None
    output_ids: TokenIds

    @staticmethod
    def of_trace(trace: Trace, texts: TurnTexts) -> Record:
        num_kept = texts.num_kept(trace.session, trace.prompt_ids) if trace.has_prompt else 0
        labels = Labels(
            session=trace.session,
            turn=trace.turn,
            family=trace.family,
            sampling=dict(trace.sampling),
            namespace=trace.namespace,
            is_cut=trace.is_cut,
            num_kept=num_kept,
        )
        new_ids = trace.prompt_ids[num_kept:] if trace.has_prompt else None
        return Record(labels, new_ids, trace.output_ids)

    def trace(self, header: Header, texts: TurnTexts) -> Trace:
        """The inverse of `of_trace`.

        Raises ValueError if the file does not hold the beginning of the prompt, or if a prompt that
        was left out has a beginning.
        """
        labels = self.labels
        if self.new_prompt_ids is None and labels.num_kept:
            raise ValueError(f"a prompt that was left out begins with {labels.num_kept} tokens")
        kept = texts.first(labels.session, labels.num_kept)
        if kept is None:
            raise ValueError(
                f"the prompt begins with {labels.num_kept} tokens of an earlier turn of session "
                f"{labels.session!r}, which the file does not hold"
            )
        new_ids = np.empty(0, np.int32) if self.new_prompt_ids is None else self.new_prompt_ids
        return Trace(
            prompt_ids=np.concatenate((kept, new_ids)) if len(kept) else new_ids,
            output_ids=self.output_ids,
            session=labels.session,
            turn=labels.turn,
            family=labels.family,
            sampling=labels.sampling,
            model=header.model,
            tokenizer_fingerprint=header.tokenizer_fingerprint,
            namespace=labels.namespace,
            is_cut=labels.is_cut,
            has_prompt=self.new_prompt_ids is not None,
        )


class TurnTexts:
    """Prompt and output of each session's latest turn in one file. The oldest are forgotten.

    A turn whose prompt was left out leaves no text.
    """

    def __init__(self, max_tokens: int = MAX_TURN_TEXT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._texts: dict[str, TokenIds] = {}  # oldest first
        self._num_tokens = 0

    def num_kept(self, session: str, prompt_ids: TokenIds) -> int:
        """How many tokens a prompt has in common with the beginning of its session's text."""
        text = self._texts.get(session)
        if text is None:
            return 0
        length = min(len(text), len(prompt_ids))
        differs = text[:length] != prompt_ids[:length]
        return int(np.argmax(differs)) if differs.any() else length

    def first(self, session: str, num_tokens: int) -> TokenIds | None:
        """int32[num_tokens], the beginning of a session's text; None if the text is shorter."""
        text = self._texts.get(session, np.empty(0, np.int32))
        return text[:num_tokens] if num_tokens <= len(text) else None

    def advance(self, trace: Trace) -> None:
        """Replaces the text of the session's previous turn by that of this turn."""
        self._num_tokens -= len(self._texts.pop(trace.session, ()))
        if trace.has_prompt:
            text = self._texts[trace.session] = trace.text_ids
            self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._texts.pop(next(iter(self._texts))))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sampling(value: object) -> bool:
    # Files hold true for 1 if a client had asked for that.
    return isinstance(value, dict) and all(isinstance(v, (int, float)) for v in value.values())
