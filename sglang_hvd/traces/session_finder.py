"""Finds the session that a request continues, by its tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import TokenIds

_DIGEST_BYTES = 16

# Odd, so that no power of it modulo 2^64 is 0 (Knuth's multiplier for linear congruences).
_BASE = np.uint64(6364136223846793005)

_Uint64 = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Session:
    name: str
    num_turns: int = 0

    def next_turn(self) -> int:
        """Begins the next turn and returns its number, from 0."""
        self.num_turns += 1
        return self.num_turns - 1


@dataclass(frozen=True, slots=True)
class _Mark:
    """A text that later prompts may begin with, known by its length and digest."""

    namespace: str
    num_tokens: int
    digest: bytes


class SessionFinder:
    """Finds the session of each request among the latest ones of its namespace.

    A prompt continues the session of the longest earlier text that it begins with. Three texts of
    an earlier request count: its prompt and output; the same without the output's last token,
    since a template writes the end of a turn itself; its prompt alone, since an output may come
    back without its thinking or tokenized differently. Equal prompts do not continue each other:
    they are samples of one prompt.

    All marks are compared with a prompt at once, by sums over its beginnings. Only marks that agree
    are compared by their digests. Python code for each mark would hold the interpreter for
    milliseconds, and a server's scheduler needs it.

    prefix: what the names of its sessions begin with.
    max_marks: how many texts are remembered, three per request and about 300 bytes each. The oldest
        are forgotten.
    """

    def __init__(self, prefix: str, *, max_marks: int = 3_072) -> None:
        self._prefix = prefix
        self._num_sessions = 0
        self._sessions: dict[_Mark, Session] = {}  # oldest first
        # Each mark has a place in an array of lengths (0 where there is no mark) and one of sums.
        self._places: dict[_Mark, int] = {}
        self._free = list(range(max_marks))
        self._lengths = np.zeros(max_marks, np.int64)
        self._sums = np.zeros(max_marks, np.uint64)
        self._factors = np.empty(0, np.uint64)

    def place(
        self, prompt_ids: TokenIds, output_ids: TokenIds, *, namespace: str = ""
    ) -> tuple[str, int]:
        """Session and turn of a finished request. Takes a few passes over its tokens."""
        sums = self._sums_of(np.concatenate((prompt_ids, output_ids)))
        session = self._continued(prompt_ids, sums, namespace)
        if session is None:
            session = Session(f"{self._prefix}{self._num_sessions}")
            self._num_sessions += 1
        turn = session.next_turn()
        num_tokens = len(prompt_ids) + len(output_ids)
        lengths = sorted({len(prompt_ids), max(num_tokens - 1, len(prompt_ids)), num_tokens})
        for mark in _marks((prompt_ids, output_ids), lengths, namespace):
            if mark.num_tokens > 0:  # every prompt begins with nothing
                self._remember(mark, sums[mark.num_tokens], session)
        return session.name, turn

    def _continued(self, prompt_ids: TokenIds, sums: _Uint64, namespace: str) -> Session | None:
        lengths = self._lengths
        may_begin = (lengths > 0) & (lengths < len(prompt_ids))
        may_begin &= sums[np.where(may_begin, lengths, 0)] == self._sums
        agreeing = np.unique(lengths[may_begin]).tolist()
        found = None
        for mark in _marks((prompt_ids,), agreeing, namespace):
            found = self._sessions.get(mark, found)
        return found

    def _remember(self, mark: _Mark, of_sum: np.uint64, session: Session) -> None:
        """Makes a mark the latest, and forgets the oldest if there are too many."""
        if self._sessions.pop(mark, None) is None:
            if not self._free:
                self._forget(next(iter(self._sessions)))
            place = self._places[mark] = self._free.pop()
            self._lengths[place], self._sums[place] = mark.num_tokens, of_sum
        self._sessions[mark] = session

    def _forget(self, mark: _Mark) -> None:
        del self._sessions[mark]
        place = self._places.pop(mark)
        self._lengths[place] = 0
        self._free.append(place)

    def _sums_of(self, token_ids: TokenIds) -> _Uint64:
        """A hash of each beginning of a text, uint64[num_tokens + 1].

        It is the sum of the token ids times powers of a base, modulo 2^64.
        """
        if len(self._factors) < len(token_ids):
            self._factors = np.cumprod(np.full(2 * len(token_ids), _BASE), dtype=np.uint64)
        # Ids count from 1, so that appending a zero changes the hash.
        terms = (token_ids.astype(np.uint64) + np.uint64(1)) * self._factors[: len(token_ids)]
        return np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))


def _marks(parts: Sequence[TokenIds], lengths: Sequence[int], namespace: str) -> Iterator[_Mark]:
    """The beginnings of these lengths (ascending) of the concatenated parts."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    part, begin = 0, 0  # where the text that is not hashed yet starts
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
