"""SGLang's servers in processes that are forked instead of spawned.

A forked server imports no modules and loads no plugins, which is nearly all that a start takes.
What only a spawned process does is tested by those that start as a user's does: an engine, a server
of recorded traffic (benchmarks.gpu_check), one of the demo's, and a launcher that fails.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from sglang_hvd.demo.server import end_with_parent

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
        self._nurses: dict[tuple[tuple[str, str], ...], _Nurse] = {}

    def launch(
        self, command: Sequence[str], environment: dict[str, str], log: BinaryIO
    ) -> ForkedServer:
        """Run `python -m MODULE FLAGS`, a server, in this environment."""
        module, *flags = command[command.index("-m") + 1 :]
        log_path = os.readlink(f"/proc/self/fd/{log.fileno()}")
        order = {"module": module, "flags": flags, "environment": environment, "log": log_path}
        nurse = self._nurse_of(environment)
        return ForkedServer(nurse, int(nurse.ask("fork", order)))

    def close(self) -> None:
        for nurse in self._nurses.values():
            nurse.close()

    def _nurse_of(self, environment: dict[str, str]) -> _Nurse:
        given = tuple((name, environment[name]) for name in _READ_ONCE if name in environment)
        if given not in self._nurses:
            self._nurses[given] = _Nurse({**self._environment, **dict(given)})
        return self._nurses[given]


class _Nurse:
    """A process that forks servers."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.forked_server"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        self._turn = threading.Lock()

    def ask(self, what: str, about: object) -> str:
        """Send one line and return the line that answers it."""
        with self._turn:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([what, about]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the nurse has died"
        return answer.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class ForkedServer:
    """The part of Popen that SglangServer needs."""

    def __init__(self, nurse: _Nurse, pid: int) -> None:
        self._nurse = nurse
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the server runs."""
        if self.returncode is None:
            answer = self._nurse.ask("poll", self.pid)
            self.returncode = int(answer) if answer else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server ends and return its exit code. Raises TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked server", timeout or 0.0)
            time.sleep(0.02)
        return code


@contextmanager
def _forking() -> Iterator[None]:
    """Fork the server's own processes from it, and end them with it."""
    from sglang.srt.utils import kill_process_tree

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    try:
        yield
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _fork_servers() -> None:
    """Fork servers as stdin asks for them."""
    # transformers imports scikit-learn where it is installed. No server needs it, and it loads
    # pyarrow, whose thread would not survive a fork.
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
    from sglang.srt.plugins import load_plugins

    import sglang_hvd.plugin.engine.worker  # noqa: F401

    load_plugins()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would copy what threads hold"
    gc.freeze()  # a collection in a server would copy every page of these objects
    for line in sys.stdin:
        what, about = json.loads(line)
        if what == "poll":
            pid, status = os.waitpid(about, os.WNOHANG)
            print(os.waitstatus_to_exitcode(status) if pid else "", flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become_server(**about)
        print(pid, flush=True)


def _become_server(
    module: str, flags: list[str], environment: dict[str, str], log: str
) -> NoReturn:
    os.setsid()
    end_with_parent()
    with Path(log).open("ab") as file, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()  # or all servers would draw the same ports and seeds
    np.random.seed()
    sys.argv = [module, *flags]
    with _forking():
        runpy.run_module(module, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _fork_servers()
