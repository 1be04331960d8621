"""A recording is shown as a server would have drafted its last replies."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hvd.cli import main
from sglang_hvd.view.replies import read_replies

COSTS = (
    "{about: made up, batch_sizes: [1, 2], widths: [1, 32], verify: [[5, 6], [5, 7]], "
    "draft_round: [1, 1], draft_extend: [[0.1, 0.1], [0.1, 0.1]]}"
)


@pytest.mark.parametrize("policy", ["allocate", "payoff"])
def test_the_last_replies_of_each_recording_are_shown(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path, policy: str
) -> None:
    page, saved, costs = tmp_path / "page.html", tmp_path / "replies.json", tmp_path / "costs.yaml"
    costs.write_text(COSTS)
    flags = [
        *("--traces", made_up_traces, "--tokenizer", number_tokenizer, "--replies", "2"),
        *("--html", page, "--save-json", saved),
        *(("--costs", costs) if policy == "allocate" else ()),
    ]
    assert main(["view", *map(str, flags)]) == 0
    replies = read_replies(saved)
    num_recordings = len(list(made_up_traces.glob("*.jsonl")))
    assert len(replies) == 2 * num_recordings
    for reply in replies:
        assert reply.about.startswith(f"policy {policy}, replayed")
        assert "".join(reply.tokens).split()[0].isdigit()
        assert len(reply.sources) == len(reply.tokens)
        at = 1
        for cycle in reply.cycles:
            assert cycle.at == at
            assert (cycle.ms, cycle.requests) == (None, 1)
            assert 1 + cycle.num_nodes <= cycle.width or cycle.source == "both"
            assert cycle.expected is not None
            at += cycle.accepted + 1
        assert at >= len(reply.tokens)
    assert any("prompt" in reply.sources for reply in replies)
    assert "session" in page.read_text()


def test_a_tokenizer_of_another_recording_is_refused_in_one_line(
    made_up_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    flags = ["--traces", made_up_traces, "--tokenizer", wrong, "--html", tmp_path / "page.html"]
    assert main(["view", *map(str, flags)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()
