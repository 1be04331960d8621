"""What `sglang-hvd doctor` says of environments, models and flags, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.filesize import decimal
from safetensors.numpy import save_file

from sglang_hvd.cli import main
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import CPU_FLAGS
from sglang_hvd.plugin import examination

ROOT = Path(__file__).parents[2]

# Shapes like those of the demo models.
TARGET: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"},
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"vocab_size": 2048, "max_position_embeddings": 4096},
}
DRAFTER: dict[str, Any] = {
    **TARGET,
    **{"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1},
    "draft_vocab_size": 1024,
}


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """SGLang sets variables while it resolves flags."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def made_model(folder: Path, config: dict[str, Any], **changed: Any) -> Path:
    """A folder with a model's config, and weights of which only the map (d2t) is there."""
    folder.mkdir(exist_ok=True)
    save_file({"d2t": np.zeros(1024, np.int64)}, folder / "model.safetensors")
    given = {name: value for name, value in {**config, **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return made_model(tmp_path / "target", TARGET)


@pytest.fixture
def drafter_with(tmp_path: Path) -> Callable[..., Path]:
    return lambda **changed: made_model(tmp_path / "drafter", DRAFTER, **changed)


@pytest.fixture
def doctor(
    target: Path, drafter_with: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Examine a launch, and return the exit code and the JSON that was printed."""

    def run(
        *flags: str, drafter: Path | None = None, target: Path = target
    ) -> tuple[int, dict[str, Any]]:
        drafter = drafter or drafter_with()
        models = ("--model-path", str(target), "--draft-model-path", str(drafter))
        code = main(["doctor", *models, *CPU_FLAGS, *MODEL_TREE_FLAGS, *flags, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def faults(doctor: Callable[..., tuple[int, dict[str, Any]]]) -> Callable[..., list[str]]:
    """Examine a launch that would fail, and return the reasons."""

    def run(*flags: str, **models: Path) -> list[str]:
        code, result = doctor(*flags, **models)
        texts = [found["text"] for found in result["findings"] if found["status"] == "fault"]
        assert (code, result["would_serve"], result["launch"]) == (1, False, None)
        assert all("\n" not in text for text in texts)
        return texts

    return run


def texts_of(result: dict[str, Any], topic: str) -> list[str]:
    return [found["text"] for found in result["findings"] if found["topic"] == topic]


def test_a_launch_that_would_serve_loads_no_weights(
    doctor: Callable[..., tuple[int, dict[str, Any]]], target: Path
) -> None:
    num_bytes = 10**9
    os.truncate(target / "model.safetensors", num_bytes)  # nothing could be loaded from it
    code, result = doctor()
    of_drafter = (target.parent / "drafter" / "model.safetensors").stat().st_size
    assert (code, result["would_serve"]) == (0, True)
    assert result["launch"] == {
        **{"policy": "allocate", "attention_backends": ["torch_native"], "may_branch": True},
        **{"model_tree_width": 16, "verify_widths": [1, 2, 4, 8, 16, 32], "verify_width": 32},
        **{"context_len": 4096, "kv_slots_per_request": 64},
        # Two heads of 64 keys and 64 values in float32, of four layers and the drafter's one.
        "kv_bytes_per_slot": 2 * (64 + 64) * 4 * (4 + 1),
        "weight_bytes": num_bytes + of_drafter,
    }
    assert {found["section"] for found in result["findings"]} == {
        *("environment", "models", "launch", "files")
    }
    assert texts_of(result, "draft vocabulary") == [
        "1,024 of the 2,048 tokens are drafted; its weights have the map (d2t)"
    ]
    (text,) = texts_of(result, "weights")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert text == f"files of 1.0 GB, of both models; the machine has {decimal(memory)}"


def test_the_verdict_says_what_is_not_checked(
    target: Path, drafter_with: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--model-path", str(target), "--draft-model-path", str(drafter_with())]
    assert main(["doctor", *models, *CPU_FLAGS, *MODEL_TREE_FLAGS]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "A server with HVD would start. Not checked: what the weights contain, and the memory for "
        "KV cache and graphs, which is measured at the start."
    )


def weight_faults(result: dict[str, Any]) -> list[str]:
    return [
        found["text"]
        for found in result["findings"]
        if (found["topic"], found["status"]) == ("weights", "fault")
    ]


def test_a_folder_without_weights_is_a_fault(
    doctor: Callable[..., tuple[int, dict[str, Any]]], target: Path
) -> None:
    (target / "model.safetensors").unlink()
    (target / "training_args.bin").touch()  # SGLang does not load it
    code, result = doctor()
    assert (code, result["would_serve"], result["launch"]["weight_bytes"]) == (1, False, None)
    (text,) = weight_faults(result)
    assert text == f"{target} has no weights (*.safetensors or *.bin or *.pt): download them"


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_files_that_the_index_lists_are_missed(
    doctor: Callable[..., tuple[int, dict[str, Any]]], target: Path, ending: str
) -> None:
    (target / "model.safetensors").unlink()
    files = [f"model-{number}-of-2.{ending}" for number in (1, 2)]
    stem = "model" if ending == "safetensors" else "pytorch_model"
    index = json.dumps({"weight_map": dict(zip(("norm", "head"), files, strict=True))})
    (target / f"{stem}.{ending}.index.json").write_text(index)
    (target / files[0]).write_bytes(bytes(64))
    code, result = doctor()
    (text,) = weight_faults(result)
    assert code == 1
    assert files[1] in text
    assert files[0] not in text
    (target / files[1]).write_bytes(bytes(64))
    code, result = doctor()
    assert (code, weight_faults(result)) == (0, [])


def test_weights_that_no_folder_tells_of_are_a_note(
    doctor: Callable[..., tuple[int, dict[str, Any]]],
    target: Path,
) -> None:
    (target / "model.safetensors").unlink()
    code, result = doctor("--load-format", "dummy")
    assert (code, result["launch"]["weight_bytes"]) == (0, None)
    assert texts_of(result, "weights")[0] == f"{target}: not looked at, load format dummy"


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        ((), False),
        (("--tp-size", "2"), True),
        (("--cpu-offload-gb", "90"), True),
        (("--dtype", "bfloat16"), True),  # half of the file's float32
    ],
)
def test_weights_that_exceed_a_gpu_are_a_fault(
    doctor: Callable[..., tuple[int, dict[str, Any]]],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    fits: bool,
) -> None:
    os.truncate(target / "model.safetensors", 100 * 10**9)
    monkeypatch.setattr(examination, "memory_bytes", lambda cfg: 80 * 10**9)
    _, result = doctor("--device", "cuda", "--attention-backend", "flashinfer", *flags)
    (text,) = texts_of(result, "weights")
    assert text.startswith("files of 100.0 GB, of both models")
    assert "; a GPU has 80.0 GB" in text
    assert weight_faults(result) == ([] if fits else [text])


def test_the_environment_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "0.5.23, the supported version" in printed
    assert printed.splitlines()[-1].startswith("SGLang with HVD is ready. Give --model-path")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"vocab_size": 2112}, "has a vocabulary of 2112 tokens, the target model 2048"),
        ({"hidden_size": 96}, "made for a hidden size of 96, the target model has 128"),
        (
            {"max_position_embeddings": 1024},
            "made for contexts of 1024 tokens, the target model is served with 4096: add "
            "--context-length 1024",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None},
            "not an EAGLE3 drafter",
        ),
    ],
)
def test_a_drafter_that_does_not_fit(
    faults: Callable[..., list[str]],
    drafter_with: Callable[..., Path],
    changed: dict[str, Any],
    says: str,
) -> None:
    (text,) = faults(drafter=drafter_with(**changed))
    assert says in text


def test_a_shorter_drafter_may_be_let_draft_beyond_its_context(
    doctor: Callable[..., tuple[int, dict[str, Any]]],
    drafter_with: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    code, result = doctor(drafter=drafter_with(max_position_embeddings=1024))
    assert code == 0
    (text,) = texts_of(result, "drafter's context")
    assert text.startswith("the drafter was made for 1,024 tokens")


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((1024,), None),
        ((1000,), "has the shape [1000]"),
        (None, "its weights have no map"),
    ],
)
def test_the_map_of_the_draft_vocabulary_is_looked_for_in_the_headers(
    doctor: Callable[..., tuple[int, dict[str, Any]]],
    drafter_with: Callable[..., Path],
    shape: tuple[int, ...] | None,
    says: str | None,
) -> None:
    drafter = drafter_with()
    maps = {} if shape is None else {"d2t": np.zeros(shape, np.int64)}
    save_file({"norm": np.ones(2, np.float32), **maps}, drafter / "model.safetensors")
    code, result = doctor(drafter=drafter)
    (text,) = texts_of(result, "draft vocabulary")
    assert code == (0 if says is None else 1)
    assert (says or "its weights have the map (d2t)") in text


def test_every_refusal_is_listed(faults: Callable[..., list[str]], tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.safetensors"
    flags = ("--enable-mixed-chunk", "--enable-two-batch-overlap", "--hvd-predictor", str(nowhere))
    texts = faults(*flags)
    assert [any(what in text for text in texts) for what in (*flags[:2], str(nowhere))] == [
        True
    ] * 3
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--attention-backend", "fa4"), "cannot verify trees (topk 4) on attention backend fa4"),
        (("--hvd-policy", "greedy"), "--hvd-policy: input should be 'allocate'"),
        (("--hvd-verify-width", "8"), "narrower than the model drafter's tree"),
        (("--speculative-num-draft-tokens", "60"), "37 with 3 steps and topk 4"),
        (
            ("--context-length", "8192"),
            "by SGLang, ValueError: Warning: User-specified context_length (8192) is greater",
        ),
    ],
)
def test_what_a_start_refuses(
    faults: Callable[..., list[str]], flags: tuple[str, ...], says: str
) -> None:
    (text,) = faults(*flags)
    assert says in text


def test_a_launch_for_a_gpu_is_described_where_there_is_none(
    doctor: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    flags = ("--attention-backend", "flashinfer", "--cuda-graph-max-bs-decode", "16")
    code, result = doctor("--device", "cuda", *flags)
    assert code == 1
    assert texts_of(result, "device")[-1].startswith("torch finds no GPU")
    assert result["launch"]["verify_widths"] == [4, 8, 16, 32, 64]
    (text,) = texts_of(result, "memory")
    num_nodes = 16 * (4 + 8 + 16 + 32) + 2 * 64
    num_tokens = 4096 + 2 * 64  # of the context, and of two of the widest verifications after it
    assert text.endswith(f"buffers take about {num_nodes * num_tokens / 1e5:.1f} MB of it")


def test_no_drafter_is_a_fault(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model-path", str(target), *CPU_FLAGS]) == 1
    assert "give --speculative-draft-model-path" in capsys.readouterr().out


def test_a_folder_that_does_not_exist(faults: Callable[..., list[str]], tmp_path: Path) -> None:
    (text,) = faults(target=tmp_path / "nowhere")
    assert text == f"there is no folder {tmp_path / 'nowhere'}: give one that exists"


def test_a_model_of_a_hub_that_cannot_be_reached(
    faults: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (text,) = faults(target=Path("nobody/no-model"))
    assert text.startswith("nobody/no-model is neither a folder nor in this machine's cache")
    assert text.endswith(": give a folder, or download it")


def test_a_model_in_the_cache_of_a_hub_goes_by_its_name(
    doctor: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    cached = tmp_path / "hub" / "models--someone--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123")
    (cached / "snapshots").mkdir()
    made_model(cached / "snapshots" / "0123", TARGET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, result = doctor(target=Path("someone/small"))
    assert code == 0
    assert texts_of(result, "target model")[0].startswith("someone/small: LlamaForCausalLM")
    (cached / "snapshots" / "0123" / "model.safetensors").unlink()
    code, result = doctor(target=Path("someone/small"))
    (text,) = weight_faults(result)
    assert code == 1
    assert text.startswith("someone/small has no weights")


def test_where_recordings_go(
    doctor: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    _, result = doctor("--hvd-record", str(tmp_path / "records"))
    assert texts_of(result, "recordings") == [f"{tmp_path / 'records'} can be written"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--no-such-flag"], "error: unrecognized arguments: --no-such-flag\n"),
        (
            ["--speculative-algorithm", "EAGLE3"],
            "error: doctor examines --speculative-algorithm HVD, got EAGLE3: leave it out\n",
        ),
    ],
)
def test_flags_that_cannot_be_read_are_one_line(
    target: Path, capsys: pytest.CaptureFixture[str], flags: list[str], line: str
) -> None:
    assert main(["doctor", "--model-path", str(target), *CPU_FLAGS, *flags]) == 2
    assert capsys.readouterr() == ("", line)


def test_flags_without_a_model_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tp-size", "2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: the following arguments are required: --model-path")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_of_any_width_shows_it_all(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: Path,
    drafter_with: Callable[..., Path],
    columns: int,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    drafter = drafter_with(vocab_size=2112)
    models = ["--model-path", str(target), "--draft-model-path", str(drafter)]
    assert main(["doctor", *models, *CPU_FLAGS, *MODEL_TREE_FLAGS]) == 1
    printed = capsys.readouterr().out
    assert "\x1b[1;31mfault" in printed
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed).splitlines()
    assert max(map(len, lines)) <= columns
    assert "useadrafterthatwastrained" in "".join("".join(lines).split())


def test_a_file_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok   |note |fault) \S", line) for line in lines)
    assert not any("\x1b" in line for line in lines)


def run_among(packages: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run doctor in an interpreter that finds only these packages."""
    command = (
        f"import sys; sys.path.insert(0, {str(packages)!r}); "
        f"from sglang_hvd.cli import main; sys.exit(main(['doctor', *{list(flags)!r}]))"
    )
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", command], capture_output=True, text=True, check=False
    )


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with links to all installed packages but SGLang, and with this project."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for package in Path(site.getsitepackages()[0]).iterdir():
        if not package.name.lower().startswith(("sglang-", "sglang.", "sgl_")) and (
            package.name not in ("sglang", "sglang_hvd")
        ):
            (folder / package.name).symlink_to(package)
    project = folder / "sglang_hvd"
    shutil.copytree(ROOT / "sglang_hvd", project, ignore=shutil.ignore_patterns("*.so", "shipped"))
    for stub in project.rglob("_native.pyi"):  # an editable install has the modules elsewhere
        place = stub.parent.relative_to(folder)
        native = find_spec(".".join((*place.parts, "_native")))
        assert native is not None
        assert native.origin is not None
        (folder / place / Path(native.origin).name).symlink_to(native.origin)
    return folder


def test_an_environment_without_sglang(packages: Path) -> None:
    done = run_among(packages, "--model-path", "anything")
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "fault SGLang           HVD needs SGLang 0.5.23, and none is installed: pip install "
        "'sglang==0.5.23'\n" in done.stdout
    )
    assert done.stdout.endswith("A server with HVD would not start: 1 fault.\n")


def test_an_environment_with_another_sglang(packages: Path) -> None:
    listed = packages / "sglang-0.6.0.dist-info"
    listed.mkdir()
    (listed / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.0\n")
    done = run_among(packages, "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert texts_of(result, "SGLang") == [
        "HVD supports SGLang 0.5.23, got 0.6.0: pip install 'sglang==0.5.23'"
    ]


def test_an_environment_whose_sglang_cannot_be_imported(packages: Path) -> None:
    listed = packages / "sglang-0.5.23.dist-info"
    listed.mkdir()
    (listed / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    done = run_among(packages)
    assert (done.returncode, done.stderr) == (1, "")
    assert "fault hooks            No module named 'sglang'" in done.stdout


def test_sglang_on_a_cpu_that_was_not_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from sglang_hvd.cli import main; exit(main(['doctor']))"],
        cwd=ROOT,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "fault hooks            sgl_kernel_cpu: no GPU was found: export SGLANG_USE_CPU_ENGINE=1"
        in done.stdout
    )
