"""How prompts are drawn, and the workloads without a network."""

import json
from pathlib import Path

import pytest

from benchmarks.workloads.__main__ import main
from benchmarks.workloads.catalogue import find, workloads
from benchmarks.workloads.local import of_file
from benchmarks.workloads.prompts import MAX_CHARS, Groups, Prompt, Workload, draw
from sglang_hvd.traces.chat_templates import ChatTemplate


def workload_of(groups: Groups) -> Workload:
    return Workload("made-up", "-", "-", "-", "-", lambda _: groups)


def said(prompt: Prompt) -> str:
    return str(prompt.messages[0]["content"])


def test_a_group_is_measured_or_warms_up_but_not_both() -> None:
    groups = [[Prompt.of_user(f"{group}.{turn}") for turn in range(9)] for group in range(10)]
    drawn = draw(workload_of(groups))
    sides = [
        {said(prompt).partition(".")[0] for prompt in side}
        for side in (drawn.measured, drawn.warm_up)
    ]
    assert len(drawn.measured) == 20
    assert len(sides[0]) == len(sides[1]) == 5
    assert not sides[0] & sides[1]


def test_repeated_and_long_prompts_are_left_out() -> None:
    groups = [[Prompt.of_user(str(number % 30))] for number in range(90)]
    groups += [[Prompt.of_user("a" * (MAX_CHARS + 1))] for _ in range(50)]
    drawn = draw(workload_of(groups))
    told = [said(prompt) for prompt in (*drawn.measured, *drawn.warm_up)]
    assert sorted(told) == sorted(map(str, range(30)))


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="made-up: 20 prompts are to be measured, but only 3 of 6"):
        draw(workload_of([[Prompt.of_user(str(number))] for number in range(6)]))


def test_a_conversation_goes_on_with_the_models_replies() -> None:
    first = Prompt.of_user("one", "two")
    second = first.after("reply")
    assert second is not None
    assert [message["content"] for message in second.messages] == ["one", "reply", "two"]
    assert second.after("reply") is None


def test_the_template_can_be_left_out() -> None:
    prompt = Prompt.of_user("Why?", system="Be brief.")
    assert prompt.request(None) == {"text": "Be brief.\n\nWhy?"}
    assert prompt.request(ChatTemplate())["text"].startswith("<|im_start|>system\nBe brief.")


@pytest.mark.parametrize("name", [name for name in workloads() if name.startswith("demo-")])
def test_the_demos_families_are_workloads(name: str) -> None:
    drawn = draw(workloads()[name])
    assert (len(drawn.measured), len(drawn.warm_up)) == (20, 40)


def test_a_file_of_prompts_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    messages = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    lines = [
        {"prompt": "a"},
        {"turns": ["b", "more"]},
        {"messages": messages, "tools": [{"name": "f"}]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [[one], [two], [three]] = of_file(path).load(None)
    assert [said(prompt) for prompt in (one, two, three)] == ["a", "b", "c"]
    assert two.follow_ups == ("more",)
    assert (len(three.messages), three.tools) == (1, ({"name": "f"},))


@pytest.mark.parametrize("line", ['{"text": "a"}', '{"turns": []}', '{"messages": "a"}', "{}"])
def test_another_line_is_refused_with_its_place(line: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"mine.jsonl:2: not a prompt: a line has prompt"):
        of_file(path).load(None)


def test_a_recording_is_a_workload_of_sessions(recorded_edits: list[str]) -> None:
    traces, tokenizer = (Path(recorded_edits[index]) for index in (1, 3))
    groups = find(str(traces), tokenizer).load(None)
    assert len(groups) == 5
    assert all(prompt.token_ids for group in groups for prompt in group)
    [first, second, *_] = groups[0]
    assert first.token_ids is not None
    assert second.token_ids is not None
    assert second.token_ids[: len(first.token_ids)] == first.token_ids


def test_list_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    told = capsys.readouterr().out
    assert all(f"| {name} " in told for name in workloads())
    # What could not be looked up is said there, too.
    assert all(workload.note in told for workload in workloads().values())
    assert "Revision, split and columns could not be looked up." in told


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^nix: neither a file nor one of delegate-52, "):
        find("nix")
