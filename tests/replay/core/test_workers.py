"""Processes that work through a list."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hvd.replay.core.workers import workers

# What runs in the background of a shell ignores the signal, and so does what it starts.
_HEEDING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"

_SLEEPING = f"""{_HEEDING}
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


def test_what_a_function_raises_is_raised_here_and_the_processes_end() -> None:
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
def test_a_process_that_ended_is_told_of(end: Callable[[int], None], code: int, told: str) -> None:
    with pytest.raises(ValueError, match=told), workers(2, str) as started:
        list(started.map(end, [code]))


def interrupted(command: list[str], seconds: float) -> tuple[int, str]:
    """The exit code, and what is told on stderr, of a command that gets ctrl-c so long after its
    first line."""
    # Of a process group of its own, all of which gets what the terminal sends.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=30)
    return process.returncode, told.decode()


# While the processes start, while they import, and at work.
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.03, 0.1, 0.3, 1.5])
def test_ctrl_c_ends_them_all_without_a_word(seconds: float) -> None:
    assert interrupted([sys.executable, "-c", _SLEEPING], seconds) == (130, "")


def test_ctrl_c_is_no_error_of_a_command(made_up_traces: Path, number_tokenizer: Path) -> None:
    code = (
        f"{_HEEDING}; from sglang_hvd.commands.command_line import exit_code; "
        "from sglang_hvd.cli import main; "
        "raise SystemExit(exit_code(lambda: print(flush=True) or main()))"
    )
    flags = ["--traces", str(made_up_traces), "--tokenizer", str(number_tokenizer)]
    command = [sys.executable, "-c", code, "evaluate", *flags, "--processes", "2"]
    for seconds in (0.0, 0.1, 0.5):
        returncode, told = interrupted(command, seconds)
        assert returncode == 130
        assert "Traceback" not in told
