"""Chat messages of the OpenAI API as ChatML, with tools and their calls in Qwen's (Hermes) form."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

END_OF_MESSAGE = "<|im_end|>\n"
REPLY_BEGINS = "<|im_start|>assistant\n"

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TOOLS_BEGIN = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_END = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def render_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """The text of each message, its end included; together they are the conversation.

    The first begins with the tools, if there are any. Thinking of earlier replies is left out, as
    models that think are served.

    Raises ValueError for what is no such message, or holds anything but text.
    """
    roles = [_role(message) for message in messages]
    rendered = []
    for index, message in enumerate(messages):
        role = roles[index]
        text = _content(message)
        if role == "assistant":
            text = _with_calls(text, message)
        elif role == "system" and index == 0 and tools:
            text = f"{text}\n\n{_tools(tools)}" if text else _tools(tools)
        if role != "tool":
            rendered.append(f"<|im_start|>{role}\n{text}{END_OF_MESSAGE}")
            continue
        # Results of calls made together come back in one message.
        begin = "" if index and roles[index - 1] == "tool" else "<|im_start|>user"
        end = "" if roles[index + 1 : index + 2] == ["tool"] else END_OF_MESSAGE
        rendered.append(f"{begin}\n<tool_response>\n{text}\n</tool_response>{end}")
    if tools and rendered and roles[0] != "system":
        rendered[0] = f"<|im_start|>system\n{_tools(tools)}{END_OF_MESSAGE}{rendered[0]}"
    return rendered


def render_reply(message: Mapping[str, Any], *, with_thinking: bool) -> str:
    """What the model generated for an assistant message, without the end of the message."""
    if _role(message) != "assistant":
        raise ValueError(f"a reply is the assistant's, got the role {message['role']!r}")
    text = _with_calls(_content(message), message)
    thinking = message.get("reasoning_content")
    if with_thinking and thinking:
        return f"<think>\n{thinking}\n</think>\n\n{text}"
    return text


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"a message has one of the roles {', '.join(_ROLES)}, got {role!r}")
    return _ROLES[role]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, list) and all(_is_text(part) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"the content of a message is text, got {str(content)[:80]!r}")


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _with_calls(text: str, message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is a list, got {str(calls)[:80]!r}")
    return "\n".join(([text] if text else []) + [_call(call) for call in calls])


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call has a function with a name, got {str(call)[:80]!r}")
    arguments = function.get("arguments", {})
    # A string is what the model wrote, and stays as it is.
    written = arguments if isinstance(arguments, str) else _json(arguments)
    name = _json(function["name"])
    return f'<tool_call>\n{{"name": {name}, "arguments": {written or "{}"}}}\n</tool_call>'


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return _TOOLS_BEGIN + "\n".join(_json(tool) for tool in tools) + _TOOLS_END


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
