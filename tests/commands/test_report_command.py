"""The command report: the page it writes, and the mistakes that are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hvd.cli import main
from tests.paper.made_up import CPU, result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    results = {
        "h100": result(["mbpp"]),
        "cpu": result(["mbpp"], machine=CPU),
        "llama": result(["mbpp"], model="llama3.1-8b", target="meta-llama/Llama-3.1-8B-Instruct"),
    }
    for name, of in results.items():
        Path(f"{name}.json").write_text(of.model_dump_json())
    Path("cut.json").write_text(results["h100"].model_dump_json()[:-100])
    Path("foreign.json").write_text('{"rows": []}')
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    newer = results["h100"].model_dump_json().replace('"format_version":1', '"format_version":2')
    Path("newer.json").write_text(newer)
    Path("folder").mkdir()
    return tmp_path


def test_a_result_becomes_a_page(folder: Path) -> None:
    assert main(["report", "h100.json", "-o", "page.html"]) == 0
    page = (folder / "page.html").read_text()
    assert "<code>sglang-hvd report h100.json -o page.html</code>" in page
    assert "NVIDIA H100 80GB HBM3" in page


def test_runs_of_several_machines_become_one_page(folder: Path) -> None:
    assert main(["report", "h100.json", "cpu.json", "--output", "page.html"]) == 0
    page = (folder / "page.html").read_text()
    assert page.count('<p class="topic">Table 1: speedup, on ') == 2


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["none.json", "-o", "page.html"], "cannot read none.json: No such file or directory"),
        (
            ["folder", "-o", "page.html"],
            "cannot read folder: Is a directory; a run keeps its result in folder/result.json",
        ),
        (["h100.json", "./h100.json", "-o", "page.html"], "h100.json is given twice"),
        (["foreign.json", "-o", "page.html"], "foreign.json is not a result of benchmarks.paper"),
        (["cut.json", "-o", "page.html"], "cut.json is not a result of benchmarks.paper"),
        (["bytes.json", "-o", "page.html"], "bytes.json is not a result of benchmarks.paper"),
        (["newer.json", "-o", "page.html"], "newer.json is not a result of benchmarks.paper"),
        (["h100.json", "-o", "no/page.html"], "there is no folder no"),
        (["h100.json", "-o", "folder"], "folder is a folder"),
        (["h100.json", "-o", "/dev/null"], "/dev/null is a device or a pipe"),
        (["h100.json", "-o", "h100.json"], "--output h100.json is also read: name another file"),
        (
            ["h100.json", "llama.json", "-o", "page.html"],
            "llama.json is of llama3.1-8b (meta-llama/Llama-3.1-8B-Instruct), but h100.json of "
            "qwen3-8b (Qwen/Qwen3-8B): report the runs of each model by themselves",
        ),
        (["h100.json"], "the following arguments are required: -o/--output"),
        (["-o", "page.html"], "the following arguments are required: RESULT.json"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    try:
        code: object = main(["report", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert fault in line
    assert not (folder / "page.html").exists()


def test_a_result_is_left_as_it_was(folder: Path) -> None:
    before = (folder / "h100.json").read_bytes()
    assert main(["report", "h100.json", "-o", "h100.json"]) == 2
    assert (folder / "h100.json").read_bytes() == before
