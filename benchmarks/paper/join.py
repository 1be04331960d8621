"""Compares runs of one model on several machines (figure 5)."""

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

    Throughput and cycles are those of all data sets and rounds together.

    Raises ValueError if the runs are of different models or settings.
    """
    for name in ("model", "max_new_tokens", "seed"):
        values = {getattr(result, name) for result in results}
        if len(values) > 1:
            told = ", ".join(sorted(map(str, values)))
            raise ValueError(f"runs of different {name} cannot be compared: {told}")
    cells = [{_cell(m) for m in result.measurements if m.error is None} for result in results]
    common = set.intersection(*cells)
    if not common:
        raise ValueError("the runs have no measurement in common")
    rows: list[dict[str, object]] = []
    modes = [mode for mode in results[0].modes if any(cell[0] == mode.name for cell in common)]
    for num_at_once in sorted({cell[3] for cell in common}):
        for mode in modes:
            for result in results:
                found = _of(result, common, mode.name, num_at_once)
                if not found:
                    continue
                base = _of(result, common, "eagle3", num_at_once)
                speed = _speed(found)
                rows.append(
                    {
                        "machine": result.machine.gpu or result.machine.cpu,
                        "mode": mode.label,
                        "num_at_once": num_at_once,
                        "tokens_per_s": speed,
                        "speedup": speed / _speed(base) if base else None,
                        "cycles_per_1k": 1000
                        * sum(m.num_cycles for m in found)
                        / sum(m.num_tokens for m in found),
                    }
                )
    return rows


def _cell(m: Measurement) -> tuple[str, str, str, int]:
    return m.mode, m.data_set, m.template, 0 if m.rate else m.concurrency


def _of(
    result: Result, common: set[tuple[str, str, str, int]], mode: str, num_at_once: int
) -> list[Measurement]:
    return [
        m
        for m in result.measurements
        if m.error is None
        and m.rate is None
        and (m.mode, m.concurrency) == (mode, num_at_once)
        and _cell(m) in common
    ]


def _speed(found: Sequence[Measurement]) -> float:
    return sum(m.num_tokens for m in found) / sum(m.seconds for m in found)
