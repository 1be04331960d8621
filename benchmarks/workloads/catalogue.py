"""All workloads by their names."""

from pathlib import Path

from benchmarks.workloads.local import demo, of_file
from benchmarks.workloads.paper import PAPER
from benchmarks.workloads.practice import PRACTICE
from benchmarks.workloads.prompts import Workload


def workloads() -> dict[str, Workload]:
    """All workloads by name, the paper's first."""
    return {workload.name: workload for workload in (*PAPER, *PRACTICE, *demo())}


def find(name: str, tokenizer_file: Path | None = None) -> Workload:
    """A workload by name, or else that of a file.

    Raises ValueError, in one line, if there is neither.
    """
    known = workloads()
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise ValueError(f"{name}: neither a file nor one of {', '.join(known)}")
    return of_file(Path(name), tokenizer_file)
