"""What is asked of the servers, and the target's own replies as recordings."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.client import Answer, Conversation, conversation_of
from benchmarks.workloads.prompts import Prompt
from sglang_hvd.paper.results import Template
from sglang_hvd.replay.core.recordings import TraceTokenizer
from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.trace import Trace
from sglang_hvd.traces.writer import TraceWriter

# HVD keeps its widest verification free at the end of the context. Every mode gets the same limits,
# so that their replies are the same.
_RESERVED_TOKENS = 128

TokensOfTurn = Mapping[tuple[str, int], tuple[int, ...]]


@dataclass(frozen=True)
class Asker:
    """Makes requests of prompts: token ids, so that recordings have exactly what was sent.

    folder: has the target's tokenizer.json and its chat template.
    max_tokens: of a reply. max_sequence: of a prompt and its reply; None: no limit.
    """

    folder: Path
    max_tokens: int
    max_sequence: int | None = None

    @cached_property
    def tokenizer(self) -> TraceTokenizer:
        tokenizer = TraceTokenizer(self.folder / "tokenizer.json", None)
        tokenizer.check()
        return tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer.path)

    def conversation(self, prompt: Prompt, template: Template) -> Conversation:
        """The requests of a prompt and of what the user says after it."""

        def request(prompt: Prompt) -> dict[str, Any]:
            made = prompt.request(self._template if template == "official" else None)
            ids = made.get("input_ids")
            if ids is None:
                # A template writes the special tokens itself.
                special = template == "none"
                ids = self.tokenizer.loaded.encode(made["text"], add_special_tokens=special).ids
            num = self.max_tokens
            if self.max_sequence is not None:
                num = max(1, min(num, self.max_sequence - _RESERVED_TOKENS - len(ids)))
            return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": num}}

        return conversation_of(prompt, request)

    def traces(
        self, conversations: Sequence[Conversation], answers: Sequence[Answer], family: str
    ) -> list[Trace]:
        """The answers as recordings have them, in the order of their conversations."""
        of_conversation: dict[int, list[Answer]] = defaultdict(list)
        for answer in sorted(answers, key=lambda answer: (answer.conversation, answer.turn)):
            of_conversation[answer.conversation].append(answer)
        found = []
        for number, said in of_conversation.items():
            for answer in said:
                body = conversations[number](said[: answer.turn])
                assert body is not None, "the answer was given to a request"
                found.append(
                    Trace(
                        prompt_ids=np.array(body["input_ids"], np.int32),
                        output_ids=np.array(answer.token_ids, np.int32),
                        session=session_of(answer),
                        turn=answer.turn,
                        family=family,
                        tokenizer_fingerprint=self.tokenizer.fingerprint,
                        is_cut=answer.num_tokens >= body["sampling_params"]["max_new_tokens"],
                    )
                )
        return found


def session_of(answer: Answer) -> str:
    """The session of an answer in recordings."""
    return str(answer.conversation)


def record(path: Path, traces: Sequence[Trace]) -> None:
    """Writes replies as a recording, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fingerprint = traces[0].tokenizer_fingerprint if traces else ""
    with TraceWriter(path, tokenizer_fingerprint=fingerprint) as writer:
        for trace in traces:
            writer.write(trace)


def recorded(path: Path) -> list[Trace]:
    """The replies of a recording; none if it is not there.

    Raises ValueError, in one line, if it cannot be read.
    """
    return list(read_traces(path)) if path.exists() else []


def tokens_of(traces: Sequence[Trace]) -> TokensOfTurn:
    """The tokens of each reply, by session and turn."""
    return {(trace.session, trace.turn): tuple(trace.output_ids.tolist()) for trace in traces}
