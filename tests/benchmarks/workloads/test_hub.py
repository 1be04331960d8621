"""The data sets of the hub, read from copies with made-up rows of their real schema."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, Features, Value

from benchmarks.workloads.__main__ import main
from benchmarks.workloads.catalogue import workloads
from benchmarks.workloads.paper import PAPER
from benchmarks.workloads.practice import PRACTICE
from benchmarks.workloads.prompts import Prompt, Workload, draw
from sglang_hvd.traces.chat_templates import ChatTemplate
from tests.benchmarks.workloads.samples import SAMPLES, data_of, write

# Table 8 of the paper. Alab-NII/2wikimultihop and EAGLE are repositories of GitHub.
TABLE_8 = {
    "agentic / workflow editing": ("microsoft/delegate52", "YimingZeng/FineEdit_bench"),
    "code / repository": (
        "tianyang/repobench_python_v1.1",
        "SWE-bench/SWE-bench_Verified",
        "ise-uiuc/Magicoder-Evol-Instruct-110K",
        "google-research-datasets/mbpp",
    ),
    "structured generation": ("llamastack/bfcl_v3", "NBAmine/xlangai-spider-with-context"),
    "multi-hop QA": ("hotpotqa/hotpot_qa", "dgslibisey/MuSiQue", "xanhho/2WikiMultihopQA"),
    "long-context": (
        "xinrongzhang2022/InfiniteBench",
        "abisee/cnn_dailymail",
        "ccdv/govreport-summarization",
    ),
    "open-ended instruction / chat": ("tatsu-lab/alpaca", "SafeAILab/EAGLE"),
}

of_hub = pytest.mark.parametrize("workload", [*PAPER, *PRACTICE], ids=lambda w: w.name)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_the_paper_has_sixteen_data_sets_in_six_families() -> None:
    found: dict[str, tuple[str, ...]] = {}
    for workload in PAPER:
        found[workload.family] = (*found.get(workload.family, ()), data_of(workload).name)
    assert found == TABLE_8
    assert len(PAPER) == 16


@of_hub
def test_a_revision_is_a_commit_or_the_row_says_that_it_is_unknown(workload: Workload) -> None:
    revision = data_of(workload).revision
    if revision == "main":
        assert "could not be looked up" in workload.note
    else:
        assert len(revision) == 40
        int(revision, 16)


@of_hub
def test_prompts_of_the_real_schema_are_drawn(workload: Workload, tmp_path: Path) -> None:
    sample = SAMPLES[workload.name]
    write(data_of(workload), sample, tmp_path)
    drawn = draw(workload, folder=tmp_path)
    assert drawn == draw(workload, folder=tmp_path)
    assert (len(drawn.measured), len(drawn.warm_up)) == (20, 25)
    keys = {prompt.key for prompt in (*drawn.measured, *drawn.warm_up)}
    assert len(keys) == 45
    assert drawn != draw(workload, folder=tmp_path, seed=43)
    for prompt in drawn.measured:
        assert sample.said in prompt.request(ChatTemplate())["text"]
        assert prompt.request(None)["text"]


@of_hub
def test_a_missing_column_is_one_clear_line(workload: Workload, tmp_path: Path) -> None:
    data = data_of(workload)
    missing = [*data.columns][-1]
    write(data, SAMPLES[workload.name], tmp_path, without=missing)
    with pytest.raises(ValueError, match=f"{data.name} has no column {missing}: .*has changed"):
        draw(workload, folder=tmp_path)


def test_a_column_of_another_type_is_one_clear_line(tmp_path: Path) -> None:
    write(data_of(workloads()["alpaca"]), SAMPLES["alpaca"], tmp_path)
    path = tmp_path / "tatsu-lab/alpaca/data/rows.parquet"
    features = Features({"instruction": Value("string"), "input": Value("int64")})
    Dataset.from_list([{"instruction": "a", "input": 1}], features=features).to_parquet(path)
    with pytest.raises(ValueError, match="column input of type int64, wanted string: "):
        draw(workloads()["alpaca"], folder=tmp_path)


def test_a_changed_structure_is_one_clear_line(tmp_path: Path) -> None:
    musique = data_of(workloads()["musique"])
    row = {**SAMPLES["musique"].row(0), "paragraphs": [{"title": "Green", "body": "An album."}]}
    path = tmp_path / musique.name / str(musique.file)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="dgslibisey/MuSiQue has column paragraphs of type "):
        draw(workloads()["musique"], folder=tmp_path)


@pytest.mark.parametrize("offline", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["dead", "offline"])
@pytest.mark.parametrize("name", ["repobench", "musique", "2wikimultihopqa", "mt-bench"])
def test_without_a_network_one_line_says_what_to_do(
    name: str, offline: dict[str, str], tmp_path: Path
) -> None:
    """A retry of the libraries would be another line."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_HOME": str(tmp_path),
        "https_proxy": "http://127.0.0.1:1",
        **offline,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.workloads", "show", name],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2, ran.stderr
    [line] = ran.stderr.splitlines()
    data = data_of(workloads()[name])
    assert line.startswith(f"error: {data.name} cannot be loaded from {data.site} (")
    assert f"revision {data.revision} to DIR/{data.name} and give --data DIR" in line


def test_a_folder_of_copies_that_is_not_there_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(ValueError, match=f"--data {gone} is no folder: give one with a copy of "):
        draw(workloads()["mbpp"], folder=gone)


def test_tools_of_a_row_reach_the_template(tmp_path: Path) -> None:
    write(data_of(workloads()["bfcl"]), SAMPLES["bfcl"], tmp_path)
    [prompt, *_] = draw(workloads()["bfcl"], folder=tmp_path).measured
    assert '"name": "area"' in prompt.request(ChatTemplate())["text"]
    assert '"name": "area"' in prompt.request(None)["text"]


def test_rows_that_do_not_suit_are_left_out(tmp_path: Path) -> None:
    speed_bench = data_of(workloads()["speed-bench"])
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    [row] = [dict(SAMPLES["speed-bench"].row(0))]
    assert speed_bench.prompt({**row, "turns": [masked]}) is None
    bfcl = data_of(workloads()["bfcl"])
    assert bfcl.prompt({**SAMPLES["bfcl"].row(0), "multi_turn": True}) is None
    assert isinstance(bfcl.prompt(SAMPLES["bfcl"].row(0)), Prompt)


def test_show_prints_three_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(data_of(workloads()["mt-bench"]), SAMPLES["mt-bench"], tmp_path)
    main(["show", "mt-bench", "--data", str(tmp_path)])
    told = capsys.readouterr().out
    assert told.count("--- prompt ") == told.count("--- then ---") == 3
    assert "licence: Apache-2.0" in told
    assert "size:    80 conversations" in told
    assert "<|im_start|>user\nCompose a post" in told
