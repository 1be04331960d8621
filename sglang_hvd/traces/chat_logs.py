"""Reads chat logs in the form of the OpenAI API (JSONL). There are two kinds of lines.

A call:          {"request": {"messages": [...], ...}, "response": {"choices": [...]}}
A conversation:  {"messages": [...]}, as used for fine-tuning; each assistant message is a turn.

Both may have `tools` and `chat_template_kwargs` next to their messages.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sglang_hvd.traces.chat_templates import ChatTemplate, calls_of, text_of
from sglang_hvd.traces.session_finder import Session
from sglang_hvd.traces.text_traces import check_text, read_objects
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import TokenIds

_SAMPLING = ("temperature", "top_p", "top_k")
_FAMILY = "chat"

# Conversations that a later call of a log may continue.
_MAX_OPEN = 1024


def is_chat_log(first_line: Mapping[str, object]) -> bool:
    """Whether a file that begins with this object is a chat log."""
    return "messages" in first_line or {"request", "response"} <= first_line.keys()


def read_chat_log(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate, *, eos_token_id: int | None
) -> Iterator[Trace]:
    """The replies of a chat log.

    A prompt is what a server sends to the model for the messages of a call: rendered with the chat
    template, then tokenized as a whole.

    A call is the next turn of a session if its messages begin with those of an earlier call and its
    reply, and if the session has not gone on already. Other choices of a call, and other calls that
    continue the same reply, are samples and begin sessions of their own. A reply that the length
    limit cut off does not get the end token.

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
                session, turn, digest = conversations.place(call, name)
                prompt = template.prompt(call.messages, call.tools, call.options)
                reply = template.reply(call.messages, call.reply, call.tools, call.options)
                has_end = eos_token_id is not None and not call.is_cut
                traces.append(
                    Trace(
                        prompt_ids=_encoded(prompt, tokenizer),
                        output_ids=_encoded(reply, tokenizer, eos_token_id if has_end else None),
                        session=session,
                        turn=turn,
                        family=_FAMILY,
                        sampling=call.sampling,
                        model=call.model,
                        is_cut=call.is_cut,
                        text_digest=digest,
                    )
                )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        yield from traces


@dataclass(frozen=True, slots=True)
class _Call:
    """One reply and what it replies to.

    options: variables of the chat template.
    is_cut: whether the reply reached the length limit.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any]
    model: str
    sampling: Mapping[str, float]
    options: Mapping[str, Any]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A session up to the end of a reply. turn: that of the reply."""

    session: Session
    turn: int


class _Conversations:
    """Conversations so far, by the digest of their tools and messages."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, _Conversation] = OrderedDict()

    def place(self, call: _Call, name: str) -> tuple[str, int, str]:
        """Session and turn of a call, and the digest of its text in hexadecimal.

        name: what its session is called if the call begins one.
        """
        *digests, key = _digests(call)
        known = next((self._open[d] for d in reversed(digests) if d in self._open), None)
        session = Session(name)
        if known is not None and known.turn == known.session.num_turns - 1:
            session = known.session
        turn = session.next_turn()
        self._open[key] = _Conversation(session, turn)
        self._open.move_to_end(key)
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return session.name, turn, key.hex()


def _digests(call: _Call) -> list[bytes]:
    """The digest of each beginning of the messages with the reply; equal with every tokenizer.

    Thinking does not count: clients do not send it again.
    """
    hasher = hashlib.blake2b(json.dumps(call.tools).encode(), digest_size=16)
    digests = []
    for message in (*call.messages, call.reply):
        told = [message.get("role"), text_of(message), calls_of(message)]
        hasher.update(json.dumps(told, sort_keys=True).encode())
        digests.append(hasher.digest())
    return digests


def _encoded(text: str, tokenizer: Tokenizer, eos_token_id: int | None = None) -> TokenIds:
    check_text(text)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return np.array(ids if eos_token_id is None else [*ids, eos_token_id], dtype=np.int32)


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
        _Call(messages[:i], tools, message, _model(fields), {}, _options(fields), is_cut=False)
        for i, message in enumerate(messages)
        if i > 0 and message.get("role") == "assistant"
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
        calls.append(
            _Call(
                messages=_messages(request),
                tools=_tools(request),
                reply=reply,
                model=_model(request),
                sampling=sampling,
                options=_options(request),
                is_cut=choice.get("finish_reason") == "length",
            )
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
    choice = fields.get("tool_choice")
    if choice == "none":
        return []
    if isinstance(choice, dict):  # the model may call this function only
        tools = [tool for tool in tools if _function_name(tool) == _function_name(choice)]
    return tools


def _function_name(tool: dict[str, Any]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _model(fields: dict[str, Any]) -> str:
    model = fields.get("model") or ""
    if not isinstance(model, str):
        raise ValueError("not a chat: model is a string")
    return model


def _options(fields: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template, as SGLang takes them from a request."""
    options = fields.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError("not a chat: chat_template_kwargs is an object")
    effort = fields.get("reasoning_effort")
    return options if effort is None else {"reasoning_effort": effort, **options}
