"""Renders chat messages as a server does: with the chat template of the model's tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROLES = ("system", "developer", "user", "assistant", "tool")

# Optional fields of a message that templates read.
_FIELDS = ("name", "tool_call_id", "reasoning_content")

# Stands for the content of a reply, to find what a template writes before and after it.
_MARK = "\ue000reply\ue000"

# Templates with one of these write each part of a content; other templates want one string
# (sglang/srt/parser/jinja_template_utils.py: detect_jinja_template_content_format).
_TAKES_PARTS = re.compile(
    r"image|audio|video|vision|for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])"
)

# ChatML, with tools and tool calls in the form of Hermes and Qwen 2.5.
_CHATML = (
    "{% set described %}"
    "# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    "{% for tool in tools or [] %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    "{% endset %}"
    "{% set systems = ['system', 'developer'] %}"
    "{% if tools and messages[0].role not in systems %}"
    "<|im_start|>system\n{{ described }}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    # Results of calls that were made together share one message.
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}"
    "<|im_start|>{{ 'system' if message.role in systems else message.role }}\n"
    "{{ message.content }}"
    "{% if tools and loop.first and message.role in systems %}"
    "{{ '\n\n' if message.content else '' }}{{ described }}"
    "{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n' if message.content or not loop.first else '' }}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": '
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    "}\n</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplate:
    """The chat template of a tokenizer; ChatML if it has none.

    tokenizer_file: a tokenizer.json. The template stands in a file in the same folder:
        chat_template.jinja, or tokenizer_config.json. None: no tokenizer, so ChatML.

    Every method raises ValueError, in one line, for a template that cannot be read.
    """

    def __init__(self, tokenizer_file: Path | None = None) -> None:
        self._tokenizer_file = tokenizer_file

    @property
    def is_chatml(self) -> bool:
        """Whether the tokenizer has no template of its own."""
        return self._own is None

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """What a server sends to the model for these messages.

        messages: of the OpenAI API, at least one.
        options: variables of the template, such as enable_thinking.

        Raises ValueError for what is no message, for content that is not text, and for messages
        that the template refuses.
        """
        return self._rendered([self._message(m) for m in messages], tools, options, is_prompt=True)

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        reply: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model generated for an assistant's message, without its end token.

        messages, tools, options: what it replies to, as for `prompt`.

        Raises ValueError as `prompt` does, and for tool calls that the template leaves out.
        """
        message = self._message(reply)
        if message["role"] != "assistant":
            raise ValueError(f"a reply is the assistant's, got the role {message['role']!r}")
        thinking = message.pop("reasoning_content", "")
        text = text_of(reply)
        if "tool_calls" in message:
            text = self._with_calls(messages, message, reply, tools, options)
        if thinking:
            text = f"<think>\n{thinking}\n</think>\n\n{text}"
            # The prompts of some models open the thinking themselves.
            if self.prompt(messages, tools, options).endswith("<think>\n"):
                text = text.removeprefix("<think>\n")
        return text

    def _with_calls(
        self,
        messages: Sequence[Mapping[str, Any]],
        message: dict[str, Any],
        reply: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
    ) -> str:
        """The text of a reply with tool calls, in the template's form."""
        before = [self._message(m) for m in messages]
        marked = {"role": "assistant", "content": _MARK}
        whole = self._rendered([*before, message], tools, options)
        head, _, end = self._rendered([*before, marked], tools, options).partition(_MARK)
        # Before calls without text a template may leave out what it writes before text.
        prompt = self._rendered(before, tools, options, is_prompt=True)
        begin = next((text for text in (head, prompt) if whole.startswith(text)), None)
        text = "" if begin is None else whole[len(begin) :].removesuffix(end)
        end_of_call = 0
        for call, given in zip(message["tool_calls"], reply["tool_calls"], strict=True):
            name, arguments = call["function"]["name"], _json(call["function"]["arguments"])
            if _json(name)[1:-1] not in text:
                raise ValueError(f"the chat template leaves out the tool call {name!r}")
            # A string is what the model wrote, and stays as it is.
            written = given["function"].get("arguments")
            written = written if written and isinstance(written, str) else arguments
            if (place := text.find(arguments, end_of_call)) >= 0:
                text = text[:place] + written + text[place + len(arguments) :]
                end_of_call = place + len(written)
        return text

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        *,
        is_prompt: bool = False,
    ) -> str:
        from jinja2 import TemplateError

        tokenizer = self._own or self._chatml
        # Some templates want functions without the wrapper of the API; servers try it second.
        forms = [[*tools], [tool.get("function", tool) for tool in tools]] if tools else [None]
        refusal: Exception | None = None
        for form in forms:
            try:
                rendered = tokenizer.apply_chat_template(
                    messages,
                    tools=form,
                    tokenize=False,
                    add_generation_prompt=is_prompt,
                    **(options or {}),
                )
            except (TemplateError, TypeError, ValueError, LookupError) as error:
                refusal = error
            else:
                assert isinstance(rendered, str), "one conversation, not tokenized"
                return rendered
        raise ValueError(f"the chat template refuses it: {' '.join(str(refusal).split())}")

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as a server hands it to a template."""
        content: object = text_of(message)
        parts = message.get("content")
        if isinstance(parts, list) and self._own is not None:
            content = " ".join(part["text"] for part in parts)
            if self._takes_parts and message["role"] != "tool":
                content = parts
        made = {"role": message["role"], "content": content}
        made |= {name: message[name] for name in _FIELDS if message.get(name) is not None}
        if calls := calls_of(message):
            made["tool_calls"] = [
                {**call, "function": {"name": name, "arguments": arguments}}
                for call, (name, arguments) in zip(message["tool_calls"], calls, strict=True)
            ]
        return made

    @cached_property
    def _own(self) -> PreTrainedTokenizerFast | None:
        """Renders with the tokenizer's own template."""
        from transformers import PreTrainedTokenizerFast

        file = self._tokenizer_file
        if file is None:
            return None
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                file.absolute().parent, tokenizer_file=str(file.absolute()), local_files_only=True
            )
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            # What transformers raises for JSON of another form than it expects.
            told = " ".join(str(error).split())
            raise ValueError(f"{file.parent}: cannot read the chat template: {told}") from None
        return tokenizer if tokenizer.chat_template else None

    @cached_property
    def _chatml(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        no_tokenizer = Tokenizer(WordLevel({"": 0}, unk_token=""))
        return PreTrainedTokenizerFast(tokenizer_object=no_tokenizer, chat_template=_CHATML)

    @cached_property
    def _takes_parts(self) -> bool:
        assert self._own is not None, "ChatML takes strings"
        return _TAKES_PARTS.search(str(self._own.chat_template)) is not None


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message of the OpenAI API, its parts put together.

    Raises ValueError for an unknown role and for content that is not text.
    """
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ValueError(f"a message has one of the roles {', '.join(_ROLES)}, got {role!r}")
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, list) and all(_is_text(part) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"the content of a message is text, got {str(content)[:80]!r}")


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name and arguments of each tool call of a message.

    The arguments are parsed, as servers parse them; a string that is not JSON stays a string.

    Raises ValueError for anything that is no tool call.
    """
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is a list, got {str(calls)[:80]!r}")
    return [_call(call) for call in calls]


def _call(call: object) -> tuple[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call has a function with a name, got {str(call)[:80]!r}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the model may have written something else
            arguments = json.loads(arguments)
    return function["name"], arguments


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _json(value: object) -> str:
    """As the `tojson` of transformers' templates writes it."""
    return json.dumps(value, ensure_ascii=False)
