"""Which session a request continues, told by its tokens."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hvd.types import TokenIds

_DIGEST_BYTES = 16


@dataclass(slots=True)
class _Session:
    name: str
    num_turns: int = 0


@dataclass(frozen=True, slots=True)
class _Mark:
    """A text that later prompts may begin with, by its length and digest."""

    namespace: str
    num_tokens: int
    digest: bytes


class SessionFinder:
    """Finds the session of each request among the latest ones of its namespace.

    A prompt continues the session of the longest earlier text that it begins with: the prompt and
    output of an earlier request, the same without the output's last token (a template writes the
    end of a turn itself), or its prompt alone (an output may come back changed: thinking taken
    out, or tokenized in other words). Equal prompts are no sessions: they are samples of one.

    prefix: what the names of its sessions begin with.
    max_marks: texts that are remembered, three per request; the oldest are forgotten. About 300
        bytes each, and half a microsecond in every call if all have different lengths.
    """

    def __init__(self, prefix: str, *, max_marks: int = 3_072) -> None:
        self._prefix = prefix
        self._max_marks = max_marks
        self._sessions: dict[_Mark, _Session] = {}  # oldest first
        self._lengths: dict[str, Counter[int]] = {}  # by namespace: lengths of its marks
        self._num_sessions = 0

    def place(
        self, prompt_ids: TokenIds, output_ids: TokenIds, *, namespace: str = ""
    ) -> tuple[str, int]:
        """Session and turn of a finished request. Takes one pass over its tokens."""
        session = self._continued(prompt_ids, namespace)
        if session is None:
            session = _Session(f"{self._prefix}{self._num_sessions}")
            self._num_sessions += 1
        turn = session.num_turns
        session.num_turns += 1
        num_tokens = len(prompt_ids) + len(output_ids)
        lengths = sorted({len(prompt_ids), max(num_tokens - 1, len(prompt_ids)), num_tokens})
        for mark in _marks((prompt_ids, output_ids), lengths, namespace):
            self._remember(mark, session)
        return session.name, turn

    def _continued(self, prompt_ids: TokenIds, namespace: str) -> _Session | None:
        known = self._lengths.get(namespace, Counter())
        lengths = sorted(length for length in known if length < len(prompt_ids))
        found = None
        for mark in _marks((prompt_ids,), lengths, namespace):
            found = self._sessions.get(mark, found)
        return found

    def _remember(self, mark: _Mark, session: _Session) -> None:
        if mark.num_tokens == 0:
            return  # every prompt begins with it
        if self._sessions.pop(mark, None) is None:
            self._lengths.setdefault(mark.namespace, Counter())[mark.num_tokens] += 1
        self._sessions[mark] = session
        while len(self._sessions) > self._max_marks:
            self._forget(next(iter(self._sessions)))

    def _forget(self, mark: _Mark) -> None:
        del self._sessions[mark]
        lengths = self._lengths[mark.namespace]
        lengths[mark.num_tokens] -= 1
        if not lengths[mark.num_tokens]:
            del lengths[mark.num_tokens]
        if not lengths:
            del self._lengths[mark.namespace]


def _marks(parts: Sequence[TokenIds], lengths: Sequence[int], namespace: str) -> Iterator[_Mark]:
    """The beginnings of these lengths (ascending) of the parts put together."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    part, begin = 0, 0  # of what is not hashed yet
    position = 0
    for length in lengths:
        while position < length:
            piece = parts[part][begin : begin + length - position]
            hasher.update(piece.tobytes())
            position += len(piece)
            begin += len(piece)
            if begin == len(parts[part]):
                part, begin = part + 1, 0
        yield _Mark(namespace, length, hasher.copy().digest())
