"""Recorded generations, dictated to real servers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.serving import measure as serving_measure
from benchmarks.serving.client import Answer, Played
from benchmarks.serving.measure import Cell, measure
from benchmarks.trace_serving import server
from benchmarks.trace_serving.__main__ import main, options_of, serve_traces
from benchmarks.trace_serving.gpu_use import gpu_use
from benchmarks.trace_serving.models import OwnVocabulary
from benchmarks.trace_serving.script import Script, rid_of
from benchmarks.trace_serving.tree_shape import TreeShape
from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.reply_cycles import ReplyCycles
from sglang_hvd.demo.training.demo_tokenizer import train_tokenizer
from sglang_hvd.plugin.trees.draft_trees import DraftNodes, EagleTrees
from sglang_hvd.plugin.trees.layout import merge_eagle_trees
from sglang_hvd.traces.trace import Trace
from tests.e2e.forked_server import Nursery


def trace(prompt: list[int], output: list[int]) -> Trace:
    ids = [np.array(tokens, np.int32) for tokens in (prompt, output)]
    return Trace(ids[0], ids[1], session="s", turn=0, family="f")


@pytest.mark.parametrize(
    ("topk", "num_steps", "num_nodes"),
    [(4, 3, 15), (4, 3, 36), (1, 3, 3), (4, 6, 3), (10, 8, 59), (2, 1, 2)],
)
def test_a_simulated_tree_is_one_that_eagle_could_draft(
    topk: int, num_steps: int, num_nodes: int
) -> None:
    shape = TreeShape.of(topk, num_steps, num_nodes)
    nodes = DraftNodes(*torch.zeros((2, 1, 1 + num_nodes), dtype=torch.int64), torch.tensor([1]))
    trees = EagleTrees(
        torch.arange(num_nodes)[None],
        torch.from_numpy(shape.parent_list)[None],
        torch.from_numpy(shape.candidates)[None],
        topk,
        None,
        torch.tensor([num_nodes]),
    )
    assert merge_eagle_trees(nodes, trees, None)[0, 1:].all()
    parents = nodes.parents[0, 1:].tolist()
    depths = shape.depths.tolist()
    for node, (parent, depth) in enumerate(zip(parents, depths, strict=True), start=1):
        assert parent < node
        assert depth == 1 + (depths[parent - 1] if parent else 0)
    # The chain is as deep as the tree, and every smaller tree holds as much of it as fits.
    chain = [node for node, sibling in enumerate(shape.siblings.tolist(), start=1) if sibling == 0]
    assert len(chain) == min(num_steps, num_nodes)
    assert [parents[node - 1] for node in chain] == [0, *chain[:-1]]
    assert sorted(shape.ranks.tolist()) == list(range(num_nodes))
    assert [shape.ranks[node - 1] for node in chain] == list(range(len(chain)))
    # Siblings get different tokens.
    places = list(zip(parents, shape.siblings.tolist(), strict=True))
    assert len(set(places)) == len(places)


def test_a_tree_of_more_nodes_than_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match="have 2 candidates"):
        TreeShape.of(2, 1, 3)


def test_a_script_knows_its_texts_by_request(tmp_path: Path) -> None:
    traces = [trace([1, 2], [3, 4, 5]), trace([6], [7, 8])]
    accepted = {3: [np.array([1, 0, 2], np.int32), np.array([0, 1], np.int32)]}
    path = tmp_path / "script.npz"
    Script.of(traces, accepted).save(path)
    script = Script.load(path)
    assert script.start_of(rid_of(0, "x")) == 0
    start = script.start_of(rid_of(1, "a-b"))
    assert start == 5
    assert script.token_ids[start : start + 3].tolist() == [6, 7, 8]
    assert script.accepted[3].tolist() == [0, 0, 1, 0, 2, 0, 0, 1]
    assert script.start_of("HEALTH_CHECK_1") is None


def test_a_vocabulary_spells_its_texts_as_before(tmp_path: Path) -> None:
    sessions = demo_sessions(FAMILIES[0], count=4, seed=1)
    original = train_tokenizer(sessions, vocab_size=600)
    text = sessions[0].turns[0].assistant
    ids = original.encode(text).ids
    own = OwnVocabulary.of([trace(ids[:5], ids[5:])])
    [renumbered] = own.renumbered([trace(ids[:5], ids[5:])])
    assert renumbered.text_ids.max() == len(own.token_ids) - 1 < len(ids)
    own.write_tokenizer(original, tmp_path)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert written.decode(renumbered.text_ids.tolist()) == text


def test_only_the_benchmarks_own_server_dictates() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert server.__name__ not in ("__main__", "__mp_main__")
    ours = {server.HOOKED[target] for target in server.HOOKED}
    hooks = [hook for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks]
    assert not [hook for hook in hooks if getattr(hook, "__name__", "") in ours]


def test_what_was_measured_before_needs_no_server(recorded_edits: list[str]) -> None:
    options = options_of([*recorded_edits, "--concurrency", "1,8"])
    assert not list(serve_traces(options, without={("made", 1), ("made", 8)}))


def test_a_missing_recording_is_named(recorded_edits: list[str]) -> None:
    options = options_of([*recorded_edits, "--files", "made", "nosuch"])
    with pytest.raises(ValueError, match=r"^--files: nosuch: unknown, choose from made$"):
        list(serve_traces(options))


def test_modes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer(0, 0, "text", (1, 2), 1.0, 0.1, (), ReplyCycles(1, 0, 0))
    played: list[str] = []

    def play(url: str, *args: object, **kwargs: object) -> Played:
        played.append(url)
        return Played((answer,), 1.0, None)

    monkeypatch.setattr(serving_measure, "play", play)
    monkeypatch.setattr(serving_measure, "flush_cache", lambda url: None)
    cells = [Cell(name, "f", 1, [], lambda answer: True) for name in "ab"]
    urls = {"plain": "x", "eagle3": "y", "cache": "z"}
    measure(urls, cells, rounds=2, warm_up=False)
    assert "".join(played) == "xyz" + "yzx" + "yzx" + "zxy"
    played.clear()
    for number, cell in enumerate(cells):
        rows = measure(urls, [cell], rounds=1, warm_up=False, first_turn=number)
        assert [row.mode for row in rows] == list(urls)
        assert all(row.tokens_per_s_spread is None for row in rows)  # of one round
    assert "".join(played) == "xyz" + "yzx"


def test_the_gpu_works_while_any_kernel_does(tmp_path: Path) -> None:
    def event(category: str, begin: float, duration: float) -> dict[str, object]:
        return {"cat": category, "ts": 1000 + begin, "dur": duration, "name": "k"}

    events = [
        event("kernel", 700, 300),
        event("kernel", 0, 400),
        event("kernel", 100, 100),  # on another stream
        event("gpu_memcpy", 410, 90),
        event("cpu_op", 500, 5000),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "a.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    use = gpu_use(path, 2)
    assert (use.step_ms, use.busy_ms, use.waiting_ms) == pytest.approx((0.5, 0.395, 0.1))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EOFError):
        gpu_use(path, 2)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events[4:]}, file)
    with pytest.raises(ValueError, match="nothing ran on a GPU"):
        gpu_use(path, 2)


@pytest.mark.parametrize("num_nodes", ["1", "38"])
def test_a_tree_that_cannot_be_drafted_is_refused_before_servers_start(
    num_nodes: str, recorded_edits: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        options_of([*recorded_edits, "--tree", "3", "4", num_nodes])
    wanted = f"--tree: 3 steps with topk 4 have 2 to 37 nodes, got {num_nodes}"
    assert wanted in capsys.readouterr().err
    assert options_of([*recorded_edits, "--tree", "3", "4", "37"]).tree == [3, 4, 37]


def test_only_a_gpu_is_profiled(
    recorded_edits: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of([*recorded_edits, "--profile-steps", "20"])
    assert "--profile-steps needs a GPU" in capsys.readouterr().err
    given = ["--device", "cuda", "--profile-steps", "20"]
    assert options_of([*recorded_edits, *given]).profile_steps == 20


@pytest.mark.e2e
def test_recorded_sessions_come_back_token_by_token_in_every_mode(
    recorded_edits: list[str], tmp_path: Path, nursery: Nursery
) -> None:
    rows_file = tmp_path / "rows.json"
    status = main(
        [
            *(*recorded_edits, "--json", str(rows_file), "--kind", "independent"),
            *("--modes", "plain,eagle3,ngram,payoff,both,allocate", "--concurrency", "1,8"),
            *("--sessions", "3", "--sessions-per-place", "1", "--max-tokens", "48"),
            *("--warm-up", "kernels"),
        ],
        launch=nursery.launch,  # one of gpu-check's starts as a user's does
    )
    assert status == 0
    rows = json.loads(rows_file.read_text())
    assert len(rows) == 12
    assert all(row["outputs_identical"] for row in rows)
    by_mode = {(row["mode"], row["concurrency"]): row for row in rows}
    assert {mode for (mode, _), row in by_mode.items() if row["simulated"]} == {
        *("eagle3", "payoff", "both", "allocate")
    }
    # 2.7 tokens of a tree of 31 nodes in 8 steps; this one has 15 nodes and 3 steps.
    assert 1.0 < by_mode["eagle3", 8]["mean_accepted"] < 2.5
    assert by_mode["both", 8]["mean_accepted"] > by_mode["eagle3", 8]["mean_accepted"]
    assert by_mode["payoff", 8]["cycles_per_1k"] < by_mode["eagle3", 8]["cycles_per_1k"]
    assert by_mode["plain", 1]["mean_accepted"] == 0
