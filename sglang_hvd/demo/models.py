"""The demo models that ship in the package, and how they are built again."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Shape = Literal["llama", "qwen3"]

SHIPPED = Path(__file__).with_name("shipped")  # one folder for each shape


@dataclass(frozen=True, slots=True)
class DemoModels:
    """Two checkpoint directories and a predictor file."""

    target: Path
    drafter: Path
    predictor: Path


def demo_models(shape: Shape = "llama", *, folder: Path = SHIPPED) -> DemoModels:
    """The models of a shape: those that ship, or those that `rebuild` put into a folder."""
    of_shape = folder / shape
    return DemoModels(
        target=of_shape / "target",
        drafter=of_shape / "drafter",
        predictor=of_shape / "predictor.safetensors",
    )


def rebuild(folder: Path) -> None:
    """Builds the models of all shapes from their recipes, with a progress bar.

    A build takes some 15 minutes on two idle cores, and gives the same bytes each time on the same
    machine. Models that are already in the folder stay until those that replace them are complete.

    Raises ValueError if the folder cannot be written.
    """
    from sglang_hvd.demo.training.build import build  # seconds of imports
    from sglang_hvd.demo.training.recipes import RECIPES

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for shape in get_args(Shape):
            print(f"building {folder / shape}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=f".{shape}-") as scratch:
                built = Path(scratch) / shape
                built.mkdir()
                build(RECIPES[shape], built, progress=True)
                replace_folder(built, folder / shape)
    except OSError as error:
        raise ValueError(
            f"cannot write the demo models into {folder}: {error.strerror}: "
            "give --rebuild another folder"
        ) from error


def replace_folder(built: Path, folder: Path) -> None:
    """Moves `built` to `folder`. If that fails, what was there before is there again."""
    replaced = folder.with_name(f".replaced-{folder.name}")
    if folder.exists():
        if replaced.exists():  # of a process that was killed here
            shutil.rmtree(replaced)
        folder.rename(replaced)
    try:
        built.rename(folder)
    except BaseException:
        if replaced.exists():
            replaced.rename(folder)
        raise
    if replaced.exists():
        shutil.rmtree(replaced)
