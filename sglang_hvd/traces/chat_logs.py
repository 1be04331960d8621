"""Chat logs in the form of the OpenAI API (JSONL), of two kinds of lines.

A call:          {"request": {"messages": [...], ...}, "response": {"choices": [...]}}
A conversation:  {"messages": [...]}, as used for fine-tuning; each assistant message is a turn.

Both may have `tools` beside their messages.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sglang_hvd.traces.chatml import END_OF_MESSAGE, REPLY_BEGINS, render_messages, render_reply
from sglang_hvd.traces.json_lines import check_text, read_objects
from sglang_hvd.traces.sessions import Session
from sglang_hvd.traces.trace import Trace

_SAMPLING = ("temperature", "top_p", "top_k")
_FAMILY = "chat"

# Conversations that a later call of a log may go on with.
_MAX_OPEN = 1024


def is_chat_log(first_line: Mapping[str, object]) -> bool:
    """Whether a file that begins with this object is a chat log."""
    return "messages" in first_line or {"request", "response"} <= first_line.keys()


def read_chat_log(path: Path, tokenizer: Tokenizer, *, eos_token_id: int | None) -> Iterator[Trace]:
    """The replies of a chat log, rendered as ChatML.

    A call whose messages begin with those of an earlier call and its reply is the next turn of its
    session, if that has not gone on already: other choices of a call, and other calls that go on
    with the same reply, are samples and begin sessions of their own. A reply that the length limit
    cut off does not get the end token.

    Raises ValueError with file and line for anything that is no such line.
    """
    open_sessions = _Conversations()
    for number, (where, fields) in enumerate(read_objects(path), start=1):
        try:
            calls, is_conversation = _parse(fields)
            conversations = _Conversations() if is_conversation else open_sessions
            traces = []
            for index, call in enumerate(calls):
                name = f"{path.stem}:{number}" + (f".{index}" if index else "")
                traces.append(conversations.trace(call, name, tokenizer, eos_token_id))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        yield from traces


@dataclass(frozen=True, slots=True)
class _Call:
    """One reply and what it replies to. is_cut: it reached the length limit."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any]
    model: str
    sampling: Mapping[str, float]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A session up to the end of a reply. turn: that of the reply."""

    session: Session
    turn: int
    token_ids: list[int]


class _Conversations:
    """Conversations so far, by the digest of their text."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, _Conversation] = OrderedDict()

    def trace(
        self, call: _Call, name: str, tokenizer: Tokenizer, eos_token_id: int | None
    ) -> Trace:
        """The trace of a call. name: what its session is called if the call begins one."""

        def encode(text: str) -> list[int]:
            check_text(text)
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids

        pieces = render_messages(call.messages, call.tools)
        known, num_known = self._longest_beginning(pieces)
        session, history = Session(name), []
        if known is not None:
            history = known.token_ids
            if known.turn == known.session.num_turns - 1:
                session = known.session
        turn = session.next_turn()
        # The text of a known conversation ends with its reply, as the model wrote it.
        rest = (END_OF_MESSAGE if num_known else "") + "".join(pieces[num_known:]) + REPLY_BEGINS
        prompt_ids = history + encode(rest)
        output_ids = encode(render_reply(call.reply, with_thinking=True))
        said = render_reply(call.reply, with_thinking=False)
        key = _digests([*pieces, REPLY_BEGINS + said + END_OF_MESSAGE])[-1]
        self._open[key] = _Conversation(session, turn, prompt_ids + encode(said))
        self._open.move_to_end(key)
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        if eos_token_id is not None and not call.is_cut:
            output_ids = [*output_ids, eos_token_id]
        return Trace(
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            output_ids=np.array(output_ids, dtype=np.int32),
            session=session.name,
            turn=turn,
            family=_FAMILY,
            sampling=call.sampling,
            model=call.model,
            is_cut=call.is_cut,
            text_digest=key.hex(),
        )

    def _longest_beginning(self, pieces: Sequence[str]) -> tuple[_Conversation | None, int]:
        """The longest known conversation that the pieces begin with, and its number of pieces; None
        and 0 without any."""
        digests = _digests(pieces)
        for num_pieces in range(len(pieces), 0, -1):
            known = self._open.get(digests[num_pieces - 1])
            if known is not None:
                return known, num_pieces
        return None, 0


def _digests(pieces: Sequence[str]) -> list[bytes]:
    """The digest of each beginning of the pieces."""
    hasher = hashlib.blake2b(digest_size=16)
    digests = []
    for piece in pieces:
        hasher.update(piece.encode("utf-8", "surrogatepass"))
        digests.append(hasher.digest())
    return digests


def _parse(fields: dict[str, Any]) -> tuple[list[_Call], bool]:
    """The calls of a line, and whether it is a whole conversation. Raises ValueError."""
    if not is_chat_log(fields):
        raise ValueError("not a chat: wanted an object with messages, or with request and response")
    if "messages" in fields:
        return _calls_of_conversation(fields), True
    return _calls_of_exchange(fields["request"], fields["response"]), False


def _calls_of_conversation(fields: dict[str, Any]) -> list[_Call]:
    messages, tools = _messages(fields), _tools(fields)
    calls = [
        _Call(messages[:i], tools, message, _model(fields), {}, is_cut=False)
        for i, message in enumerate(messages)
        if message.get("role") == "assistant"
    ]
    if not calls:
        raise ValueError("not a chat: the assistant says nothing in it")
    return calls


def _calls_of_exchange(request: object, response: object) -> list[_Call]:
    if not isinstance(request, dict) or not isinstance(response, dict):
        raise ValueError("not a chat: request and response are objects")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("not a chat: the response has no choices")
    sampling = {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    if not all(type(value) in (int, float) for value in sampling.values()):
        raise ValueError(f"not a chat: {', '.join(sampling)} are numbers")
    calls = []
    for choice in choices:
        reply = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(reply, dict):
            raise ValueError("not a chat: a choice has no message")
        is_cut = choice.get("finish_reason") == "length"
        calls.append(
            _Call(_messages(request), _tools(request), reply, _model(request), sampling, is_cut)
        )
    return calls


def _messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("not a chat: messages is a list of objects")
    return messages


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]]:
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("not a chat: tools is a list of objects")
    return tools


def _model(fields: dict[str, Any]) -> str:
    model = fields.get("model") or ""
    if not isinstance(model, str):
        raise ValueError("not a chat: model is a string")
    return model
