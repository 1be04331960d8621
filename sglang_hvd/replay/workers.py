"""Processes that work through a list, and end with the command that started them."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """Processes that wait for work. See `workers`."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def map(
        self, function: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> Iterator[_Result]:
        """The results, in the order of the items. They are to be taken to the end before the next
        call.

        Raises what the function raises, and ValueError, in one line, if a process was killed.
        """
        queue = deque(enumerate(items))
        at_work: dict[Connection, int] = {}
        results: dict[int, _Result] = {}
        for number in range(len(items)):
            while number not in results:
                for connection in self._connections:
                    if queue and connection not in at_work:
                        at_work[connection], item = queue.popleft()
                        self._send(connection, (function, item))
                ready = wait(list(at_work))
                for connection in [one for one in at_work if one in ready]:
                    results[at_work.pop(connection)] = self._received(connection)
            yield results.pop(number)

    def _send(self, connection: Connection, work: object) -> None:
        try:
            connection.send(work)
        except OSError:
            raise self._killed() from None

    def _received(self, connection: Connection) -> Any:
        try:
            result, error = connection.recv()
        except (EOFError, OSError):
            raise self._killed() from None
        if error is not None:
            raise error
        return result

    def _killed(self) -> ValueError:
        return ValueError(
            f"one of {len(self._connections)} processes was killed, probably for the memory that "
            "it took: give fewer --processes"
        )


@contextmanager
def workers(
    num_processes: int, set_up: Callable[..., None], *arguments: object
) -> Iterator[Workers]:
    """Processes that each have called set_up with these arguments. They are killed at the end,
    whatever ends it.

    Raises ValueError, in one line, if one was killed before.
    """
    # Fresh interpreters: a fork would copy locks that threads of this one may hold.
    context = get_context("spawn")
    processes = {}
    try:
        with _uninterrupted():
            for _ in range(num_processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()  # or the end of the process would not be seen
                processes[ours] = process
        started = Workers(list(processes))
        for connection in processes:
            started._send(connection, (set_up, arguments))
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
        set_up, arguments = connection.recv()
        set_up(*arguments)
        while True:
            function, item = connection.recv()
            answer: tuple[object, Exception | None]
            try:
                answer = function(item), None
            except Exception as error:  # noqa: BLE001  raised where the result is taken
                answer = None, error
            connection.send(answer)
    except (EOFError, BrokenPipeError):  # the command has ended
        return
