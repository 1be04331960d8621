"""Outputs of the shared cache as values: what leaves it for a file, and enters it again."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import TokenIds


def namespace_name(cache_salt: str = "", extra_key: str = "", part: str = "") -> str:
    """Names what SGLang's prefix cache keeps apart, requests with different salts, or with
    different keys including the adapter, and the parts of these that requests name. Empty without
    any of them.

    No name that a client chooses leads to the requests of another salt or key: their digest is part
    of the name, and every name is a digest.
    """
    is_apart = bool(cache_salt or extra_key)
    whole = _digest(f"{len(cache_salt)}:{cache_salt}{extra_key}") if is_apart else ""
    return _digest(f"part of {whole}:{part}") if part else whole


@dataclass(frozen=True, slots=True, eq=False)
class SharedOutputs:
    """Outputs in the order in which they were kept, and the namespaces that share them.

    namespaces: names, as namespace_name makes them.
    spaces: int32[num_outputs], the place of each output's namespace in namespaces.
    lengths: int32[num_outputs], tokens of each output.
    kept_at: int64[num_outputs], when each was kept, in seconds since 1970.
    token_ids: int32[num_tokens], of all outputs.

    Raises ValueError for arrays that do not fit each other.
    """

    namespaces: Sequence[str]
    spaces: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    kept_at: npt.NDArray[np.int64]
    token_ids: TokenIds

    def __post_init__(self) -> None:
        num_outputs = len(self.lengths)
        if len(self.spaces) != num_outputs or len(self.kept_at) != num_outputs:
            raise ValueError("outputs, their namespaces and their ages differ in number")
        if num_outputs and not 0 <= self.spaces.min() <= self.spaces.max() < len(self.namespaces):
            raise ValueError("an output is of no namespace")
        if self.lengths.min(initial=0) < 0 or self.lengths.sum(dtype=np.int64) != len(
            self.token_ids
        ):
            raise ValueError("the lengths of the outputs do not add up to their tokens")
        if self.token_ids.min(initial=0) < 0:
            raise ValueError("token ids must not be negative")

    @classmethod
    def of_texts(cls, texts: Sequence[TokenIds], namespace: str = "") -> "SharedOutputs":
        """Outputs of one namespace that are kept now."""
        lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        return cls.of_arrays(lengths, np.concatenate([np.empty(0, np.int32), *texts]), namespace)

    @classmethod
    def of_arrays(
        cls, lengths: npt.NDArray[np.int32], token_ids: TokenIds, namespace: str = ""
    ) -> "SharedOutputs":
        """The same, from lengths and the tokens of all texts."""
        return cls(
            namespaces=[namespace],
            spaces=np.zeros(len(lengths), np.int32),
            lengths=lengths,
            kept_at=np.full(len(lengths), int(time.time()), np.int64),
            token_ids=token_ids,
        )

    def split(self, num_tokens: int, num_outputs: int) -> Iterator["SharedOutputs"]:
        """The same outputs in several values. Each has at most num_outputs outputs, and ends with
        the one that reaches num_tokens."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        begin = token = 0
        while begin < len(ends):
            reaches = int(np.searchsorted(ends, token + num_tokens)) + 1
            stop = min(reaches, begin + num_outputs, len(ends))
            end = int(ends[stop - 1])
            yield SharedOutputs(
                self.namespaces,
                self.spaces[begin:stop],
                self.lengths[begin:stop],
                self.kept_at[begin:stop],
                self.token_ids[token:end],
            )
            begin, token = stop, end

    def by_namespace(
        self,
    ) -> Iterator[tuple[str, TokenIds, npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Runs of outputs of one namespace, in order: its name, token ids, lengths and kept_at."""
        if not len(self.lengths):
            return
        stops = np.append(np.flatnonzero(np.diff(self.spaces)) + 1, len(self.spaces))
        ends = np.cumsum(self.lengths, dtype=np.int64)
        begin = token = 0
        for stop in stops.tolist():
            end = int(ends[stop - 1])
            yield (
                self.namespaces[self.spaces[begin]],
                self.token_ids[token:end],
                self.lengths[begin:stop],
                self.kept_at[begin:stop],
            )
            begin, token = stop, end


@dataclass(frozen=True, slots=True)
class NamespaceContents:
    """What one namespace of the shared cache holds.

    num_bytes: memory of its text and tables.
    oldest, newest: when its outputs were kept, in seconds since 1970.
    num_drafts: drafts that were found in it since the server began.
    """

    name: str
    num_outputs: int
    num_tokens: int
    num_bytes: int
    oldest: int
    newest: int
    num_drafts: int


def _digest(name: str) -> str:
    # Clients choose names: they have any length, and may hold unpaired surrogates.
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
