"""Reads data sets of the Hugging Face hub, and files of GitHub, with the datasets library."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from benchmarks.workloads.prompts import Groups, Prompt

if TYPE_CHECKING:
    from datasets import Dataset

Row = Mapping[str, Any]

# The type of a column: "string", "int64", "json", [type] for a list, {field: type} for a structure.
Shape = str | Sequence["Shape"] | Mapping[str, "Shape"]


@dataclass(frozen=True, slots=True)
class DataSet:
    """Where a data set is, and how a row of it becomes a prompt.

    name: OWNER/NAME at `site`.
    revision: commit, branch or tag.
    columns: the columns that are read. Fields of structures that are not read may be left out.
    prompt: None for a row that is not suitable.
    config: name of the configuration; None: the default one.
    file: reads this file of the repository alone, instead of a split.
    """

    name: str
    revision: str
    columns: Mapping[str, Shape]
    prompt: Callable[[Row], Prompt | None]
    split: str = "train"
    config: str | None = None
    file: str | None = None
    site: Literal["hub", "GitHub"] = "hub"

    @property
    def source(self) -> str:
        """Where the rows are, for people to read."""
        part = self.file or " ".join(filter(None, (self.config, self.split)))
        return f"{self.site}:{self.name}@{self.revision[:8]} {part}"

    def load(self, folder: Path | None) -> Groups:
        """The prompts, one group per row.

        folder: has copies of repositories as FOLDER/OWNER/NAME. None: the data come from `site`,
            and the library keeps them for later runs.

        Raises ValueError, in one line, if the data cannot be loaded or their columns have changed.
        """
        if folder is not None and not folder.is_dir():
            raise ValueError(
                f"--data {folder} is no folder: give one with a copy of {self.name} at "
                f"{folder / self.name}"
            )
        try:
            rows = self._rows(folder)
        except Exception as error:
            # Without a network, or with other files than expected, the library raises errors of a
            # dozen classes (of datasets, huggingface_hub, httpx, fsspec, pyarrow). All go on.
            told = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"{self.name} cannot be loaded from "
                f"{self.site if folder is None else folder / self.name} ({told}): connect to the "
                f"network, or copy the repository at revision {self.revision} to "
                f"DIR/{self.name} and give --data DIR"
            ) from error
        self._check(rows)
        return _Prompts(rows, self.prompt)

    def _rows(self, folder: Path | None) -> "Dataset":
        from datasets import load_dataset

        # Every retry and warning would be a line, and the error says the same. The libraries set
        # their levels when they are imported.
        for library in ("huggingface_hub", "datasets"):
            logging.getLogger(library).setLevel(logging.ERROR)
        if self.file is not None:
            builder = "parquet" if self.file.endswith(".parquet") else "json"
            place = (
                f"hf://datasets/{self.name}@{self.revision}"
                if self.site == "hub"
                else f"https://raw.githubusercontent.com/{self.name}/{self.revision}"
            )
            at = place if folder is None else str(folder / self.name)
            return load_dataset(builder, data_files=f"{at}/{self.file}", split="train")
        if folder is not None:
            return load_dataset(str(folder / self.name), self.config, split=self.split)
        _go_offline_without_hub()
        return load_dataset(self.name, self.config, split=self.split, revision=self.revision)

    def _check(self, rows: "Dataset") -> None:
        found = {name: _shape_of(feature) for name, feature in rows.features.items()}
        for name, wanted in self.columns.items():
            if name not in found:
                raise ValueError(
                    f"{self.name} has no column {name}: the data set has changed since it was "
                    f"looked up; it has {', '.join(found)}"
                )
            if not _fits(found[name], wanted):
                raise ValueError(
                    f"{self.name} has column {name} of type {found[name]}, wanted {wanted}: the "
                    "data set has changed since it was looked up"
                )


def _go_offline_without_hub() -> None:
    """If the hub cannot be reached, the libraries read only what they keep, in this process.

    Otherwise load_dataset would ask the hub six times, over 23 seconds, before it gives up."""
    import datasets
    import httpx
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=5)
    except httpx.TransportError:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


class _Prompts(Sequence[Sequence[Prompt]]):
    """Makes the prompt of a row when it is asked for: some sets have 100,000 rows."""

    def __init__(self, rows: "Dataset", prompt: Callable[[Row], Prompt | None]) -> None:
        self._rows, self._prompt = rows, prompt

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Sequence[Prompt]: ...
    @overload
    def __getitem__(self, index: slice) -> Groups: ...
    def __getitem__(self, index: int | slice) -> Sequence[Prompt] | Groups:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        made = self._prompt(self._rows[index])
        return [] if made is None else [made]

    def __iter__(self) -> Iterator[Sequence[Prompt]]:
        return (self[i] for i in range(len(self)))


def _shape_of(feature: Any) -> Shape:
    from datasets import Json, LargeList, List, Value

    if isinstance(feature, dict):
        return {name: _shape_of(of_field) for name, of_field in feature.items()}
    if isinstance(feature, (List, LargeList)):
        return [_shape_of(feature.feature)]
    if isinstance(feature, Json):
        return "json"
    if isinstance(feature, Value):
        return str(feature.dtype).removeprefix("large_")
    return str(feature)


def _fits(found: Shape, wanted: Shape) -> bool:
    if isinstance(wanted, str) or isinstance(found, str):
        return found == wanted
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            name in found and _fits(found[name], shape) for name, shape in wanted.items()
        )
    return not isinstance(found, Mapping) and _fits(found[0], wanted[0])
