"""The commands on recordings, run on small made-up ones."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hvd.cli import main
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.payoff.predictor import PAPER_PREDICTORS
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings
from sglang_hvd.traces.writer import TraceWriter
from tests.payoff.made_up import constant_survival
from tests.replay.conftest import WriteTraces
from tests.traces.made_up import trace

KEYS = {
    "file", "family", "predictor", "num_drafts", "oracle_share", "precision", "recall",
    "average_precision", "calibration_error", "mean_absolute_error", "at",
}  # fmt: skip


def run(command: str, traces: Path, tokenizer: Path, *more: object) -> int:
    flags = ["--traces", traces, "--tokenizer", tokenizer, "--processes", 1, *more]
    try:
        return main([command, *map(str, flags)])
    except SystemExit as ended:  # what the parser finds
        return int(str(ended.code))


@pytest.fixture
def trained(made_up_traces: Path, number_tokenizer: Path, tmp_path: Path) -> Path:
    output = tmp_path / "trained.safetensors"
    assert run("train", made_up_traces, number_tokenizer, "--output", output) == 0
    return output


def test_train_writes_a_predictor_that_says_where_it_comes_from(
    trained: Path, made_up_traces: Path
) -> None:
    predictor = AcceptancePredictor.load(trained)
    assert predictor.kind == "survival"
    assert predictor.provenance["recordings"] == [
        {"name": name, "repository": "github.com/nobody/nothing", "licence": "MIT"}
        for name in ("copying", "other")
    ]
    assert len(predictor.trained_sessions) == 12
    heldout = predictor.provenance["heldout"]
    assert isinstance(heldout, list)
    assert [row["file"] for row in heldout] == ["copying", "other", "mean"]
    assert str(made_up_traces) not in json.dumps(dict(predictor.provenance))


def test_train_learns(made_up_traces: Path, number_tokenizer: Path, trained: Path) -> None:
    [_, _, mean] = AcceptancePredictor.load(trained).provenance["heldout"]  # type: ignore[misc]
    assert 0.05 < mean["oracle_share"] < 0.95
    assert mean["average_precision"] > mean["oracle_share"] + 0.2


def test_evaluate_judges_the_sessions_that_no_predictor_was_trained_on(
    trained: Path, made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    found = tmp_path / "rows.json"
    flags = ("--predictor", trained, "--json", found)
    assert run("evaluate", made_up_traces, number_tokenizer, *flags) == 0
    rows = json.loads(found.read_text())
    assert all(set(row) >= KEYS for row in rows)
    assert {(row["file"], row["predictor"], row["at"]) for row in rows} == {
        (file, predictor, at)
        for file in ("copying", "other", "mean")
        for predictor in ("given", "default", "mlp", "frequency")
        for at in ("cycle", "position")
    }
    numbers = {(row["file"], row["at"]): set() for row in rows}
    for row in rows:
        numbers[row["file"], row["at"]].add(row["num_drafts"])
        assert (row["calibration_error"] is None) == (row["predictor"] in ("mlp", "frequency"))
    assert all(len(num) == 1 for num in numbers.values())  # the same drafts for all predictors
    # Of 8 sessions 2 were held out. Each output has 61 tokens; prefill generates one of them.
    assert numbers["copying", "position"] <= set(range(100, 121))
    assert numbers["copying", "cycle"] < numbers["copying", "position"] or max(
        numbers["copying", "cycle"]
    ) < max(numbers["copying", "position"])


@pytest.mark.parametrize("command", ["evaluate", "analyze"])
def test_a_predictor_of_bare_numbers_is_judged_too(
    command: str, made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    flags = ("--predictor", PAPER_PREDICTORS["votes"], "--json", found)
    assert run(command, made_up_traces, number_tokenizer, *flags) == 0
    assert found.is_file()


def test_evaluate_without_a_session_left_says_so(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "all.safetensors"
    flags = ("--output", output, "--held-out", 0)
    assert run("train", made_up_traces, number_tokenizer, *flags) == 0
    assert "nothing was held out: not judged" in capsys.readouterr().out
    assert run("evaluate", made_up_traces, number_tokenizer, "--predictor", output) == 2
    assert "no session is left to judge" in capsys.readouterr().err


def test_sessions_without_a_draft_have_another_message_than_no_sessions(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = json.loads((made_up_traces / "other.jsonl").read_text().splitlines()[0])
    nothing_twice = {"prompt": "1 2 3", "output": " ".join(map(str, range(50, 90)))}
    drafts = made_up_traces / "no_drafts.jsonl"
    drafts.write_text(json.dumps({**line, **nothing_twice, "session": "alone"}))
    assert run("evaluate", drafts, number_tokenizer) == 2
    assert "no cycle of the traces had a cache draft" in capsys.readouterr().err
    # If a file has two sessions, the last one is held out.
    copies = {**line, "prompt": "1 2 3 4 " * 20, "output": "1 2 3 4 " * 10}
    drafts.write_text(
        "".join(
            json.dumps(fields) + "\n"
            for fields in (copies, line | nothing_twice | {"session": "alone"})
        )
    )
    flags = ("--output", tmp_path / "p.safetensors", "--rounds", 1)
    assert run("train", drafts, number_tokenizer, *flags) == 0
    assert "no held-out session had a cache draft: not judged" in capsys.readouterr().out


def test_replay_compares_the_policies(
    made_up_traces: Path, number_tokenizer: Path, flat_costs: Path, tmp_path: Path
) -> None:
    found = tmp_path / "rows.json"
    flags = ("--json", found, "--costs", flat_costs, "--warm-up", 0.5)
    assert run("replay", made_up_traces, number_tokenizer, *flags) == 0
    rows = {(row["file"], row["policy"]): row for row in json.loads(found.read_text())}
    assert len(rows) == 3 * 6
    model = rows["copying", "model"]
    # 4 measured sessions of 60 tokens in cycles of 3. A chain of 8 is verified at width 16, which
    # takes 12 ms and 2 ms for each additional node, after 7 rounds.
    assert model["cycles_per_1k_tokens"] == pytest.approx(1000 / 3)
    assert model["tokens_per_ms"] == pytest.approx(3 / (40 + 1 + 3.5))
    assert (model["cache_share"], model["mean_accepted"]) == (0, 2)
    cache = rows["copying", "cache"]
    assert cache["cycles_per_1k_tokens"] < model["cycles_per_1k_tokens"]
    assert cache["recall"] == 1
    assert cache["precision"] == cache["oracle_share"]
    assert rows["mean", "model"]["tokens_per_ms"] == pytest.approx(3 / 44.5)
    assert rows["mean", "allocate"]["tokens_per_ms"] > rows["mean", "model"]["tokens_per_ms"]


def test_replay_leaves_allocate_out_if_it_cannot_run(
    made_up_traces: Path,
    number_tokenizer: Path,
    flat_costs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = tmp_path / "rows.json"
    papers = ("--predictor", PAPER_PREDICTORS["votes"], "--costs", flat_costs)
    for flags, lacks in (
        ((), "--costs FILE (configs/costs)"),
        (papers, "a predictor of kind survival"),
    ):
        assert run("replay", made_up_traces, number_tokenizer, "--json", found, *flags) == 0
        policies_of_rows = {row["policy"] for row in json.loads(found.read_text())}
        assert policies_of_rows == {"payoff", "frequency", "cache", "model", "both"}
        assert f"policy allocate is left out: it needs {lacks}\n" in capsys.readouterr().err


def test_replay_does_not_measure_sessions_that_the_predictor_was_trained_on(
    trained: Path, made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    def cycles_per_1k(traces: Path, *more: object) -> dict[tuple[str, str], float]:
        found = tmp_path / "rows.json"
        flags = ("--predictor", trained, "--json", found, *more)
        assert run("replay", traces, number_tokenizer, *flags) == 0
        rows = json.loads(found.read_text())
        return {(row["file"], row["policy"]): row["cycles_per_1k_tokens"] for row in rows}

    # The last 2 of 8 sessions were held out, which equals a warm-up of the first 6.
    assert cycles_per_1k(made_up_traces) == cycles_per_1k(made_up_traces, "--warm-up", 0.75)


# Commands that judge, and the modules that call walk_recordings.
MODULES = {"replay": "core.policies", "evaluate": "training.evaluate", "analyze": "report.analyze"}


@pytest.mark.parametrize("command", MODULES)
def test_sessions_that_a_predictor_was_trained_on_are_reported(
    command: str,
    made_up_traces: Path,
    number_tokenizer: Path,
    write_traces: WriteTraces,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, found = tmp_path / "all.safetensors", tmp_path / "found.json"
    flags = ("--output", output, "--held-out", 0, "--rounds", 1)
    assert run("train", made_up_traces, number_tokenizer, *flags) == 0
    write_traces(made_up_traces / "new.jsonl", family="new", num_sessions=3, step=11)
    flags = ("--predictor", output, "--json", found)
    capsys.readouterr()
    assert run(command, made_up_traces, number_tokenizer, *flags) == 0
    told = capsys.readouterr().err
    assert "16 of 19 sessions (in copying, other) only fill the cache: a predictor was" in told
    if command == "analyze":
        about = json.loads(found.read_text())["about"]
        assert (about["files"], about["num_sessions"]) == (["new"], 3)
    (made_up_traces / "new.jsonl").unlink()

    def walk(*args: object, **kwargs: object) -> None:
        pytest.fail("nothing should be walked")

    monkeypatch.setattr(f"sglang_hvd.replay.{MODULES[command]}.walk_recordings", walk)
    assert run(command, made_up_traces, number_tokenizer, *flags) == 2
    assert "no session is left to judge" in capsys.readouterr().err


@pytest.mark.parametrize("command", MODULES)
def test_empty_replies_have_another_message_than_sessions_that_were_trained_on(
    command: str, tmp_path: Path, number_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": None}]
    chat.write_text(json.dumps({"messages": messages}))
    assert run(command, chat, number_tokenizer, "--json", tmp_path / "found.json") == 2
    assert "error: nothing was decoded in the sessions" in capsys.readouterr().err


def test_replay_verifies_as_widely_as_the_server_would(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, found = tmp_path / "hvd.yaml", tmp_path / "rows.json"
    accepted = []
    for width in (10, 32):
        config.write_text(f"verify_width: {width}")
        flags = ("--config", config, "--json", found)
        assert run("replay", made_up_traces, number_tokenizer, *flags) == 0
        rows = {(row["file"], row["policy"]): row for row in json.loads(found.read_text())}
        accepted.append(rows["mean", "cache"]["mean_accepted"])
    assert accepted[0] < accepted[1]
    config.write_text("verify_width: 9")
    assert run("replay", made_up_traces, number_tokenizer, "--config", config) == 2
    assert "verify_width 9 has no room" in capsys.readouterr().err


def test_recordings_need_no_token_that_ends_an_output(
    tmp_path: Path, number_tokenizer: Path, made_up_traces: Path
) -> None:
    recorded = tmp_path / "recorded.hvdt"
    tokenizer = TraceTokenizer(number_tokenizer, "<|im_end|>")
    [recording, _] = find_recordings(made_up_traces)
    with TraceWriter(recorded, tokenizer_fingerprint=tokenizer.fingerprint) as writer:
        for trace in recording.traces(tokenizer):
            writer.write(trace)
    assert run("replay", recorded, number_tokenizer, "--eos-token", "<none>") == 0
    assert run("replay", made_up_traces, number_tokenizer, "--eos-token", "<none>") == 2
    assert run("replay", made_up_traces, number_tokenizer, "--eos-token", "") == 0


def test_mistakes_are_one_line_and_nothing_is_written(
    made_up_traces: Path,
    number_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    empty, blank, broken = (tmp_path / name for name in ("empty", "blank", "broken"))
    for folder in (empty, blank, broken):
        folder.mkdir()
    (blank / "blank.jsonl").touch()
    (broken / "broken.jsonl").write_text((made_up_traces / "copying.jsonl").read_text()[:-40])
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"PK\x03\x04" * 50)
    costs = tmp_path / "costs.yaml"
    costs.write_text("{verify: 10}")
    served = tmp_path / "hvd.yaml"
    served.write_text("costs: costs.yaml")
    keyless = tmp_path / "keyless.jsonl"
    first = json.loads((made_up_traces / "copying.jsonl").read_text().splitlines()[0])
    del first["licence"]
    keyless.write_text(json.dumps(first))
    mixed, called_mean = tmp_path / "mixed.hvdt", tmp_path / "called_mean.hvdt"
    for path, families in ((mixed, ["a", "b"]), (called_mean, ["mean"])):
        with TraceWriter(path) as writer:
            for family in families:
                writer.write(trace([5], [6], family=family, model="", tokenizer_fingerprint=""))
    for command, traces, tokenizer, more, says in (
        ("train", empty, number_tokenizer, ["--output", output], "no traces (*.jsonl, *.hvdt)"),
        ("train", blank, number_tokenizer, ["--output", output], "blank.jsonl: empty"),
        ("train", broken, number_tokenizer, ["--output", output], "broken.jsonl:8: "),
        ("train", made_up_traces, tmp_path / "none.json", ["--output", output], "cannot read the"),
        ("train", made_up_traces, number_tokenizer, ["--output", output / "p"], "no folder"),
        ("evaluate", made_up_traces, number_tokenizer, ["--json", output / "p"], "no folder"),
        ("train", made_up_traces, number_tokenizer, ["--output", empty], "is a folder"),
        ("train", keyless, number_tokenizer, ["--output", output], "text trace without licence"),
        ("train", made_up_traces, number_tokenizer, ["--output", number_tokenizer], "is also read"),
        ("evaluate", mixed, number_tokenizer, ["--json", mixed], "is also read"),
        (
            "evaluate",
            made_up_traces,
            number_tokenizer,
            ["--json", made_up_traces / "x.jsonl"],
            "next",
        ),
        (
            *("analyze", made_up_traces, number_tokenizer),
            *(["--json", output, "--html", output], "is also written by --json"),
        ),
        (
            *("train", made_up_traces, number_tokenizer),
            *(["--output", output, "--seed", "-1"], "from 0 to below 2^32"),
        ),
        ("train", made_up_traces, number_tokenizer, ["--output", output, "--rounds", "x"], "whole"),
        ("evaluate", made_up_traces, number_tokenizer, ["--predictor", foreign], "is corrupt"),
        (
            *("evaluate", made_up_traces, number_tokenizer),
            *(["--predictor", output], "out is not a file: give another"),
        ),
        ("evaluate", made_up_traces, number_tokenizer, ["--eos-token", "<x>"], "has no token <x>"),
        ("replay", made_up_traces, number_tokenizer, ["--costs", costs], "cost table: about: "),
        ("replay", made_up_traces, number_tokenizer, ["--config", served], "cost table: about: "),
        ("replay", made_up_traces, number_tokenizer, ["--warm-up", 1.5], "from 0 to below 1"),
        ("replay", tmp_path / "gone", number_tokenizer, [], "cannot read the traces"),
        ("replay", mixed, number_tokenizer, [], "of the families a, b: "),
        ("replay", called_mean, number_tokenizer, [], "of the families mean: "),
    ):
        before = set(tmp_path.rglob("*"))
        assert run(command, traces, tokenizer, *more) == 2
        error = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert len(error) == 1
        assert error[0].startswith("error: ")
        assert says in error[0], (command, error[0])
        assert set(tmp_path.rglob("*")) == before


def test_a_closed_stdout_is_no_error(made_up_traces: Path, number_tokenizer: Path) -> None:
    code = "from sglang_hvd.cli import main; raise SystemExit(main())"
    flags = ["--traces", str(made_up_traces), "--tokenizer", str(number_tokenizer)]
    command = [sys.executable, "-c", code, "replay", *flags, "--processes", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read().decode()
    assert "Traceback" not in told
    assert process.returncode == 141


def test_the_mean_gives_every_family_the_same_weight(
    made_up_traces: Path, number_tokenizer: Path, write_traces: WriteTraces, tmp_path: Path
) -> None:
    write_traces(made_up_traces / "copying_too.jsonl", num_sessions=30)
    found = tmp_path / "rows.json"
    assert run("replay", made_up_traces, number_tokenizer, "--json", found) == 0
    rows = {
        row["file"]: row["cycles_per_1k_tokens"]
        for row in json.loads(found.read_text())
        if row["policy"] == "cache"
    }
    copying = (rows["copying"] + rows["copying_too"]) / 2
    assert math.isclose(rows["mean"], (copying + rows["other"]) / 2)


def test_a_predictor_of_other_settings_can_be_trained_and_judged(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output, found = (tmp_path / n for n in ("hvd.yaml", "p.safetensors", "rows.json"))
    config.write_text("{min_token_prob: 0.2, history_window: 4, cache_mode: paper}")
    flags = ("--config", config, "--output", output, "--rounds", 1)
    assert run("train", made_up_traces, number_tokenizer, *flags) == 0
    settings = AcceptancePredictor.load(output).settings
    assert [settings[n] for n in ("min_token_prob", "history_window", "cache_mode")] == [
        0.2,
        4,
        "paper",
    ]
    flags = ("--predictor", output, "--json", found)
    assert run("evaluate", made_up_traces, number_tokenizer, *flags) == 0
    rows = json.loads(found.read_text())
    assert {row["cache_mode"] for row in rows} == {"paper"}
    assert {row["predictor"] for row in rows} == {"given", "default", "mlp", "frequency"}
    assert run("replay", made_up_traces, number_tokenizer, "--predictor", output) == 0
    capsys.readouterr()
    flags = ("--predictor", output, "--cache-mode", "votes")
    assert run("replay", made_up_traces, number_tokenizer, *flags) == 2
    assert "was trained for cache_mode paper, but votes was given" in capsys.readouterr().err
    config.write_text("history_window: 5")
    assert run("replay", made_up_traces, number_tokenizer, *flags[:2], "--config", config) == 2
    assert "was trained for history_window 4, but 5 was given" in capsys.readouterr().err
    config.write_text("min_token_prob: null")  # the default of the predictor's cache mode
    assert run("replay", made_up_traces, number_tokenizer, *flags[:2], "--config", config) == 2
    assert "was trained for min_token_prob 0.2, but 0.1 was given" in capsys.readouterr().err
    config.write_text("predictor: p.safetensors")  # as the server's, from the file's folder
    assert run("evaluate", made_up_traces, number_tokenizer, "--config", config, *flags[2:]) == 2
    assert "was trained for cache_mode paper, but votes was given" in capsys.readouterr().err
    config.write_text("min_token_prob: high")
    assert run("replay", made_up_traces, number_tokenizer, "--config", config) == 2
    assert "hvd.yaml: min_token_prob" in capsys.readouterr().err


def test_a_predictor_of_another_cache_mode_is_refused_because_of_its_mode(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, predictor = tmp_path / "p.safetensors", constant_survival(0.5)
    settings = {**predictor.settings, "cache_mode": "paper", "max_depth": 32}
    replace(predictor, settings=settings).save(path)
    flags = ("--predictor", path, "--cache-mode", "votes")
    assert run("evaluate", made_up_traces, number_tokenizer, *flags) == 2
    assert "trained for cache_mode paper, but votes was given: drop" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_remedy(tmp_path: Path) -> None:
    command = "import sys; sys.modules['torch'] = None; from sglang_hvd.cli import main; main()"
    flags = ("train", "--traces", ".", "--tokenizer", ".", "--output", tmp_path / "p")
    done = subprocess.run(
        [sys.executable, "-c", command, *map(str, flags)],
        capture_output=True,
        text=True,
        check=False,
    )
    remedy = "run pip install '.[train]' in a clone of the project"
    assert done.stderr == f"error: train needs torch: {remedy}\n"


def test_recordings_without_prompts_are_refused(
    tmp_path: Path, number_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recorded.hvdt"
    fingerprint = TraceTokenizer(number_tokenizer, None).fingerprint
    of_model = {"model": "m", "tokenizer_fingerprint": fingerprint}
    with TraceWriter(path, **of_model) as writer:
        writer.write(trace([], [1, 2, 3], has_prompt=False, **of_model))
    assert run("replay", path, number_tokenizer) == 2
    error = capsys.readouterr().err
    assert "recorded without prompts" in error
    assert error.count("\n") == 1
