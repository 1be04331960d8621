"""Runs an SGLang server as a child process: starts it with a log, waits for it, and ends it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

# Architectures of the demo models and of benchmarks/trace_serving. Otherwise SGLang imports every
# architecture at each start, which takes 4 s of a core.
_ARCHITECTURES = {"llama", "llama_eagle3", "qwen3"}

# The last line of a server that refuses its settings. argparse prints it after all flags and begins
# it with "sglang serve: ".
_REFUSES = re.compile(r"(?:[^:]+: )?error: (.*)")

# How a traceback ends, and its lines that name a function.
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?")
_FRAME = re.compile(r' +File ".*", line \d+, in (\w+)')

_GRACE_S = 3.0  # the default

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Otherwise torch compiles for 10 s or more during the first request.
    "TORCHDYNAMO_DISABLE": "1",
    # The demo models are too small for threads: two of them cost more time than they save.
    "OMP_NUM_THREADS": "1",
}
CPU_FLAGS = (
    *("--device", "cpu", "--sleep-on-idle"),
    *("--dtype", "float32"),  # bfloat16 logits tie, and ties are not broken the same way each time
    *("--max-total-tokens", "20000"),  # otherwise the KV pool takes most of the memory
    *("--max-running-requests", "16"),
)


def demo_environment() -> dict[str, str]:
    """The environment of a server that can load only the demo's architectures."""
    return {**CPU_ENVIRONMENT, "SGLANG_DISABLED_MODEL_ARCHS": _other_architectures()}


def grace_of(device: str) -> float:
    """Seconds that a server gets to end by itself. On a GPU the next server needs its memory; on
    a CPU it can be killed at once."""
    return 0 if device == "cpu" else _GRACE_S


def _other_architectures() -> str:
    """Names of SGLang's modules for all other architectures. Importing SGLang takes seconds, so
    they are read from its folder."""
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        return ""
    models = Path(sglang.submodule_search_locations[0]) / "srt" / "models"
    names = {path.stem for path in models.iterdir() if path.suffix == ".py" or path.is_dir()}
    return ",".join(sorted(names - _ARCHITECTURES))


class Process(Protocol):
    """A server's process, the leader of its process group."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it ends, and returns its exit code. Raises TimeoutExpired."""


# Starts a command in an environment and writes its output into a file.
Launch = Callable[[Sequence[str], dict[str, str], BinaryIO], Process]


class ServerFailed(RuntimeError):
    """A server did not start, or ended while it served."""


