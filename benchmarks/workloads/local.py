"""Workloads without a network: files of prompts, recordings and chat logs, the demo's sessions."""

from pathlib import Path
from typing import Any

from benchmarks.workloads.prompts import SEED, Groups, Prompt, Workload
from sglang_hvd.demo.corpus.session import FAMILIES, Family
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.text_traces import read_objects

_NUM_DEMO_SESSIONS = 60

# What a line of a file of prompts may have.
_FORMS = "prompt (a string), turns (strings) or messages (objects), perhaps with tools"


def of_file(path: Path, tokenizer_file: Path | None = None) -> Workload:
    """The prompts of a file.

    A file of prompts is JSONL: each line has prompt, turns or messages. With a tokenizer the file
    is a recording, a text trace or a chat log, as `sglang-hvd replay` reads them; its sessions are
    kept together.
    """

    def load(_: Path | None) -> Groups:
        return _recorded(path, tokenizer_file) if is_recorded else _lines(path)

    is_recorded = tokenizer_file is not None or path.suffix == ".hvdt"
    kind = "recorded" if is_recorded else "prompts"
    return Workload(path.stem, kind, str(path), "your own", f"{_size(path):,} bytes", load)


def demo() -> tuple[Workload, ...]:
    """The sessions of the demo, one workload for each of its families."""
    return tuple(_demo(family) for family in FAMILIES)


def _demo(family: Family) -> Workload:
    def load(_: Path | None) -> Groups:
        sessions = demo_sessions(family, count=_NUM_DEMO_SESSIONS, seed=SEED)
        said = [[turn.user for turn in session.turns] for session in sessions]
        return [[Prompt.of_user(first, *others)] for first, *others in said]

    return Workload(
        f"demo-{family.replace('_', '-')}",
        "demo",
        "sglang_hvd/demo/corpus",
        "Apache-2.0",
        f"{_NUM_DEMO_SESSIONS} sessions",
        load,
        "Sessions that the demo's models were not trained on.",
    )


def _size(path: Path) -> int:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give a workload's name or a file of prompts")
    return path.stat().st_size


def _recorded(path: Path, tokenizer_file: Path | None) -> Groups:
    sessions: dict[str, list[Prompt]] = {}
    for trace in read_traces(path, tokenizer_file):
        prompt = Prompt(token_ids=tuple(map(int, trace.prompt_ids)))
        sessions.setdefault(trace.session, []).append(prompt)
    return [*sessions.values()]


def _lines(path: Path) -> Groups:
    groups = []
    for where, fields in read_objects(path):
        try:
            groups.append([_prompt(fields)])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return groups


def _prompt(fields: dict[str, Any]) -> Prompt:
    if isinstance(fields.get("prompt"), str):
        return Prompt.of_user(fields["prompt"])
    said = fields.get("turns")
    if isinstance(said, list) and said and all(isinstance(turn, str) for turn in said):
        return Prompt.of_user(*said)
    messages, tools = fields.get("messages"), fields.get("tools") or []
    if _are_objects(messages) and messages and _are_objects(tools):
        # The reply that a conversation ends with is what the model is to write.
        last = messages[-1].get("role") == "assistant"
        return Prompt(tuple(messages[:-1] if last else messages), tools=tuple(tools))
    raise ValueError(
        f"not a prompt: a line has {_FORMS}, got {', '.join(fields) or 'nothing'}; text traces and "
        "calls of chat logs need --tokenizer"
    )


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)
