"""Chat logs: every reply becomes a turn of its conversation."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from sglang_hvd.traces import chat_logs
from sglang_hvd.traces.chat_logs import read_chat_log
from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.trace import Trace


@pytest.fixture
def tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Also knows the words of ChatML."""
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.add_tokens(["system", "user", "assistant"])
    return tokenizer


def said(role: str, content: str, **others: object) -> dict[str, object]:
    return {"role": role, "content": content, **others}


def call(*messages: dict[str, object], reply: object, **request: object) -> dict[str, Any]:
    choice = {"message": said("assistant", reply) if isinstance(reply, str) else reply}
    return {"request": {"messages": messages, **request}, "response": {"choices": [choice]}}


def read(
    path: Path, tokenizer: Tokenizer, *lines: object, eos_token_id: int | None = None
) -> list[Trace]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(read_chat_log(path, tokenizer, ChatTemplate(), eos_token_id=eos_token_id))


def texts(tokenizer: Tokenizer, traces: list[Trace]) -> list[tuple[str, str]]:
    def text(ids: Any) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    return [(text(trace.prompt_ids), text(trace.output_ids)) for trace in traces]


START, END = "<|im_start|>", "<|im_end|>"


def test_every_reply_of_a_conversation_is_a_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    conversation = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    line = {"messages": [*conversation, said("assistant", "d")], "model": "m"}
    traces = read(tmp_path / "log.jsonl", tokenizer, line, line, eos_token_id=0)
    first = f"{START} user a {END} {START} assistant"
    second = f"{first} b {END} {START} user c {END} {START} assistant"
    assert texts(tokenizer, traces) == [(first, "b <eos>"), (second, "d <eos>")] * 2
    assert [(trace.session, trace.turn) for trace in traces] == [
        ("log:1", 0),
        ("log:1", 1),
        ("log:2", 0),
        ("log:2", 1),
    ]
    assert {trace.model for trace in traces} == {"m"}


def test_calls_that_go_on_are_turns_of_one_session(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, other = call(said("user", "a"), reply="b"), call(said("user", "d"), reply="b")
    history = [said("user", "a"), said("assistant", "b")]
    second = call(*history, said("user", "c"), reply="c", temperature=0.5, top_p=1, seed=3)
    edited = call(said("user", "a"), said("assistant", "c"), said("user", "c"), reply="c")
    traces = read(tmp_path / "x", tokenizer, first, other, second, edited)
    assert [(trace.session, trace.turn) for trace in traces] == [
        ("x:1", 0),
        ("x:2", 0),
        ("x:1", 1),
        ("x:4", 0),
    ]
    assert traces[2].sampling == {"temperature": 0.5, "top_p": 1}
    before = [*traces[0].prompt_ids.tolist(), *traces[0].output_ids.tolist()]
    assert traces[2].prompt_ids.tolist()[: len(before)] == before


def test_of_many_conversations_the_one_that_was_quiet_longest_is_forgotten(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_logs, "_MAX_OPEN", 2)
    first, second, third = (call(said("user", name), reply="b") for name in "adc")

    def goes_on(name: str) -> dict[str, Any]:
        return call(said("user", name), said("assistant", "b"), said("user", "c"), reply="d")

    traces = read(tmp_path / "x", tokenizer, first, second, third, goes_on("a"), goes_on("c"))
    assert [trace.session for trace in traces] == ["x:1", "x:2", "x:3", "x:4", "x:3"]


def test_a_session_is_one_of_the_same_tools(tmp_path: Path, tokenizer: Tokenizer) -> None:
    history = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    tools = [{"type": "function", "function": {"name": "a"}}]
    traces = read(
        tmp_path / "x",
        tokenizer,
        call(history[0], reply="b", tools=tools),
        call(*history, reply="c"),
        call(*history, reply="c", tools=tools),
    )
    assert [trace.session for trace in traces] == ["x:1", "x:2", "x:1"]


def test_thinking_is_output_and_no_part_of_the_next_prompt(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.add_tokens(["<think>", "</think>"])
    reply = said("assistant", "b", reasoning_content="d")
    history = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    first, second = read(
        tmp_path / "x", tokenizer, call(history[0], reply=reply), call(*history, reply="c")
    )
    assert texts(tokenizer, [first])[0][1] == "<think> d </think> b"
    assert (second.session, second.turn) == ("x:1", 1)
    assert texts(tokenizer, [second])[0][0] == (
        f"{START} user a {END} {START} assistant b {END} {START} user c {END} {START} assistant"
    )


def test_each_choice_is_an_output_and_one_that_was_cut_has_no_end(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    line = call(said("user", "a"), reply="b")
    cut = {"message": said("assistant", "c"), "finish_reason": "length"}
    line["response"]["choices"].append(cut)
    traces = read(tmp_path / "x", tokenizer, line, eos_token_id=0)
    assert [output for _, output in texts(tokenizer, traces)] == ["b <eos>", "c"]
    assert [trace.is_cut for trace in traces] == [False, True]
    assert len({(trace.session, trace.turn) for trace in traces}) == 2


def test_only_one_of_several_samples_is_the_next_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    history = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    both = call(*history, reply="c")
    both["response"]["choices"].append({"message": said("assistant", "d")})
    again = call(*history, reply="d")
    of_second = call(*history, said("assistant", "d"), said("user", "a"), reply="b")
    lines = (call(history[0], reply="b"), both, again, of_second)
    traces = read(tmp_path / "x", tokenizer, *lines)
    assert [(trace.session, trace.turn) for trace in traces] == [
        ("x:1", 0),
        ("x:1", 1),
        ("x:2.1", 0),
        ("x:3", 0),
        ("x:3", 1),
    ]
    prompts = [trace.prompt_ids.tolist() for trace in traces]
    assert prompts[1] == prompts[2] == prompts[3]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("{}", "not a chat: wanted an object with messages"),
        ('{"messages": 3}', "not a chat: messages is a list of objects"),
        ('{"messages": [3]}', "not a chat: messages is a list of objects"),
        ('{"messages": []}', "the assistant says nothing in it"),
        ('{"messages": [], "tools": [1]}', "tools is a list of objects"),
        ('{"request": {}, "response": 1}', "request and response are objects"),
        ('{"request": {}, "response": {"error": 1}}', "the response has no choices"),
        ('{"request": {}, "response": {"choices": [{}]}}', "a choice has no message"),
        (json.dumps(call(said("user", "a"), reply=said("user", "b"))), "a reply is the assistant"),
        (json.dumps(call(said("user", "a"), reply="b", model=3)), "model is a string"),
        (json.dumps(call(said("user", "a"), reply="b", top_p="x")), "top_p are numbers"),
        (json.dumps(call(said("poet", "a"), reply="b")), "one of the roles"),
        (json.dumps(call(said("user", "\ud800"), reply="b")), "half of a surrogate pair"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(
    tmp_path: Path, tokenizer: Tokenizer, line: str, says: str
) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps(call(said("user", "a"), reply="b")) + f"\n{line}\n")
    with pytest.raises(ValueError, match=says) as error:
        list(read_traces(path, tokenizer))
    assert str(error.value).startswith(f"{path}:2: ")
    assert "\n" not in str(error.value)
