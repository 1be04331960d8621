"""Chat messages are rendered as servers do it: with the tokenizer's own template, or ChatML."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sglang_hvd.replay.core.recordings import TraceTokenizer
from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.reader import read_traces

CALL = {"id": "123456789", "type": "function"} | {
    "function": {"name": "ls", "arguments": '{"all":true}'}
}
TOOL, OTHER_TOOL = (
    {
        "type": "function",
        "function": {"name": name, "description": "Does.", "parameters": {"type": "object"}},
    }
    for name in ("ls", "rm")
)

# ChatML as of a model that thinks: thinking before the last question is left out.
THINKING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{%- if loop.last or m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>"
    "{%- endfor %}<|im_end|>\n"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}"
    "{%- for m in messages %}"
    "{%- set role = 'ipython' if m.role == 'tool' else m.role %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{%- if tools and loop.first %}Functions: "
    "{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{{ '\n\n' }}{% endif %}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{%- else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{- bos_token }}"
    "{%- for tool in tools or [] %}[AVAILABLE_TOOLS]{{ tool.name + ': ' + (tool | tojson) }}"
    "{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{%- elif m.tool_calls %}[TOOL_CALLS] ["
    "{%- for call in m.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{- call.function | tojson }}{{ ', ' if not loop.last else '' }}"
    "{%- endfor %}]{{ eos_token }}"
    "{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{%- else %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{%- endfor %}"
)
PARTS = (
    "{%- for message in messages %}{{ message.role + ': ' }}"
    "{%- if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}{{ eos_token }}"
    "{%- endfor %}{%- if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {"thinking": THINKING, "llama": LLAMA, "mistral": MISTRAL, "parts": PARTS}


def message(role: str, content: object = None, **others: object) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


CHATS: dict[str, dict[str, Any]] = {
    "question": {"messages": [message("user", " a\n")]},
    "system": {"messages": [message("system", "S"), message("user", "a")]},
    "turns": {"messages": [message("user", "a"), message("assistant", "b "), message("user", "c")]},
    "parts": {
        "messages": [
            message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
        ]
    },
    "tools": {
        "messages": [
            message("user", "a"),
            message("assistant", None, tool_calls=[CALL]),
            message("tool", [{"type": "text", "text": "x"}], tool_call_id="123456789"),
        ],
        "tools": [TOOL],
    },
    "thinking": {
        "messages": [
            message("user", "a"),
            message("assistant", "b", reasoning_content="why"),
            message("user", "c"),
            message("assistant", "d", reasoning_content="how", tool_calls=[CALL]),
            message("tool", "x", tool_call_id="123456789"),
        ],
    },
    "options": {
        "messages": [message("user", "a")],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "no tools": {"messages": [message("user", "a")], "tools": [TOOL], "tool_choice": "none"},
    "one tool": {
        "messages": [message("user", "a")],
        "tools": [TOOL, OTHER_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "rm"}},
    },
}


@pytest.fixture
def with_template(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[str], Path]:
    """Saves a tokenizer with a chat template; gives its tokenizer.json."""

    def save(template: str) -> Path:
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
        )
        return tmp_path / "tokenizer.json"

    return save


def served(tokenizer_file: Path, request: dict[str, Any]) -> tuple[str, list[int]] | None:
    """What SGLang's server renders for a request; None: it refuses the request.

    The steps of OpenAIServingChat._process_messages and _apply_jinja_template, by SGLang's own
    functions and the tokenizer that SGLang loads.
    """
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import (
        normalize_assistant_tool_call_arguments,
        normalize_tool_content,
    )
    from sglang.srt.parser.jinja_template_utils import (
        detect_jinja_template_content_format,
        process_content_for_template_format,
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_file.parent)
    asked = ChatCompletionRequest(model="m", **copy.deepcopy(request))
    form = detect_jinja_template_content_format(tokenizer.chat_template)
    messages = []
    for one in [m.model_dump() for m in asked.messages]:
        normalize_assistant_tool_call_arguments(one)
        one["content"] = "" if one.get("content") is None else one["content"]
        one = process_content_for_template_format(one, form, [], [], [], [])
        messages.append({**one, "content": normalize_tool_content(one["role"], one["content"])})
    # SGLang 0.5.23 adds "defer_loading": null to tools, and "description": null to those without.
    tools = [tool.model_dump(exclude={"defer_loading"}) for tool in asked.tools or []]
    if asked.tool_choice == "none":
        tools = []
    elif not isinstance(asked.tool_choice, str):
        wanted = asked.tool_choice.function.name
        tools = [tool for tool in tools if tool["function"]["name"] == wanted]
    for form_of_tools in (tools or None, [tool["function"] for tool in tools] or None):
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tools=form_of_tools,
                tokenize=False,
                add_generation_prompt=True,
                **(asked.chat_template_kwargs or {}),
            )
        except Exception:  # noqa: BLE001, as the server does
            continue
        return text, tokenizer.encode(text, add_special_tokens=False)
    return None


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_what_the_server_renders(
    tmp_path: Path, with_template: Callable[[str], Path], template: str
) -> None:
    file = with_template(TEMPLATES[template])
    num_refused = 0
    for name, request in CHATS.items():
        expected = served(file, request)
        log = tmp_path / f"{name}.jsonl"
        choice = {"message": message("assistant", "b")}
        log.write_text(json.dumps({"request": request, "response": {"choices": [choice]}}) + "\n")
        if expected is None:
            num_refused += 1
            with pytest.raises(ValueError, match="1: the chat template refuses it: ") as error:
                list(read_traces(log, file))
            assert "\n" not in str(error.value)
            continue
        text, ids = expected
        [trace] = read_traces(log, file)
        assert trace.prompt_ids.tolist() == ids
        if not {"tool_choice", "chat_template_kwargs"} & request.keys():
            own = ChatTemplate(file)
            assert own.prompt(request["messages"], request.get("tools", ())) == text
    # Mistral's knows no system message.
    assert num_refused == (template == "mistral")


@pytest.mark.parametrize(
    ("template", "reply", "text"),
    [
        ("thinking", message("assistant", "b "), "b "),
        ("llama", message("assistant", "b "), "b "),
        ("mistral", message("assistant", "b "), "b "),
        ("thinking", message("assistant", "b", reasoning_content="y"), "<think>\ny\n</think>\n\nb"),
        ("llama", message("assistant", "b", reasoning_content="y"), "<think>\ny\n</think>\n\nb"),
        (
            "thinking",
            message("assistant", "b", tool_calls=[CALL, CALL]),
            'b\n<tool_call>ls {"all":true}</tool_call>\n<tool_call>ls {"all":true}</tool_call>',
        ),
        (
            "llama",
            message("assistant", None, tool_calls=[CALL]),
            '{"name": "ls", "parameters": {"all":true}}',
        ),
        (
            "mistral",
            message("assistant", None, tool_calls=[CALL]),
            '[TOOL_CALLS] [{"name": "ls", "arguments": {"all":true}}]',
        ),
    ],
)
def test_a_reply_is_what_the_model_wrote(
    with_template: Callable[[str], Path], template: str, reply: dict[str, Any], text: str
) -> None:
    own = ChatTemplate(with_template(TEMPLATES[template]))
    assert not own.is_chatml
    assert own.reply([message("user", "a")], reply) == text


def test_thinking_that_the_prompt_opens_is_not_opened_again(
    with_template: Callable[[str], Path],
) -> None:
    end = "<|end_header_id|>\n\n{% endif %}"
    assert LLAMA.endswith(end)
    opening = end.replace("{%", "<think>\n{%")
    own = ChatTemplate(with_template(LLAMA.removesuffix(end) + opening))
    question = [message("user", "a")]
    assert own.prompt(question).endswith("<think>\n")
    reply = message("assistant", "b", reasoning_content="y")
    assert own.reply(question, reply) == "y\n</think>\n\nb"
    called = message("assistant", None, tool_calls=[CALL])
    assert own.reply(question, called) == '{"name": "ls", "parameters": {"all":true}}'


def test_tool_calls_that_a_template_leaves_out_are_refused(
    with_template: Callable[[str], Path],
) -> None:
    own = ChatTemplate(with_template(PARTS))
    with pytest.raises(ValueError, match="the chat template leaves out the tool call 'ls'"):
        own.reply([message("user", "a")], message("assistant", "b", tool_calls=[CALL]))


def test_the_template_may_stand_in_a_file_of_its_own(
    tmp_path: Path, with_template: Callable[[str], Path]
) -> None:
    file = with_template("from the config")
    (tmp_path / "chat_template.jinja").write_text(PARTS)
    other = file.rename(tmp_path / "other name.json")
    assert ChatTemplate(other).prompt([message("user", "a")]) == "user: a</s>assistant: "


def test_a_template_that_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, with_template: Callable[[str], Path]
) -> None:
    file = with_template("{% if %}")
    with pytest.raises(ValueError, match="the chat template refuses it: ") as error:
        ChatTemplate(file).prompt([message("user", "a")])
    assert "\n" not in str(error.value)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=f"{tmp_path}: cannot read the chat template: ") as error:
        ChatTemplate(file).prompt([message("user", "a")])
    assert "\n" not in str(error.value)


def test_a_committed_template_of_qwen_is_used(
    tokenizer_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tokenizer_file.parent / "tokenizer_config.qwen2-as-committed.json"
    if not config.exists():
        pytest.skip(f"{config} is not there")
    (tmp_path / "tokenizer.json").symlink_to(tokenizer_file)
    (tmp_path / "tokenizer_config.json").write_bytes(config.read_bytes())
    tokenizer = TraceTokenizer(tmp_path / "tokenizer.json", None)
    log = tmp_path / "chat.jsonl"
    chat = {"messages": [message("user", "a"), message("assistant", "b")]}
    log.write_text(json.dumps(chat) + "\n")
    tokenizer.check_chats([log])
    assert capsys.readouterr().err == ""
    [trace] = read_traces(log, tmp_path / "tokenizer.json")
    assert tokenizer.loaded.decode(trace.prompt_ids.tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chatml_is_said_once_and_only_of_chat_logs(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    of_traces = TraceTokenizer(tmp_path / "tokenizer.json", None)
    other, log = tmp_path / "other.jsonl", tmp_path / "chat.jsonl"
    other.write_text('{"family": "x"}\n')
    log.write_text(json.dumps({"messages": [message("user", "a")]}) + "\n")
    of_traces.check_chats([other])
    assert capsys.readouterr().err == ""
    of_traces.check_chats([other, log, log])
    assert capsys.readouterr().err == (
        f"{tmp_path} has no chat template (chat_template.jinja or tokenizer_config.json): chat "
        "logs are rendered as ChatML\n"
    )


# ---- ChatML ----

CHATML = ChatTemplate()
REPLY_BEGINS = "<|im_start|>assistant\n"


def chatml(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    return CHATML.prompt(messages, tools or ()).removesuffix(REPLY_BEGINS)


def test_messages_stand_one_after_another() -> None:
    assert CHATML.prompt([message("system", "S"), message("user", "U\n")]) == (
        f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU\n<|im_end|>\n{REPLY_BEGINS}"
    )


def test_calls_follow_the_text_and_replies_keep_the_model_s_spelling() -> None:
    other = {"function": {"name": 'a"b', "arguments": {"é": 1}}}
    reply = message("assistant", "Look:", tool_calls=[CALL, other])
    text = (
        'Look:\n<tool_call>\n{"name": "ls", "arguments": {"all":true}}\n</tool_call>\n'
        '<tool_call>\n{"name": "a\\"b", "arguments": {"é": 1}}\n</tool_call>'
    )
    question = [message("user", "U")]
    assert CHATML.reply(question, reply) == text
    # A server parses the arguments that it is sent, and the template writes them again.
    sent = text.replace('{"all":true}', '{"all": true}')
    assert chatml([reply]) == f"<|im_start|>assistant\n{sent}<|im_end|>\n"
    alone = CHATML.reply(question, message("assistant", None, tool_calls=[CALL]))
    assert alone.startswith("<tool_call>\n")


@pytest.mark.parametrize(
    ("arguments", "written"), [("", "{}"), (None, "{}"), ("not JSON", "not JSON"), ("[1]", "[1]")]
)
def test_arguments_of_any_kind_are_written(arguments: object, written: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    assert CHATML.reply([message("user", "U")], message("assistant", "", tool_calls=calls)) == (
        f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    )


def test_results_of_calls_made_together_share_a_message() -> None:
    messages = [message("assistant", "x"), message("tool", "1"), message("tool", "2")]
    before = chatml(messages[:1])
    assert chatml([*messages, message("user", "3")]).removeprefix(before) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n3<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "messages", [[message("system", "S"), message("user", "U")], [message("user", "U")]]
)
def test_tools_stand_in_the_system_message(messages: list[dict[str, Any]]) -> None:
    text = chatml(messages, [TOOL])
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
    assert CHATML.prompt([message("system", system), message("user", user)], tools) == prompt


def test_thinking_is_generated_but_not_sent_again() -> None:
    reply = message("assistant", "4", reasoning_content="2 + 2")
    assert CHATML.reply([message("user", "U")], reply) == "<think>\n2 + 2\n</think>\n\n4"
    assert chatml([reply]) == "<|im_start|>assistant\n4<|im_end|>\n"


def test_text_in_parts_is_put_together() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chatml([message("user", parts)]) == "<|im_start|>user\nab<|im_end|>\n"


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
        chatml([wrong])
