"""The latest texts of sessions, from which a file's later prompts take their beginning."""

import numpy as np

from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import TokenIds

# A part of the format: writer and reader forget the same texts at the same record. 64 MiB.
MAX_TURN_TEXT_TOKENS = 1 << 24


class TurnTexts:
    """Prompt and output of each session's latest turn in one file; the oldest are forgotten.

    A turn whose prompt was left out leaves no text.
    """

    def __init__(self, max_tokens: int = MAX_TURN_TEXT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._texts: dict[str, TokenIds] = {}  # oldest first
        self._num_tokens = 0

    def num_kept(self, session: str, prompt_ids: TokenIds) -> int:
        """How many tokens of its session's text a prompt begins with."""
        text = self._texts.get(session)
        if text is None:
            return 0
        length = min(len(text), len(prompt_ids))
        differs = text[:length] != prompt_ids[:length]
        return int(np.argmax(differs)) if differs.any() else length

    def first(self, session: str, num_tokens: int) -> TokenIds | None:
        """int32[num_tokens], the beginning of a session's text; None if there are not as many."""
        text = self._texts.get(session, np.empty(0, np.int32))
        return text[:num_tokens] if num_tokens <= len(text) else None

    def advance(self, trace: Trace) -> None:
        """Puts this turn's text in the place of the one before it."""
        self._num_tokens -= len(self._texts.pop(trace.session, ()))
        if trace.has_prompt:
            text = self._texts[trace.session] = trace.text_ids
            self._num_tokens += len(text)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._texts.pop(next(iter(self._texts))))
