"""Processes that work through a list, and end with the command that started them.

Of the standard library's pools, multiprocessing's waits for ever for a process that was killed, and
that of concurrent.futures has no way before Python 3.14 to end its processes at once.
"""

import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """Processes that wait for work. See `workers`."""

    def __init__(self, processes: Mapping[Connection, SpawnProcess]) -> None:
        self._processes = processes

    def map(
        self, function: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> Iterator[_Result]:
        """The results, in the order of the items. They are to be taken to the end before the next
        call.

        Raises what the function raises, and ValueError, in one line, if a process ended.
        """
        queue = deque(enumerate(items))
        at_work: dict[Connection, int] = {}
        results: dict[int, _Result] = {}
        for number in range(len(items)):
            while number not in results:
                for connection in self._processes:
                    if queue and connection not in at_work:
                        at_work[connection], item = queue.popleft()
                        self._send(connection, (function, (item,)))
                ready = wait(list(at_work))
                for connection in [one for one in at_work if one in ready]:
                    results[at_work.pop(connection)] = self._received(connection)
            yield results.pop(number)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Has each process call it. Raises as `map` does."""
        for connection in self._processes:
            self._send(connection, (function, arguments))
        for connection in self._processes:
            self._received(connection)

    def _send(self, connection: Connection, work: tuple[object, object]) -> None:
        try:
            connection.send(work)
        except OSError:
            raise self._ended(connection) from None

    def _received(self, connection: Connection) -> Any:
        try:
            result, error = connection.recv()
        except (EOFError, OSError):
            raise self._ended(connection) from None
        if error is not None:
            raise error
        return result

    def _ended(self, connection: Connection) -> ValueError:
        process = self._processes[connection]
        process.join()
        of_all = f"one of {len(self._processes)} processes"
        if process.exitcode == -signal.SIGKILL:
            return ValueError(
                f"{of_all} was killed, probably for the memory that it took: give fewer --processes"
            )
        return ValueError(f"{of_all} ended with code {process.exitcode}")


@contextmanager
def workers(
    num_processes: int, set_up: Callable[..., None], *arguments: object
) -> Iterator[Workers]:
    """Processes that each have called set_up with these arguments. They are killed at the end,
    whatever ends it.

    Raises what set_up raises, and ValueError, in one line, if a process ended.
    """
    # Fresh interpreters: a fork would copy locks that threads of this one may hold.
    context = get_context("spawn")
    processes: dict[Connection, SpawnProcess] = {}
    try:
        with _uninterrupted():
            for _ in range(num_processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()  # or the end of the process would not be seen
                processes[ours] = process
        started = Workers(processes)
        started.call(set_up, *arguments)
        yield started
    finally:
        for process in processes.values():
            process.kill()
        for connection, process in processes.items():
            process.join()
            connection.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C comes at the end of this, and never to a process that is started in it: it is meant
    for the command, which ends the others."""
    has_come = False

    def note(*_: object) -> None:
        nonlocal has_come
        has_come = True

    handler = signal.signal(signal.SIGINT, note)
    # Its start would unblock the signal.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if has_come:
        signal.raise_signal(signal.SIGINT)


def _work(connection: Connection) -> None:
    try:
        while True:
            function, arguments = connection.recv()
            answer: tuple[object, Exception | None]
            try:
                answer = function(*arguments), None
            except Exception as error:  # noqa: BLE001  raised where the result is taken
                error.add_note(traceback.format_exc())
                answer = None, error
            connection.send(answer)
    except (EOFError, ConnectionError):  # the command has ended
        return
