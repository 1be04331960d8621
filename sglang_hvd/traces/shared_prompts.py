"""Many traces in memory at once, whose prompts repeat what came before them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import TokenIds


def share_prompts(traces: Iterable[Trace]) -> Iterator[Trace]:
    """The same traces. A prompt that goes on from that of the session's turn before, with its reply
    or another, shares its memory: each by itself, the prompts of a long session take memory by the
    square of its turns."""
    latest: dict[str, _GrowingText] = {}
    for trace in traces:
        text = latest.get(trace.session)
        if text is None or not text.begins(trace.prompt_ids):
            text = latest[trace.session] = _GrowingText()
        yield replace(trace, prompt_ids=text.grown_to(trace.prompt_ids))


class _GrowingText:
    """What it was grown to before stays as it is."""

    def __init__(self) -> None:
        self._token_ids = np.empty(0, np.int32)
        self._length = 0

    def begins(self, token_ids: TokenIds) -> bool:
        return np.array_equal(self._token_ids[: self._length], token_ids[: self._length])

    def grown_to(self, token_ids: TokenIds) -> TokenIds:
        """token_ids: what it begins."""
        before, self._length = self._length, len(token_ids)
        if self._length > len(self._token_ids):
            grown = np.empty(max(self._length, 2 * len(self._token_ids)), np.int32)
            grown[:before] = self._token_ids[:before]
            self._token_ids = grown
        self._token_ids[before : self._length] = token_ids[before:]
        shared = self._token_ids[: self._length]
        shared.flags.writeable = False
        return shared
