"""A pool of processes that work through a list, and end with the command that started them."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.process import BaseProcess


@contextmanager
def workers(
    num_processes: int, set_up: Callable[..., None], *arguments: object
) -> Iterator[Executor]:
    """A pool whose processes have each called set_up with these arguments.

    The processes are killed when the context ends, whatever ends it.

    Raises ValueError, in one line, if a process ended by itself.
    """
    others = set(active_children())
    # Fresh interpreters: a fork would copy locks that threads of this process may hold.
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), set_up, arguments)
    processes: set[BaseProcess] = set()
    try:
        with _uninterrupted():
            # The pool starts a process for each call that finds no idle one.
            for _ in range(num_processes):
                pool.submit(_do_nothing)
                processes |= set(active_children()) - others
        yield pool
    except BrokenProcessPool:
        pool.shutdown()  # waits until all processes have ended
        raise _ended({process.exitcode for process in processes}, num_processes) from None
    finally:
        # Before Python 3.14 a pool cannot end its processes at once. Calls that are cancelled must
        # be dropped first, or the pool fails on them in a thread of its own.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.kill()
            process.join()


def _do_nothing() -> None:
    pass


def _ended(exit_codes: set[int | None], num_processes: int) -> ValueError:
    """exit_codes: of all processes. The pool itself terminates those that did not end first."""
    if -signal.SIGKILL in exit_codes:
        return ValueError(
            f"one of {num_processes} processes was killed, probably because memory ran out: give "
            "fewer --processes"
        )
    [code, *_] = exit_codes - {0, -signal.SIGTERM} or {0}
    return ValueError(f"one of {num_processes} processes ended with code {code}")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays ctrl-C until the end of the context. Processes started in it never receive ctrl-C: the
    command does, and ends them."""
    has_come = False

    def note(*_: object) -> None:
        nonlocal has_come
        has_come = True

    handler = signal.signal(signal.SIGINT, note)
    # The tracker unblocks the signal when it starts, so start it before the signal is blocked.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if has_come:
        signal.raise_signal(signal.SIGINT)
