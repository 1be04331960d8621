"""SGLang's server, its processes forked instead of spawned: they need not import everything again,
which is more than half of what a start takes.

What only a spawned process does, unpickling its arguments and loading plugins anew, is tested by
the servers that start as users start them: those of the demo, of tensor parallelism, of the engine
and of the frontend.
"""

import multiprocessing
import os
import sys

import sglang.launch_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree


def main() -> None:
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[method-assign]
    load_plugins()
    try:
        sglang.launch_server.run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
