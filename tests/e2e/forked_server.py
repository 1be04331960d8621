"""SGLang's server in processes that are forked instead of spawned: they need not import everything
again, which is nearly all that a start takes.

    python -m tests.e2e.forked_server FLAGS        one server, its processes forked from it
    python -m tests.e2e.forked_server --nursery    servers forked from here, as asked on stdin

What only a spawned process does, unpickling its arguments and loading plugins anew, is tested by
the servers that start as users start them: those of the demo, of tensor parallelism, of the engine
and of the frontend.
"""

from __future__ import annotations

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


class Nursery:
    """A process that has imported all that a server needs, and forks servers."""

    def __init__(self, environment: dict[str, str]) -> None:
        """environment: in which it imports. It starts with the first server."""
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()

    def launch(
        self, command: Sequence[str], environment: dict[str, str], log: BinaryIO
    ) -> ForkedServer:
        """`python -m MODULE FLAGS`, a server, with another environment."""
        module, *flags = command[command.index("-m") + 1 :]
        log_path = os.readlink(f"/proc/self/fd/{log.fileno()}")
        order = {"module": module, "flags": flags, "environment": environment, "log": log_path}
        return ForkedServer(self, int(self.ask("fork", order)))

    def ask(self, what: str, about: object) -> str:
        """One line for one line."""
        with self._turn:
            if self._process is None:
                self._process = self._started()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([what, about]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the nursery has died"
        return answer.strip()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.forked_server", "--nursery"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )


class ForkedServer:
    """What a Popen has that SglangServer asks for."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            answer = self._nursery.ask("poll", self.pid)
            self.returncode = int(answer) if answer else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it ends. Raises TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked server", timeout or 0.0)
            time.sleep(0.02)
        return code


def main(flags: Sequence[str]) -> None:
    """A server, its processes forked from this one."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    with _forking():
        load_plugins()
        run_server(prepare_server_args(list(flags)))


@contextmanager
def _forking() -> Iterator[None]:
    """Processes are forked from this one, and end with it."""
    from sglang.srt.utils import kill_process_tree

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    try:
        yield
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _nurse() -> None:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

    import sglang_hvd.plugin.hooks
    import sglang_hvd.plugin.worker  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would copy what threads hold"
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
    random.seed()  # or all would draw the same ports and seeds
    np.random.seed()
    sys.argv = [module, *flags]
    if module == "tests.e2e.forked_server":
        main(flags)
    else:
        with _forking():
            runpy.run_module(module, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1:] == ["--nursery"]:
        _nurse()
    else:
        main(sys.argv[1:])
