"""The pool of processes: results, errors and ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hvd.replay.core.workers import workers

# Background processes of a shell ignore the signal, and so do their children.
_HANDLING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"

_SLEEPING = f"""{_HANDLING}
import sys, time
from sglang_hvd.replay.core.workers import workers

try:
    print("starts", flush=True)
    with workers(3, str) as started:
        list(started.map(time.sleep, [60.0] * 6))
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_results_come_in_the_order_of_the_items_call_after_call() -> None:
    with workers(2, str) as started:
        assert list(started.map(len, ["a" * num for num in range(7)])) == [*range(7)]
        assert list(started.map(abs, [-3])) == [3]
        assert list(started.map(abs, [])) == []


def test_an_error_in_a_process_is_raised_here() -> None:
    with pytest.raises(ValueError, match="invalid literal"), workers(2, str) as started:
        list(started.map(int, ["1", "x", "2"]))


def test_an_error_says_where_in_the_process_it_came_from() -> None:
    with pytest.raises(ZeroDivisionError) as raised, workers(1, str) as started:
        list(started.map(_inverse, [1, 0]))
    assert "in _inverse" in str(raised.value.__cause__)


def _inverse(number: int) -> float:
    return 1 / number


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        (os._exit, 3, r"one of 2 processes ended with code 3$"),
        (signal.raise_signal, signal.SIGKILL, r"one of 2 processes was killed.*--processes"),
    ],
)
def test_a_process_that_ended_is_reported(end: Callable[[int], None], code: int, told: str) -> None:
    with pytest.raises(ValueError, match=told), workers(2, str) as started:
        list(started.map(end, [code]))


def interrupted(command: list[str], seconds: float) -> tuple[int, str]:
    """Exit code and stderr of a command that receives ctrl-c so many seconds after its first line
    of
    output."""
    # A process group of its own: a terminal sends the signal to the whole group.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=30)
    return process.returncode, told.decode()


# While the processes start, while they import, and while they work.
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.03, 0.1, 0.3, 1.5])
def test_ctrl_c_ends_all_processes_silently(seconds: float) -> None:
    assert interrupted([sys.executable, "-c", _SLEEPING], seconds) == (130, "")


def test_ctrl_c_is_no_error_of_a_command(made_up_traces: Path, number_tokenizer: Path) -> None:
    code = (
        f"{_HANDLING}; from sglang_hvd.commands.command_line import exit_code; "
        "from sglang_hvd.cli import main; "
        "raise SystemExit(exit_code(lambda: print(flush=True) or main()))"
    )
    flags = ["--traces", str(made_up_traces), "--tokenizer", str(number_tokenizer)]
    command = [sys.executable, "-c", code, "evaluate", *flags, "--processes", "2"]
    for seconds in (0.0, 0.1, 0.5):
        returncode, told = interrupted(command, seconds)
        assert returncode == 130
        assert "Traceback" not in told
