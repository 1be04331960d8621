"""Messages as ChatML: tools, calls and results stand as Qwen's template has them."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.traces.chatml import render_messages, render_reply

CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"all":true}'}}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def message(role: str, content: object = None, **others: object) -> dict[str, object]:
    return {"role": role, "content": content, **others}


def test_messages_stand_one_after_another() -> None:
    assert render_messages([message("system", "S"), message("user", "U\n")]) == [
        "<|im_start|>system\nS<|im_end|>\n",
        "<|im_start|>user\nU\n<|im_end|>\n",
    ]


def test_calls_follow_the_text_and_keep_the_model_s_spelling() -> None:
    other = {"function": {"name": 'a"b', "arguments": {"é": 1}}}
    reply = message("assistant", "Look:", tool_calls=[CALL, other])
    text = (
        'Look:\n<tool_call>\n{"name": "ls", "arguments": {"all":true}}\n</tool_call>\n'
        '<tool_call>\n{"name": "a\\"b", "arguments": {"é": 1}}\n</tool_call>'
    )
    assert render_reply(reply, with_thinking=True) == text
    assert render_messages([reply]) == [f"<|im_start|>assistant\n{text}<|im_end|>\n"]
    alone = render_reply(message("assistant", None, tool_calls=[CALL]), with_thinking=True)
    assert alone.startswith("<tool_call>\n")


def test_results_of_calls_made_together_share_a_message() -> None:
    messages = [message("assistant", "x"), message("tool", "1"), message("tool", "2")]
    assert "".join(render_messages([*messages, message("user", "3")])[1:]) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n3<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "messages", [[message("system", "S"), message("user", "U")], [message("user", "U")]]
)
def test_tools_stand_in_the_system_message(messages: list[dict[str, Any]]) -> None:
    text = "".join(render_messages(messages, [TOOL]))
    head = "S\n\n# Tools" if len(messages) == 2 else "# Tools"
    assert text.startswith(f"<|im_start|>system\n{head}")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>user\nU<|im_end|>\n")


def test_tools_are_told_as_in_recorded_text(traces_dir: Path) -> None:
    line = (traces_dir / "structured_tool__taubench_airline_gpt4o.jsonl").open().readline()
    prompt = json.loads(line)["prompt"]
    described = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
    tools = [json.loads(tool) for tool in described.splitlines()]
    system, _, rest = prompt.removeprefix("<|im_start|>system\n").partition("\n\n# Tools")
    user = rest.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    rendered = render_messages([message("system", system), message("user", user)], tools)
    assert "".join(rendered) + "<|im_start|>assistant\n" == prompt


def test_thinking_is_generated_but_not_sent_again() -> None:
    reply = message("assistant", "4", reasoning_content="2 + 2")
    assert render_reply(reply, with_thinking=True) == "<think>\n2 + 2\n</think>\n\n4"
    assert render_messages([reply]) == ["<|im_start|>assistant\n4<|im_end|>\n"]


def test_text_in_parts_is_put_together() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_messages([message("user", parts)]) == ["<|im_start|>user\nab<|im_end|>\n"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (message("narrator", "x"), "one of the roles system, .* got 'narrator'"),
        ({"content": "x"}, "one of the roles .* got None"),
        (message("user", 5), "the content of a message is text, got '5'"),
        (message("user", [{"type": "image_url"}]), "the content of a message is text"),
        (message("assistant", "x", tool_calls="ls"), "tool_calls is a list, got 'ls'"),
        (message("assistant", "x", tool_calls=[{}]), "a tool call has a function with a name"),
    ],
)
def test_what_cannot_be_rendered_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        render_messages([wrong])
