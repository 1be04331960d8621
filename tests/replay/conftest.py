"""Small made-up recordings, and a tokenizer for them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

WriteTraces = Callable[..., Path]


@pytest.fixture
def number_tokenizer(tmp_path: Path) -> Path:
    """Each number below 200 is a token."""
    vocab = {"<|im_end|>": 0} | {str(number): number for number in range(1, 200)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def write_traces() -> WriteTraces:
    def write(
        path: Path,
        *,
        family: str = "copying",
        licence: str = "MIT",
        num_sessions: int = 8,
        step: int = 3,
    ) -> Path:
        """Sessions that copy a passage of their prompt, except every seventeenth token. Passages
        differ between sessions."""
        lines = []
        for session in range(num_sessions):
            passage = [1 + (session * 7 + number * step) % 199 for number in range(60)]
            output = [1 + n * 31 % 199 if i % 17 == 16 else n for i, n in enumerate(passage)]
            lines.append(
                {
                    "family": family,
                    "dataset": "made up",
                    "licence": licence,
                    "source_repo": "nobody/nothing",
                    "session": f"s{session}",
                    "turn": 0,
                    "prompt_kind": "full",
                    "prompt": " ".join(map(str, passage)),
                    "output": " ".join(map(str, output)),
                }
            )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


@pytest.fixture
def made_up_traces(tmp_path: Path, write_traces: WriteTraces) -> Path:
    """A folder of two files."""
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(folder / "copying.jsonl")
    write_traces(folder / "other.jsonl", family="other", step=5)
    return folder


@pytest.fixture
def flat_costs(tmp_path: Path) -> Path:
    path = tmp_path / "flat_costs.yaml"
    path.write_text(
        "{about: made up, batch_sizes: [1, 2], widths: [1, 2], verify: [[10, 12], [10, 12]], "
        "draft_round: [0.5, 0.5], draft_extend: [[1, 1], [1, 1]]}"
    )
    return path
