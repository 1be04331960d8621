"""Compares runs of one model on several machines (figure 5)."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import parser_of
from sglang_hvd.paper.results import Measurement, Result, read_result
from sglang_hvd.replay.training.tables import markdown_table


def join(arguments: Sequence[str]) -> int:
    """The subcommand: prints a table of the runs' modes side by side."""
    parser = parser_of("paper join", "Compare runs of one model on several machines.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    options = parser.parse_args(arguments)
    rows = side_by_side([read_result(path) for path in options.results])
    columns = {
        "machine": "machine",
        "mode": "mode",
        "num_at_once": "at once",
        "tokens_per_s": "tokens/s",
        "speedup": "x EAGLE3",
        "cycles_per_1k": "cycles per 1K",
    }
    print(markdown_table(columns, rows, num_labels=2, digits=2))
    return 0


def side_by_side(results: Sequence[Result]) -> list[dict[str, object]]:
    """A row for each mode, concurrency and run, over the data sets that all runs have measured.

    A data set of another revision, or with other prompts, is another data set. Throughput and
    cycles are those of all data sets and rounds together.

    Raises ValueError if the runs are of different models or settings, or have nothing in common.
    """
    for name in ("model", "max_new_tokens", "seed"):
        values = sorted({str(getattr(result, name)) for result in results})
        if len(values) > 1:
            raise ValueError(f"runs of different {name} cannot be compared: {', '.join(values)}")
    cells = [_cells(result) for result in results]
    machines = [result.machine.gpu or result.machine.cpu for result in results]
    if len(set(machines)) < len(machines):
        machines = [f"{name} (run {number})" for number, name in enumerate(machines, start=1)]
    common = sorted(set.intersection(*(set(of_run) for of_run in cells)))
    if not common:
        raise ValueError("the runs have no measurement in common")
    rows: list[dict[str, object]] = []
    for num_at_once in sorted({number for _, _, number in common}):
        for mode in results[0].modes:
            for machine, of_run in zip(machines, cells, strict=True):
                names = [
                    name for m, name, number in common if (m, number) == (mode.name, num_at_once)
                ]
                if not names:
                    continue
                found = [m for name in names for m in of_run[mode.name, name, num_at_once]]
                bases = [of_run.get(("eagle3", name, num_at_once), []) for name in names]
                base = [m for of_set in bases for m in of_set] if all(bases) else []
                num_tokens = sum(m.num_tokens for m in found)
                rows.append(
                    {
                        "machine": machine,
                        "mode": mode.label,
                        "num_at_once": num_at_once,
                        "tokens_per_s": _speed(found),
                        "speedup": _speed(found) / _speed(base) if base else None,
                        "cycles_per_1k": 1000 * sum(m.num_cycles for m in found) / num_tokens,
                    }
                )
    return rows


_Cell = tuple[str, str, int]


def _cells(result: Result) -> dict[_Cell, list[Measurement]]:
    """Whole measurements of closed loops, by mode, data set and concurrency. Those without a chat
    template are left out, unless there are no others."""
    found = [m for m in result.measurements if m.error is None and m.rate is None]
    official = [m for m in found if m.template == "official"]
    known = {of.name: f"{of.name} {of.source} {of.num_measured}" for of in result.data_sets}
    cells: dict[_Cell, list[Measurement]] = defaultdict(list)
    for m in official or found:
        cells[m.mode, known[m.data_set], m.concurrency].append(m)
    return cells


def _speed(found: Sequence[Measurement]) -> float:
    return sum(m.num_tokens for m in found) / sum(m.seconds for m in found)
