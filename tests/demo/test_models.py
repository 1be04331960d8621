import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Never

import pytest

from sglang_hvd.cli import main
from sglang_hvd.demo import models
from sglang_hvd.demo.models import ensure_demo_models
from sglang_hvd.demo.training.recipes import RECIPES, Recipe
from tests.test_import_direction import PACKAGE, imported_modules

# What a build imports too, and what has no part in what it makes: it decides by no costs, reads no
# files but its own, and counts and reports for nobody.
NO_SOURCES = (
    *("**/__init__.py", "allocation/*.py", "costs/*.py", "request_stats.py", "step_clock.py"),
    *("whole_file.py", "yaml_text.py", "view/cycles.py"),
)


@pytest.fixture(autouse=True)
def quick_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for minutes of training: what is tested here is where the result goes."""

    def build(recipe: Recipe, directory: Path, *, progress: bool) -> None:
        with (tmp_path / "builds").open("a") as log:
            log.write("built\n")
        (directory / "predictor.safetensors").touch()

    monkeypatch.setattr("sglang_hvd.demo.training.build.build", build)


def num_builds(tmp_path: Path) -> int:
    return (tmp_path / "builds").read_text().count("built")


def test_a_second_call_builds_nothing(tmp_path: Path) -> None:
    built = ensure_demo_models(tmp_path / "cache", progress=False)
    assert built.predictor.is_file()
    assert ensure_demo_models(tmp_path / "cache", progress=False) == built
    assert num_builds(tmp_path) == 1


def test_an_interrupted_build_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(recipe: Recipe, directory: Path, *, progress: bool) -> None:
        (directory / "target").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_hvd.demo.training.build.build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_demo_models(tmp_path, progress=False)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_of_two_processes_at_once_one_builds(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=ensure_demo_models, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert num_builds(tmp_path) == 1


def test_another_recipe_has_a_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = ensure_demo_models(tmp_path, progress=False)
    other = replace(RECIPES["llama"], target_tokens=1)
    monkeypatch.setattr(models, "RECIPES", MappingProxyType({"llama": other}))
    assert ensure_demo_models(tmp_path, progress=False) != built


def test_every_source_is_there() -> None:
    assert all(any(PACKAGE.glob(pattern)) for pattern in (*models._SOURCES, *NO_SOURCES))


def test_all_that_a_build_imports_is_a_source_of_it() -> None:
    known = {file for name in (*models._SOURCES, *NO_SOURCES) for file in PACKAGE.glob(name)}
    unknown = imported_files(PACKAGE / "demo/training/build.py") - known
    assert sorted(file.relative_to(PACKAGE).as_posix() for file in unknown) == []


def imported_files(file: Path) -> set[Path]:
    """The files of the package that importing this one runs, itself included."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        of_file = ".".join(file.relative_to(PACKAGE.parent).parent.parts)
        for module in imported_modules(file.read_text(), of_file):
            # A name of a module's, too: its last part is then no file.
            place = PACKAGE.parent
            for part in module.split("."):
                place /= part
                candidates = place.with_suffix(".py"), place / "__init__.py"
                waiting += [path for path in candidates if path.is_relative_to(PACKAGE)]
        waiting = [path for path in waiting if path.is_file()]
    return found


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="choose another --cache-dir"):
        ensure_demo_models(file, progress=False)


def test_a_port_that_is_taken_is_told_before_models_are_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", "--port", port, "--cache-dir", str(tmp_path / "cache")]) == 2
    assert f"port {port} cannot be used" in capsys.readouterr().err
    assert not (tmp_path / "builds").exists()


@pytest.mark.parametrize("command", ["demo", "serve"])
def test_a_user_without_a_home_is_told_what_to_set(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(user: int) -> Never:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert error == "error: this user has no home to keep files in: set XDG_CACHE_HOME\n"
