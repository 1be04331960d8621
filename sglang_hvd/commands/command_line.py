"""How a command ends, and what it says then."""

import contextlib
import io
import os
import sys
from collections.abc import Callable

from sglang_hvd.demo.server import ServerFailed


def exit_code(command: Callable[[], int | None]) -> int:
    """Of a command that returns its own, None for 0. 2 for a mistake of the user's and for a server
    that failed, in one line on stderr; 130 for ctrl-c; 141 where nobody reads on."""
    try:
        code = command()
        sys.stdout.flush()  # or what cannot be printed would be told at the exit, by a traceback
        return code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _close_stdout()  # whoever reads it wanted no more
        return 141
    except (ValueError, ServerFailed) as error:
        told = str(error)
    except OSError as error:
        told = str(error)
        _close_stdout()  # it may be what cannot be written
    print(f"error: {told}", file=sys.stderr)
    return 2


def _close_stdout() -> None:
    """What is still to be printed is dropped."""
    with contextlib.suppress(io.UnsupportedOperation):  # not a stream of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
