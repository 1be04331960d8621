"""Parts of the check. A part that is interrupted continues where it stopped."""

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sglang_hvd.demo.server import Launch, SglangServer, demo_environment, grace_of
from sglang_hvd.whole_file import write_whole

Row = Mapping[str, Any]

# The first start on a machine compiles FlashInfer's kernels and SGLang's own.
START_SECONDS = 900
# So much of an output is kept.
_TAIL_CHARS = 4000
# Entries of `about` that may differ between machines of the same kind.
_NOT_COMPARED = ("driver",)
# Errors of a unit whose server did not start, or ended.
PROBLEMS = (RuntimeError, OSError, aiohttp.ClientError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a part.

    name: unique in its part, and usable in file names.
    run: yields rows, each with "passed". It receives the rows of earlier runs, and must not yield
        these again.
    """

    name: str
    run: Callable[[Sequence[Row]], Iterable[Row]]


class PartFile:
    """The files with the rows of a part: a JSONL file while it runs, and a JSON file at its end. A
    later run may add units.

    about: machine and options. Files with another `about` are refused; see _NOT_COMPARED.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, Any]) -> None:
        self.path = folder / f"{name}.json"
        self._lines = folder / f"{name}.rows.jsonl"
        self._about = json.loads(json.dumps(about))

    def passed(self, units: Sequence[Unit]) -> bool | None:
        """Whether all these units passed; None if the part has not ended with all of them.

        Raises ValueError if there are no units, or if the part ran on another machine or with other
        options.
        """
        if not units:
            raise ValueError("has nothing to run with these options")
        ended = self._ended()
        if any(unit.name not in ended for unit in units):
            return None
        return all(row["passed"] for unit in units for row in ended[unit.name])

    def run(
        self, units: Sequence[Unit], *, deadline: float, show: Callable[[str], None]
    ) -> bool | None:
        """Runs the remaining units, and returns whether all passed.

        Returns None if the part has not ended, because the deadline came or units had problems.
        Raises ValueError as `passed` does.

        deadline: time.monotonic() after which no unit starts; a running unit stops after its next
            row.
        show: called with a line for each row.
        """
        done, partly = self._found()
        is_whole = True
        with self._lines.open("a") as file:

            def note(row: Row) -> None:
                # Start with a line break: a killed process may have left an incomplete line.
                file.write("\n" + json.dumps(row) + "\n")
                file.flush()

            note({"about": self._about})
            for number, unit in enumerate(units, 1):
                if unit.name in done:
                    continue
                if time.monotonic() > deadline:
                    return None
                rows = partly.get(unit.name, [])
                try:
                    for row in unit.run(tuple(rows)):
                        rows.append(row)
                        note({"unit": unit.name, "row": row})
                        show(f"{number} of {len(units)}, {unit.name}: {dict(row)}")
                        if time.monotonic() > deadline:
                            return None
                except PROBLEMS as error:
                    is_whole = False
                    note({"unit": unit.name, "problem": tail(repr(error))})
                    show(f"{number} of {len(units)}, {unit.name}: {error}")
                    continue
                done[unit.name] = rows
                note({"finished": unit.name})
        if not is_whole:
            return None
        found = [{"unit": name, **row} for name, rows in done.items() for row in rows]
        result = {
            "passed": all(row["passed"] for row in found),
            "about": self._about,
            "rows": found,
        }
        write_whole(self.path, (json.dumps(result, indent=1) + "\n").encode())
        left = [
            {"unit": name, "row": row}
            for name, rows in partly.items()
            if name not in done
            for row in rows
        ]
        if left:  # rows of units that are not in this run
            lines = [json.dumps(line) + "\n" for line in ({"about": self._about}, *left)]
            write_whole(self._lines, "".join(lines).encode())
        else:
            self._lines.unlink()
        return all(row["passed"] for unit in units for row in done[unit.name])

    def _ended(self) -> dict[str, list[Row]]:
        """The rows in the file of an ended part, by unit."""
        done: dict[str, list[Row]] = {}
        if self.path.is_file():
            result = json.loads(self.path.read_text())
            self._check(result["about"], self.path)
            for row in result["rows"]:
                done.setdefault(row.pop("unit"), []).append(row)
        return done

    def _found(self) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
        """The rows of earlier runs by unit: of finished units, and of unfinished ones."""
        done = self._ended()
        partly: dict[str, list[Row]] = {}
        for line in self._lines.read_text().split("\n") if self._lines.is_file() else []:
            try:
                row = json.loads(line or "{}")
            except json.JSONDecodeError:
                continue  # an incomplete line of a killed process
            if "about" in row:
                self._check(row["about"], self._lines)
            if "finished" in row:
                done[row["finished"]] = partly.pop(row["finished"], [])
            if "row" in row:
                partly.setdefault(row["unit"], []).append(row["row"])
        return done, partly

    def _check(self, about: Mapping[str, Any], path: Path) -> None:
        mine, others = (
            {name: value for name, value in of.items() if name not in _NOT_COMPARED}
            for of in (self._about, about)
        )
        if mine != others:
            raise ValueError(
                f"{path} is from another machine or other options: remove it, or give another --out"
            )


def hvd_state(server: SglangServer) -> Row:
    """HVD's part of a server's state."""
    state: Row = server.get("/server_info")["internal_states"][0]["hvd"]
    return state


@contextmanager
def logged_server(
    flags: Sequence[str], *, log_file: Path, device: str, launch: Launch | None
) -> Iterator[SglangServer]:
    """A server. Its log is kept if it did not start, or if the context ends with an error.

    launch: see SglangServer.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with SglangServer(
        flags,
        log_file=log_file,
        environment=demo_environment() if device == "cpu" else {},
        timeout_s=START_SECONDS,
        grace_s=grace_of(device),
        launch=launch,
    ) as server:
        yield server
    log_file.unlink()


def tail(text: str) -> str:
    """The end of a text, which usually has the error."""
    return text[-_TAIL_CHARS:]
