"""`make gpu-check` on a CPU, as far as possible, and the files that it takes to a GPU machine."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import kernels, sampling
from benchmarks.gpu_check import setup as gpu_setup
from benchmarks.gpu_check.parts import PartFile, Row, Unit
from benchmarks.gpu_check.sampling import Outcomes, p_value, sampling_units
from benchmarks.gpu_check.setup import POLICIES, Setup, setups_of
from benchmarks.gpu_check.shapes import groups_of_modes
from benchmarks.trace_serving import __main__ as trace_serving
from sglang_hvd.config import HvdConfig
from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import Process, spawn
from sglang_hvd.plugin.startup.verify_widths import TargetAttention, _verify_width
from tests.e2e.forked_server import Nursery


@pytest.fixture
def offline_install() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "offline_install.py"
    spec = importlib.util.spec_from_file_location("offline_install", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_is_the_same_after_it_was_split_and_joined(
    offline_install: ModuleType, tmp_path: Path
) -> None:
    wheel, pieces, out = tmp_path / "a.whl", tmp_path / "pieces", tmp_path / "out"
    pieces.mkdir()
    out.mkdir()
    wheel.write_bytes(bytes(range(256)) * 41)
    entry = offline_install.cut(wheel, pieces, 1000)
    assert len(entry["pieces"]) == 11
    assert max(path.stat().st_size for path in pieces.iterdir()) == 1000
    (pieces / "pieces.json").write_text(json.dumps({wheel.name: entry}))
    [joined] = offline_install.join(pieces, out)
    assert joined.read_bytes() == wheel.read_bytes()


def test_a_damaged_or_missing_piece_is_named(offline_install: ModuleType, tmp_path: Path) -> None:
    wheel, out = tmp_path / "a.whl", tmp_path / "out"
    out.mkdir()
    wheel.write_bytes(b"x" * 2500)
    entry = offline_install.cut(wheel, tmp_path, 1000)
    (tmp_path / "pieces.json").write_text(json.dumps({wheel.name: entry}))
    (tmp_path / "a.whl.001").write_bytes(b"y" * 1000)
    with pytest.raises(ValueError, match=r"a\.whl: a piece in .* is damaged"):
        offline_install.join(tmp_path, out)
    (tmp_path / "a.whl.001").unlink()
    with pytest.raises(ValueError, match=r"a\.whl\.001 is missing"):
        offline_install.join(tmp_path, out)


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    """codes: kind (1: PTX, 2: machine code), ten times the compute capability, the code."""
    entries = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 257, 64, len(code), gpu) + code
        for kind, gpu, code in codes
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def library_of(fat_binaries: bytes) -> bytes:
    """A 64-bit ELF file of nothing but these and the names of its sections."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    end = 64 + len(names) + len(fat_binaries)
    head = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q10xHHH", end, 64, 3, 1)
    sections = [(0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(fat_binaries))]
    table = b"".join(struct.pack("<I20xQQ24x", *section) for section in sections)
    return head + names + fat_binaries + table


def test_a_wheel_for_one_gpu_keeps_its_machine_code_and_installs(
    offline_install: ModuleType, tmp_path: Path
) -> None:
    both = fat_binary((2, 80, b"A" * 40), (2, 90, b"H" * 24), (1, 90, b"P" * 8))
    older = fat_binary((2, 80, b"a" * 16), (1, 80, b"p" * 8))  # else nothing would be left of it
    wheel = tmp_path / "lib-1-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: lib\nVersion: 1\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as content:
        for name, text in about.items():
            content.writestr(f"lib-1.dist-info/{name}", text)
        content.writestr("lib/code.so", library_of(both + bytes(8) + older))
        content.writestr("lib/flash_ops.so", b"\x7fELF")
    offline_install.shrink(wheel, drop=("lib/flash_*",), gpu=90)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(site), str(wheel)], check=True, capture_output=True)
    assert [path.name for path in (site / "lib").iterdir()] == ["code.so"]
    kept = fat_binary((2, 80, bytes(40)), (2, 90, b"H" * 24), (1, 90, bytes(8)))
    assert (site / "lib/code.so").read_bytes() == library_of(kept + bytes(8) + older)


