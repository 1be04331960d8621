"""Parts of a check that may be cut off: what was finished is not run again."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hvd.demo.server import CPU_ENVIRONMENT, SglangServer

Row = Mapping[str, Any]

# The first start on a machine compiles FlashInfer's kernels and SGLang's own.
START_SECONDS = 900
# Of what is kept of an output.
_TAIL_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Unit:
    """What is run whole, or again.

    name: that no other of its part has; also a file's.
    run: yields rows, each with "passed". Raises RuntimeError or OSError where a server did not
        start or ended.
    """

    name: str
    run: Callable[[], Iterable[Row]]


class PartFile:
    """The rows of a part: line by line as they come, then whole in one file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        self._lines = folder / f"{name}.rows.jsonl"

    def result(self) -> Mapping[str, Any] | None:
        """What was written when the part ended; None before."""
        return json.loads(self.path.read_text()) if self.path.is_file() else None

    def run(
        self, units: Sequence[Unit], *, deadline: float, show: Callable[[str], None]
    ) -> list[Row] | None:
        """The rows of all units; None where it was too late to begin some of them.

        deadline: by time.monotonic.
        show: gets what is known, row by row.
        """
        done = self._finished()
        with self._lines.open("w") as file:

            def note(row: Row) -> None:
                file.write(json.dumps(row) + "\n")
                file.flush()

            for row in done.values():
                note(row)
            for number, unit in enumerate(units, 1):
                if unit.name in done:
                    continue
                if time.monotonic() > deadline:
                    return None
                rows: list[Row] = []
                try:
                    for row in unit.run():
                        rows.append(row)
                        note({"unit": unit.name, **row})
                        show(f"{number} of {len(units)}, {unit.name}: {dict(row)}")
                except (RuntimeError, OSError) as error:
                    rows.append({"passed": False, "problem": tail(str(error))})
                    show(f"{number} of {len(units)}, {unit.name}: {error}")
                done[unit.name] = {"finished": unit.name, "rows": rows}
                if all("problem" not in row for row in rows):
                    note(done[unit.name])
        return [{"unit": unit.name, **row} for unit in units for row in done[unit.name]["rows"]]

    def finish(self, rows: Sequence[Row], machine: Mapping[str, str]) -> bool:
        """Writes the part's file. Whether all rows passed."""
        passed = all(row["passed"] for row in rows)
        result = {"passed": passed, "machine": machine, "rows": rows}
        self.path.write_text(json.dumps(result, indent=1) + "\n")
        self._lines.unlink()
        return passed

    def _finished(self) -> dict[str, Row]:
        """What an earlier run finished, by unit."""
        if not self._lines.is_file():
            return {}
        # The last line of a process that was killed may be half of one.
        lines = self._lines.read_text().split("\n")[:-1]
        rows = [json.loads(line) for line in lines]
        return {row["finished"]: row for row in rows if "finished" in row}


@contextmanager
def logged_server(flags: Sequence[str], *, log_file: Path, device: str) -> Iterator[SglangServer]:
    """A server whose log stays if it did not start, or if what is done with it fails."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with SglangServer(
        flags,
        log_file=log_file,
        environment=CPU_ENVIRONMENT if device == "cpu" else {},
        timeout_s=START_SECONDS,
    ) as server:
        yield server
    log_file.unlink()


def tail(text: str) -> str:
    """The end of it, which says most."""
    return text[-_TAIL_CHARS:]
