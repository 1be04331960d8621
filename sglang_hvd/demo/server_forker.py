"""A process that imports SGLang once and forks servers.

Importing takes nearly all of the time in which a server starts. A server has three processes, and
`python -m sglang.launch_server` lets each of them import for itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

import numpy as np

from sglang_hvd.demo.server import ServerFailed, end_with_parent, how_it_ended


class ServerForker:
    """Forks servers from a process that has loaded all that a server needs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Starts the process, which needs seconds until it can fork. Call this on a thread that
        outlives the servers.

        environment: of the process, in addition to this one's. Modules and plugins read variables
            when they load, so the servers should have the same. OMP_NUM_THREADS must be 1, since a
            process with several threads cannot fork.
        """
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang_hvd.demo.server_forker"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # ctrl-c is for the demo, which then ends it
            preexec_fn=end_with_parent,
        )
        self._turn = threading.Lock()

    def launch(
        self, command: Sequence[str], environment: dict[str, str], log: BinaryIO
    ) -> ForkedServer:
        """Runs `python -m MODULE FLAGS`, a server, in this environment. Waits until the process can
        fork."""
        module, *flags = command[command.index("-m") + 1 :]
        log_path = os.readlink(f"/proc/self/fd/{log.fileno()}")
        order = {"module": module, "flags": flags, "environment": environment, "log": log_path}
        return ForkedServer(self, int(self.ask("fork", order)))

    def ask(self, what: str, about: object) -> str:
        """Sends one line and returns the line that answers it. Raises ServerFailed, with the last
        line of its errors, if the process has died."""
        with self._turn, contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([what, about]) + "\n")
            self._process.stdin.flush()
            if answer := self._process.stdout.readline():
                return answer.strip()
        raise ServerFailed(f"{how_it_ended(self._process.wait())}: {self._last_error()}")

    def close(self) -> None:
        """Ends the process. Servers that still run end with it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> ServerForker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _last_error(self) -> str:
        self._errors.seek(0)
        return (self._errors.read().splitlines() or ["it says nothing"])[-1]


class ForkedServer:
    """The part of Popen that SglangServer needs."""

    def __init__(self, forker: ServerForker, pid: int) -> None:
        self._forker = forker
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while the server runs."""
        if self.returncode is None:
            answer = self._forker.ask("poll", self.pid)
            self.returncode = int(answer) if answer else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the server ends, and returns its exit code. Raises TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked server", timeout or 0.0)
            time.sleep(0.02)
        return code


@contextmanager
def _forking() -> Iterator[None]:
    """Forks the server's own processes from it, and ends them with it."""
    from sglang.srt.utils import kill_process_tree

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    try:
        yield
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _fork_servers() -> None:
    """Forks servers as stdin asks for them."""
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
