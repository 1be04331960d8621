"""Made-up recordings, shared with the tests of replay, and recordings of the demo's edits."""

import json
from pathlib import Path

import pytest

from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.training.demo_tokenizer import train_tokenizer
from tests.replay.conftest import made_up_traces, number_tokenizer, write_traces

__all__ = ["made_up_traces", "number_tokenizer", "recorded_edits", "write_traces"]


@pytest.fixture
def recorded_edits(tmp_path: Path) -> list[str]:
    """--traces and --tokenizer of five sessions of edits, as text."""
    sessions = demo_sessions("editing", count=5, seed=3)
    lines = []
    for number, session in enumerate(sessions):
        for turn, said in enumerate(session.turns):
            prompt = f"<|im_start|>user\n{said.user}<|im_end|>\n<|im_start|>assistant\n"
            line = {
                **{"family": "editing", "dataset": "made", "licence": "MIT", "source_repo": "-"},
                **{"session": str(number), "turn": turn, "prompt_kind": "delta"},
                "prompt": prompt if turn == 0 else f"<|im_end|>\n{prompt}",
                "output": said.assistant,
            }
            lines.append(json.dumps(line))
    traces, tokenizer = tmp_path / "made.jsonl", tmp_path / "tokenizer.json"
    traces.write_text("\n".join(lines) + "\n")
    train_tokenizer(sessions, vocab_size=800).save(str(tokenizer))
    return ["--traces", str(traces), "--tokenizer", str(tokenizer)]
