"""Reading text traces: whole prompts from deltas, and one line about whatever is wrong."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sglang_hvd.traces.text_traces import read_text_traces, tokenize
from sglang_hvd.traces.trace import Trace


def line(session: str, turn: object, prompt: object, output: str, kind: str = "delta") -> str:
    return json.dumps(
        {
            "family": "chat",
            "dataset": "made up",
            "licence": "MIT",
            "source_repo": "nobody/nothing",
            "session": session,
            "turn": turn,
            "prompt_kind": kind,
            "prompt": prompt,
            "output": output,
        }
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


def traces(path: Path, tokenizer: Tokenizer, eos_token_id: int | None = None) -> list[Trace]:
    return list(tokenize(read_text_traces(path), tokenizer, eos_token_id=eos_token_id))


def test_a_delta_prompt_follows_everything_before_it_in_its_session(
    path: Path, tokenizer: Tokenizer
) -> None:
    path.write_text(
        "\n".join([line("x", 0, "a b", "c"), line("x", 1, "d", "a a"), line("y", 0, "b", "b")])
    )
    first, second, other = traces(path, tokenizer)
    assert (first.prompt_ids.tolist(), first.output_ids.tolist()) == ([1, 2], [3])
    assert (second.prompt_ids.tolist(), second.output_ids.tolist()) == ([1, 2, 3, 4], [1, 1])
    assert other.prompt_ids.tolist() == [2]
    assert (second.session, second.turn, second.family) == ("x", 1, "chat")


@pytest.mark.parametrize("key", ["family", "licence"])
def test_a_file_is_of_one_family_under_one_licence(path: Path, key: str) -> None:
    other = json.dumps(json.loads(line("y", 0, "b", "b")) | {key: "CC BY-NC 4.0"})
    path.write_text(line("x", 0, "a b", "c") + "\n" + other + "\n")
    with pytest.raises(ValueError, match=f":2: {key} 'CC BY-NC 4.0' after '.*': give each a file"):
        list(read_text_traces(path))


def test_a_full_prompt_stands_alone(path: Path, tokenizer: Tokenizer) -> None:
    path.write_text(line("x", 0, "a", "b", "full") + "\n" + line("x", 1, "c", "d", "full"))
    assert [trace.prompt_ids.tolist() for trace in traces(path, tokenizer)] == [[1], [3]]


def test_the_end_token_ends_the_output_but_is_no_part_of_the_next_prompt(
    path: Path, tokenizer: Tokenizer
) -> None:
    path.write_text(line("x", 0, "a", "b") + "\n" + line("x", 1, "c", ""))
    first, second = traces(path, tokenizer, eos_token_id=0)
    assert first.output_ids.tolist() == [2, 0]
    assert (second.prompt_ids.tolist(), second.output_ids.tolist()) == ([1, 2, 3], [0])


def test_a_first_turn_begins_anew(path: Path, tokenizer: Tokenizer) -> None:
    path.write_text(line("x", 0, "a", "b") + "\n" + line("x", 0, "c", "d"))
    assert [trace.prompt_ids.tolist() for trace in traces(path, tokenizer)] == [[1], [3]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[]", "wanted an object, got list"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5_000, "not JSON"),
        ("{}", "a text trace without dataset, family"),
        ('{"prompt": "a", "output": "b"}', "a text trace without dataset"),
        (line("x", 0, "a", "b", "half"), "prompt_kind is delta or full, got 'half'"),
        (line("x", 0, None, "b"), "prompt is of type str, got None"),
        (line("x", "1", "a", "b"), "turn is of type int, got '1'"),
        (line("y", 1, "a", "b"), "turn 1 of session y does not follow the turn before it"),
        (line("x", -1, "a", "b"), "turn is 0 or more, got -1"),
        (line("x", 2, "a", "b"), "turn 2 of session x does not follow the turn before it"),
        (line("x", 1, "a", "b").replace('"MIT"', "null"), "licence is of type str, got None"),
        (line("x", 1, "\ud800", "b"), "not text: half of a surrogate pair"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(path: Path, content: str, says: str) -> None:
    path.write_text(f"{line('x', 0, 'a', 'b')}\n{content}\n")
    with pytest.raises(ValueError, match=says) as error:
        list(read_text_traces(path))
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the traces: No such file"):
        list(read_text_traces(path))
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match="not a text file"):
        list(read_text_traces(path))
