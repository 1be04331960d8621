"""SGLang's servers in processes that are forked instead of spawned.

A forked server imports no modules and loads no plugins, which is nearly all that a start takes.
What only a spawned process does is tested by those that start as a user's does: an engine, a server
of recorded traffic (benchmarks.gpu_check), and a launcher that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from sglang_hvd.demo.server_forker import ForkedServer, ServerForker

# A process finds the tests' own modules whatever folder it starts in.
PROJECT_FIRST = {"PYTHONPATH": str(Path(__file__).parents[2])}
# Variables that modules and plugins read when they load. Servers that differ in one of them are
# forked from different processes.
_READ_ONCE = (
    *("TRITON_INTERPRET", "SGL_KERNEL_CPU_REPLAYED_GRAPHS", "SGLANG_PLUGINS"),
    *("SGLANG_TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL"),
)


class Nursery:
    """Forks servers from processes that have loaded all that a server needs.

    Each of these processes starts when the first server needs it.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        """environment: of the processes that fork, except for what servers set of _READ_ONCE."""
        self._environment = environment
        self._forkers: dict[tuple[tuple[str, str], ...], ServerForker] = {}

    def launch(
        self, command: Sequence[str], environment: dict[str, str], log: BinaryIO
    ) -> ForkedServer:
        """Run `python -m MODULE FLAGS`, a server, in this environment."""
        given = tuple((name, environment[name]) for name in _READ_ONCE if name in environment)
        if given not in self._forkers:
            self._forkers[given] = ServerForker({**self._environment, **dict(given)})
        return self._forkers[given].launch(command, environment, log)

    def close(self) -> None:
        for forker in self._forkers.values():
            forker.close()
