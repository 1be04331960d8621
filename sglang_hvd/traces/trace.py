"""Trace, one recorded generation, and share_prompts, which lets traces share memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_hvd.types import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One generation: the whole prompt and what the target model generated from it.

    prompt_ids, output_ids: int32[num_tokens].
    session, turn: the conversation it belongs to, and its place there.
    family: kind of workload, as in the paper's section 4.1; "recorded" from a live server.
    sampling: what the request asked of the sampler (temperature, top_p, top_k). Empty: greedy, or
        not known.
    model: name of the target model; "": not known.
    tokenizer_fingerprint: see tokenizer_json.tokenizer_fingerprint; "": not known.
    namespace: requests of other namespaces share no suffix cache with it; "": the common one.
    is_cut: the output ends because of a limit on its length, not because the model ended it. What
        would have followed is not known.
    has_prompt: False if the prompt was left out; prompt_ids is empty then.
    text_digest: digest of what was read as text, equal with every tokenizer; "": read as tokens.
    """

    prompt_ids: TokenIds
    output_ids: TokenIds
    session: str
    turn: int
    family: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    tokenizer_fingerprint: str = ""
    namespace: str = ""
    is_cut: bool = False
    has_prompt: bool = True
    text_digest: str = ""

    def __post_init__(self) -> None:
        assert self.has_prompt or not len(self.prompt_ids), "left out, but there"

    @property
    def text_ids(self) -> TokenIds:
        """int32[num_tokens]; the prompt and the output."""
        return np.concatenate((self.prompt_ids, self.output_ids))


def share_prompts(traces: Iterable[Trace]) -> Iterator[Trace]:
    """The same traces, with prompts that share memory.

    A prompt that continues the prompt of its session's previous turn shares that prompt's memory.
    Otherwise the prompts of a long session would take memory quadratic in its turns.
    """
    latest: dict[str, _GrowingText] = {}
    for trace in traces:
        text = latest.get(trace.session)
        if text is None or not text.begins(trace.prompt_ids):
            text = latest[trace.session] = _GrowingText()
        yield replace(trace, prompt_ids=text.grown_to(trace.prompt_ids))


class _GrowingText:
    """A text that grows. The views of what it was before stay as they are."""

    def __init__(self) -> None:
        self._token_ids = np.empty(0, np.int32)
        self._length = 0

    def begins(self, token_ids: TokenIds) -> bool:
        """Whether the token ids begin with this text."""
        return np.array_equal(self._token_ids[: self._length], token_ids[: self._length])

    def grown_to(self, token_ids: TokenIds) -> TokenIds:
        """Grows to these token ids, which begin with this text; returns a view of them."""
        before, self._length = self._length, len(token_ids)
        if self._length > len(self._token_ids):
            grown = np.empty(max(self._length, 2 * len(self._token_ids)), np.int32)
            grown[:before] = self._token_ids[:before]
            self._token_ids = grown
        self._token_ids[before : self._length] = token_ids[before:]
        shared = self._token_ids[: self._length]
        shared.flags.writeable = False
        return shared
