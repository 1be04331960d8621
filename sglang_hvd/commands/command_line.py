"""What all our commands do alike: parse a command line, and end with an exit code."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from sglang_hvd.demo.server import ServerFailed


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def exit_code(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code.

    The code is the command's own, where None means 0; 2 for a user's mistake or a failed server,
    which is one line on stderr; 130 for ctrl-c; 141 if the reader of stdout has closed it.
    """
    try:
        code = command()
        sys.stdout.flush()  # otherwise Python reports a failed write at exit, with a traceback
        return code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except (ValueError, ServerFailed) as error:
        message = str(error)
    except OSError as error:
        message = str(error)
        _discard_stdout()  # stdout may be what cannot be written
    print(f"error: {message}", file=sys.stderr)
    return 2


def _discard_stdout() -> None:
    with contextlib.suppress(io.UnsupportedOperation):  # stdout is not a stream of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