def test_native_modules_go_to_where_the_sources_are(
    offline_install: ModuleType, tmp_path: Path
) -> None:
    wheel = tmp_path / "sglang_hvd-1-cp312-cp312-linux_x86_64.whl"
    native = "sglang_hvd/payoff/_native.cpython-312-x86_64-linux-gnu.so"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr(native, b"machine code")
        content.writestr("sglang_hvd/config.py", "of the wheel")
    sources = tmp_path / "sources"
    offline_install.add_native(wheel, sources)
    files = [path for path in sources.rglob("*") if path.is_file()]
    assert files == [sources / native]
    assert files[0].read_bytes() == b"machine code"


def test_fa3_with_chains_is_left_out_for_the_policy_that_always_merges_drafts() -> None:
    chains = Setup("fa3-chain", "fa3", "bfloat16", True, True, False)
    assert [policy for policy in POLICIES if chains.refuses(policy)] == ["both"]
    flags = chains.flags("cuda")
    assert "--disable-cuda-graph" not in flags
    assert flags[flags.index("--attention-backend") + 1] == "fa3"


def test_a_backend_that_sglang_chooses_is_named_for_plain_serving_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    started: list[list[str]] = []

    def start(flags: list[str], **_: object) -> contextlib.nullcontext[None]:
        started.append(flags)
        return contextlib.nullcontext()

    monkeypatch.setattr(gpu_setup, "logged_server", start)
    models = DemoModels(tmp_path / "target", tmp_path / "drafter", tmp_path / "predictor")
    monkeypatch.setattr(gpu_setup, "demo_models", lambda: models)
    options = argparse.Namespace(device="cuda", logs=tmp_path, launch=None)
    [chosen] = [setup for setup in setups_of("cuda") if setup.is_chosen]
    for mode in ("plain", "allocate"):
        with gpu_setup.server_of(chosen, mode, "identity", options):
            pass
    plain, hvd = started
    assert plain[plain.index("--attention-backend") + 1] == "flashinfer"
    assert "--attention-backend" not in hvd


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_policy_has_room_in_every_setup_which_has_its_name(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    names = [setup.name for setup in setups_of(device)]
    assert len(set(names)) == len(names)
    num_nodes = int(MODEL_TREE_FLAGS[MODEL_TREE_FLAGS.index("--speculative-num-draft-tokens") + 1])
    for setup in setups_of(device):
        for policy in POLICIES:
            config = HvdConfig(policy=policy, verify_width=setup.verify_width)
            _verify_width(config, num_nodes if setup.is_tree else 4, None, TargetAttention())


def test_each_group_of_modes_has_the_mode_to_compare_with() -> None:
    modes = ("plain", "eagle3", "cache", "payoff", "allocate")
    assert groups_of_modes(modes, 5) == [modes]
    assert groups_of_modes(modes, 4) == [
        ("plain", "eagle3", "cache", "payoff"),
        ("plain", "eagle3", "allocate"),
    ]
    assert [group[-1] for group in groups_of_modes(modes, 2)] == [
        "plain",
        "cache",
        "payoff",
        "allocate",
    ]
    assert {group[0] for group in groups_of_modes(modes, 2)} == {"eagle3"}


def test_samples_of_two_distributions_are_distinguished() -> None:
    def sample(seed: int, temperature: float) -> Outcomes:
        logits = torch.linspace(0, 5, 40)
        chances = torch.softmax(logits / temperature, 0)
        drawn = torch.multinomial(
            chances, 2000, replacement=True, generator=torch.Generator().manual_seed(seed)
        )
        return Outcomes((token_id,) for token_id in drawn.tolist())

    alike = [p_value(sample(seed, 1.0), sample(-seed - 1, 1.0)) for seed in range(300)]
    # p-values of equal distributions are uniform between 0 and 1.
    assert 15 < sum(p < 0.1 for p in alike) < 48
    assert 15 < sum(p > 0.9 for p in alike) < 48
    assert 0.45 < sum(alike) / len(alike) < 0.55
    expected = sample(1, 1.0)
    assert p_value(expected, sample(2, 0.6)) < 1e-5
    assert p_value(expected, Outcomes({(99,): 2000})) < 1e-5
    for one, other in (({1: 50}, {1: 50}), ({1: 8, 2: 8}, {3: 8, 4: 8})):
        with pytest.raises(RuntimeError, match="are too few to compare"):
            p_value(*(Outcomes({(key,): num for key, num in of.items()}) for of in (one, other)))


class Units:
    """Three units, of which the second has a problem at first. calls: in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.problem: str | None = "no server"

    def all(self) -> list[Unit]:
        names = ("a", "b", "c")
        return [Unit(name, lambda done, name=name: self._rows(name, done)) for name in names]

    def _rows(self, name: str, done: Sequence[Row]) -> Iterator[Row]:
        self.calls.append(name)
        if not done:
            yield {"passed": True, "value": name}
        if name == "b" and self.problem:
            raise RuntimeError(self.problem)
        if len(done) < 2:
            yield {"passed": True, "value": 2 * name}


def test_a_part_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    def part(about: str = "here") -> PartFile:
        return PartFile(tmp_path, "identity", {"machine": about})

    units, shown = Units(), list[str]()
    in_time = time.monotonic() + 1000
    assert part().run(units.all(), deadline=0, show=shown.append) is None
    assert units.calls == []
    assert part().run(units.all(), deadline=in_time, show=shown.append) is None
    assert units.calls == ["a", "b", "c"]
    assert shown[-1] == "3 of 3, c: {'passed': True, 'value': 'cc'}"
    lines = tmp_path / "identity.rows.jsonl"
    assert "no server" in lines.read_text()
    with lines.open("a") as file:
        file.write('{"finished": "b", "ro')  # killed in the middle of a line
    with pytest.raises(ValueError, match="is from another machine"):
        part("elsewhere").run(units.all(), deadline=in_time, show=shown.append)
    assert part().passed(units.all()) is None
    # Only the unit with the problem runs again.
    units.problem = None
    assert part().run(units.all(), deadline=in_time, show=shown.append)
    assert units.calls == ["a", "b", "c", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["identity.json"]
    assert part().passed(units.all())
    with pytest.raises(ValueError, match="is from another machine"):
        part("elsewhere").passed(units.all())
    assert json.loads(part().path.read_text()) == {
        "passed": True,
        "about": {"machine": "here"},
        "rows": [
            {"unit": name, "passed": True, "value": value}
            for name in ("a", "c", "b")
            for value in (name, 2 * name)
        ],
    }


def test_units_that_are_added_later_run_too(tmp_path: Path) -> None:
    part, units, in_time = PartFile(tmp_path, "p", {}), Units(), time.monotonic() + 1000
    units.problem = None
    a, b, c = units.all()
    assert part.run([a], deadline=in_time, show=print)
    assert part.passed([a])
    assert part.passed([a, b]) is None
    assert part.run([b, a, c], deadline=in_time, show=print)
    assert units.calls == ["a", "b", "c"]
    assert part.passed([a, b, c])


def test_rows_of_units_that_do_not_run_now_are_kept(tmp_path: Path) -> None:
    part, units, in_time = PartFile(tmp_path, "p", {}), Units(), time.monotonic() + 1000
    a, b, c = units.all()
    assert part.run([b], deadline=in_time, show=print) is None  # with one row of its two
    assert part.run([a], deadline=in_time, show=print)
    units.problem = None
    assert part.run([c], deadline=in_time, show=print)
    assert part.run([b], deadline=in_time, show=print)
    assert units.calls == ["b", "a", "c", "b"]
    assert [row["value"] for row in json.loads(part.path.read_text())["rows"]] == [
        *("a", "aa", "c", "cc", "b", "bb")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_late_unit_ends_with_its_next_row(tmp_path: Path) -> None:
    part, units = PartFile(tmp_path, "p", {"driver": 1}), Units()
    late = time.monotonic() + 0.2

    def slow(line: str) -> None:
        time.sleep(0.3)

    assert part.run(units.all()[:1], deadline=late, show=slow) is None
    assert units.calls == ["a"]
    in_time = time.monotonic() + 1000
    # A machine with another driver is still of the same kind.
    part = PartFile(tmp_path, "p", {"driver": 2})
    assert part.run(units.all()[:1], deadline=in_time, show=print)
    assert [row["value"] for row in json.loads(part.path.read_text())["rows"]] == ["a", "aa"]


def test_a_part_without_anything_to_run_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has nothing to run with these options"):
        PartFile(tmp_path, "identity", {}).passed([])


def test_a_part_that_cannot_continue_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("memory", "costs"):
        result = {"passed": True, "about": {"gpu": "another"}, "rows": []}
        (tmp_path / f"{part}.json").write_text(json.dumps(result))
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", "memory,costs"]
    assert gpu_check.main(arguments) == 1
    memory, costs = capsys.readouterr().out.splitlines()
    assert memory.startswith("memory: ")
    assert "memory.json is from another machine or other options" in memory
    assert "costs.json is from another machine or other options" in costs


def test_kernels_are_compared_where_the_sanitizer_cannot_use_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitizer = tmp_path / "sanitizer"
    sanitizer.write_text("#!/bin/sh\necho '========= Error: Device not supported'\nexit 1\n")
    sanitizer.chmod(0o755)
    monkeypatch.setattr(kernels, "SANITIZER", str(sanitizer))
    [unit] = kernels.kernel_units("cuda")
    [row] = unit.run(())
    assert not row["is_sanitized"]
    assert str(sanitizer) not in row["command"]
    assert not row["passed"]  # there is no GPU
    assert list(unit.run([row])) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "alocate"], "alocate: unknown, choose from allocate"),
        (["--setups", "99"], "--setups: 99: unknown, choose from tree, chain"),
        (["--shapes", "tiny,9b"], "--shapes: 9b: unknown, choose from tiny, llama-3.1-8b"),
        (["--out", __file__], "is not a folder"),
        (["--servers-at-once", "1"], "2 or more"),
        (["--concurrency", "1,0"], "argument --concurrency: a whole number from 1 on, got 0"),
        (["--samples", "-1"], "argument --samples: a whole number from 1 on"),
    ],
)
def test_options_that_would_run_nothing_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check._options(["--device", "cpu", *flags])
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ")
    assert message in told


def test_an_unknown_part_is_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check._options(["--parts", "idenity"])
    assert "--parts: idenity: unknown, choose from memory" in capsys.readouterr().err


@pytest.mark.parametrize("main", [gpu_check.main, trace_serving.main])
def test_a_gpu_that_servers_would_not_run_on_is_refused(
    main: Callable[[Sequence[str]], int], recorded_edits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*recorded_edits, "--device", "cuda"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no GPU"):
        main(given)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(ValueError, match="SGLANG_USE_CPU_ENGINE=1 selects the CPU"):
        main(given)


def test_setups_have_names_numbers_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        gpu_check._options(["--device", "cpu", "--list-setups"])
    tree, chain = capsys.readouterr().out.splitlines()
    assert tree.startswith("0 tree: ")
    assert "--hvd-set 'narrow_widths=[2, 4, 8]'" in chain
    # A GPU's setups can be listed without a GPU.
    with pytest.raises(SystemExit, match="0"):
        gpu_check._options(["--list-setups"])
    assert "0 flashinfer-tree: " in capsys.readouterr().out
    for given in ("1", "chain", "1,chain"):
        [setup] = gpu_check._options(["--device", "cpu", "--setups", given]).setups
        assert setup.name == "chain"


def test_a_part_that_cannot_run_is_left_out_or_refused_before_any_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert gpu_check._options([]).parts == ["costs", "identity", "gap", "sampling"]
    assert capsys.readouterr().out.splitlines() == [
        "memory: left out, it needs compute-sanitizer of the CUDA toolkit on the PATH",
        "traces: left out, it needs --traces and --tokenizer",
    ]
    given = ["--traces", "traces", "--tokenizer", "tokenizer.json"]
    assert "traces" in gpu_check._options(given).parts
    for part in ("memory", "traces"):
        with pytest.raises(SystemExit):
            gpu_check._options(["--parts", part])
        assert f"--parts: {part} needs" in capsys.readouterr().err


def test_samplings_that_were_not_reached_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = gpu_check._options(["--device", "cpu", "--setups", "0", "--policies", "allocate"])
    options.logs, options.launch = tmp_path, None
    options.device = "of all samplings"
    monkeypatch.setattr(sampling, "setups_of", lambda device: setups_of("cpu"))
    [unit] = sampling_units(options)
    row = {"sampling": {"temperature": 1.0}, "passed": True}
    others = [{"temperature": 1.3, "top_k": 3}, {"temperature": 1.2, "top_p": 0.9}]
    assert list(unit.run([row, *({"sampling": other, "passed": True} for other in others)])) == []
    asked: list[dict[str, float]] = []

    def ask(plain: object, sampling: dict[str, float]) -> str:
        asked.append(sampling)
        raise RuntimeError("enough")

    monkeypatch.setattr(sampling, "server_of", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(sampling, "_unsure_prompt", ask)
    with pytest.raises(RuntimeError, match="enough"):
        list(unit.run([row]))
    assert asked == others[:1]


@pytest.mark.e2e
def test_parts_pass_on_a_cpu_and_are_not_run_again(
    recorded_edits: list[str],
    tmp_path: Path,
    nursery: Nursery,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"

    def launch(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process:
        """The server that dictates under HVD starts as a user's does, and the others are forked."""
        is_users = "benchmarks.trace_serving.server" in command and "HVD" in command
        spawned.extend(command[:3] if is_users else ())
        return (spawn if is_users else nursery.launch)(command, environment, log)

    spawned: list[str] = []
    arguments = [
        *("--device", "cpu", "--out", str(out), *recorded_edits),
        *("--shapes", "tiny", "--widths", "16", "--prompts", "2", "--concurrency", "2"),
        *("--policies", "allocate", "--samples", "400", "--gap-tokens", "16"),
    ]
    assert gpu_check.main(arguments, launch=launch) == 0
    assert spawned == [sys.executable, "-m", "benchmarks.trace_serving.server"]
    assert not list((out / "logs").iterdir())
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json*")}
    assert set(found) == {"memory", "costs", "identity", "gap", "sampling", "traces"}
    [row] = found["costs"]["rows"]
    assert row["costs"]["widths"] == [1, 16]
    assert row["costs"]["verify"][0][0] > 0
    rows = found["identity"]["rows"]
    assert [row["setup"]["postpones"] for row in rows] == ["always", "never"]
    assert all(row["num_prompts"] == 2 and row["differences"] == [] for row in rows)
    rows = found["gap"]["rows"]
    assert [(row["text"], row["mode"]) for row in rows] == [
        (text, mode) for mode in ("plain", "eagle3", "allocate") for text in ("text", "noise")
    ]
    assert all((row["gap_us"] is not None) == (row["mode"] == "allocate") for row in rows)
    rows = found["sampling"]["rows"]
    assert [row["sampling"] for row in rows] == [{"temperature": 1.0}]
    assert all(row["p_value_of_control"] < 1e-5 < row["p_value"] for row in rows)
    [cell] = found["traces"]["rows"]
    assert [row["mode"] for row in cell["modes"]] == ["plain", "payoff"]
    assert all(row["outputs_identical"] for row in cell["modes"])

    found["memory"]["rows"][0]["passed"] = False  # as if it had
    (out / "memory.json").write_text(json.dumps(found["memory"]))
    capsys.readouterr()
    assert gpu_check.main(arguments) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"memory: has already run, FAILED; to run it again, remove {out / 'memory.json'}",
        *(
            f"{part}: has already run, passed"
            for part in ("costs", "identity", "gap", "sampling", "traces")
        ),
    ]
    assert gpu_check.main([*arguments, "--parts", "traces", "--concurrency", "1,2"]) == 1
    assert "other options: remove it, or give another --out" in capsys.readouterr().out