class SglangServer:
    """Context manager around `python -m sglang.launch_server`. Enter it once, on a thread that
    outlives the server.

    Raises ServerFailed on entry, with the end of the log, if the server dies or does not answer
    within `timeout_s`. Raises ValueError if a given port is taken.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log_file: Path,
        port: int | None = None,
        environment: dict[str, str] | None = None,
        module: str = "sglang.launch_server",
        timeout_s: float = 180,
        grace_s: float = _GRACE_S,
        launch: Launch | None = None,
    ) -> None:
        """grace_s: how long SGLang may take to end by itself before it is killed. It usually uses
            all of it.
        launch: starts the process in place of `spawn`.
        """
        self._held: socket.socket | None = None
        if port is None:
            self._held = held_port()
            port = int(self._held.getsockname()[1])
        else:
            held_port(port).close()  # otherwise another server there would pass for this one
        self._port = port
        # The last occurrence of a flag counts: --host in `flags` overrides, --port does not.
        self._command = [
            *(sys.executable, "-m", module, "--host", "127.0.0.1", *flags),
            *("--port", str(self._port)),
        ]
        self._host = _asked_host(self._command)
        self._log_file = log_file
        self._environment = {**os.environ, **(environment or {})}
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._launch = launch or spawn
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return f"http://{self._host}:{self._port}"

    @property
    def log(self) -> str:
        """Everything that the server has written so far."""
        return self._log_file.read_text(errors="replace")

    @property
    def last_exception(self) -> str | None:
        """The last exception in the log, in one line; None if there is none."""
        lines = self.log.splitlines()
        places = [place for place, line in enumerate(lines) if _EXCEPTION.fullmatch(line)]
        if not places:
            return None
        functions = [found[1] for line in lines[: places[-1]] if (found := _FRAME.match(line))]
        where = f" in {functions[-1]}" if functions else ""
        return f"{lines[places[-1]].rstrip(': ')}{where}"

    def begin(self) -> None:
        """Starts the process without waiting for it, so that several servers can start at the same
        time. Call it at most once, before entering, on a thread that outlives the server."""
        assert self._process is None, "the server was started before"
        with self._log_file.open("wb") as log:
            self._process = self._launch(self._command, self._environment, log)

    def __enter__(self) -> SglangServer:
        if self._process is None:
            self.begin()
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 300) -> Any:
        """POST JSON and return the JSON answer, or its text if it is not JSON."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return _answer(request, timeout_s)

    def get(self, path: str, *, timeout_s: float = 60) -> Any:
        """GET and return the JSON answer, or its text if it is not JSON."""
        return _answer(urllib.request.Request(self.url + path), timeout_s)

    def stop(self) -> None:
        """End the server and the processes that it started, which share its process group."""
        if self._held is not None:
            self._held.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGTERM)
                self._process.wait(timeout=self._grace_s)
            os.killpg(self._process.pid, signal.SIGKILL)  # a child may outlive its parent
        self._process.wait()
        self._process = None

    def wait(self) -> int:
        """Wait until the server ends by itself and return its exit code."""
        assert self._process is not None, "the server was not started, or was stopped"
        return self._process.wait()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise ServerFailed(self._why_it_ended(code))
            try:
                self.get("/health_generate", timeout_s=30)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.25)
            else:
                return
        raise ServerFailed(f"no answer after {self._timeout_s:.0f} s:\n{self._log_tail()}")

    def _why_it_ended(self, code: int) -> str:
        """The server's own error line if there is one, otherwise the end of its log."""
        *_, last = self.log.splitlines() or [""]
        refused = _REFUSES.fullmatch(last)
        if refused is not None:
            return refused[1]
        return f"{how_it_ended(code)}:\n{self._log_tail()}"

    def _log_tail(self) -> str:
        return "\n".join(self.log.splitlines()[-15:])


def how_it_ended(code: int) -> str:
    """Says in words how a server with this exit code ended."""
    if code < 0:
        return f"the server was ended by {signal.Signals(-code).name}"
    return f"the server ended with code {code}"


# Loaded here because a child of a threaded process must not load anything between fork and exec.
# Only Linux has prctl. On other systems a server may outlive a parent that is killed.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Runs in the child, which then gets SIGTERM when the thread that started it ends."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def spawn(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process:
    """Starts a child of this process as the leader of its own process group."""
    return subprocess.Popen(
        command,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def held_port(port: int = 0) -> socket.socket:
    """A socket bound to a TCP port of the loopback interface, or to a free one if `port` is 0.

    While the socket is open, the kernel does not hand out the port to processes that ask for any
    port. A server that asks for this port with SO_REUSEADDR, as uvicorn does, can listen on it,
    because this socket never listens.

    Raises ValueError if the port is not free.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        holder.close()
        raise ValueError(f"port {port} cannot be used: {error}: choose another --port") from None
    return holder


def _asked_host(command: Sequence[str]) -> str:
    """The host under which a server with this command line answers."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host")
    host = str(parser.parse_known_args(command)[0].host)
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def flush_cache(url: str, *, timeout_s: float = 20) -> None:
    """Empties a server's caches. The server refuses this while it still holds a request.

    Raises HTTPError if it still refuses after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _answer(urllib.request.Request(f"{url}/flush_cache", method="POST"), 60)
            return
        except urllib.error.HTTPError as error:
            if error.code != 400 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _answer(request: urllib.request.Request, timeout_s: float) -> Any:
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        text = response.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text
