"""The result of a run in its folder. Whatever ends the run, the file is whole and has all cells."""

import fcntl
import os
from pathlib import Path
from typing import Any, NamedTuple

from sglang_hvd.paper.results import Measurement, Result, Template, read_result
from sglang_hvd.whole_file import remove_leftovers, write_whole


class Job(NamedTuple):
    """One mode's turn with a data set: what a measurement measures."""

    mode: str
    data_set: str
    template: Template
    concurrency: int
    rate: float | None
    round: int

    @classmethod
    def of(cls, measurement: Measurement) -> "Job":
        return cls(*(getattr(measurement, name) for name in cls._fields))


class KeptResult:
    """The file result.json of a folder, which is written again after each change.

    Raises ValueError, in one line, if the folder cannot be written, if another process uses it, or
    if its result was begun with other settings.
    """

    def __init__(self, folder: Path, begun: Result) -> None:
        """begun: a result without measurements. A result that is there already goes on."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(f"cannot write into {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"another run writes into {folder}: give another --out") from None
        self.path = folder / "result.json"
        try:
            self.result = self._begin(begun)
            self._write()
        except ValueError:
            self.close()
            raise

    def _begin(self, begun: Result) -> Result:
        remove_leftovers(self.path)
        if not self.path.exists():
            return begun
        found = read_result(self.path)
        _check_same(found, begun, self.path.parent)
        return found.model_copy(update={"is_complete": False})

    def close(self) -> None:
        os.close(self._lock)

    def change(self, **fields: Any) -> None:
        """Changes fields of the result and writes it."""
        self.result = self.result.model_copy(update=fields)
        self._write()

    def add(self, measurement: Measurement) -> None:
        """Adds a measurement, in place of one of the same job that an error ended."""
        others = [m for m in self.result.measurements if Job.of(m) != Job.of(measurement)]
        self.change(measurements=(*others, measurement))

    def done(self) -> set[Job]:
        """The jobs that were measured to their end."""
        return {Job.of(m) for m in self.result.measurements if m.error is None}

    def _write(self) -> None:
        write_whole(self.path, (self.result.model_dump_json(indent=1) + "\n").encode())


def _check_same(found: Result, begun: Result, folder: Path) -> None:
    names = (
        *("model", "target", "drafter", "seed", "max_new_tokens", "shared_flags"),
        *("machine", "versions"),
    )
    differing = [name for name in names if getattr(found, name) != getattr(begun, name)]
    flags = {mode.name: mode.flags for mode in found.modes}
    if any(flags.get(mode.name) != mode.flags for mode in begun.modes) or len(flags) != len(
        begun.modes
    ):
        differing.append("modes")
    if found.data_sets != begun.data_sets:
        differing.append("data_sets")
    if differing:
        raise ValueError(
            f"{folder} has a result of other settings ({', '.join(differing)} differ): give "
            "another --out, or the same settings"
        )
