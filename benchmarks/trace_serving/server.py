"""`python -m sglang.launch_server`, except that the tokens are those of a script.

    python -m benchmarks.trace_serving.server --script FILE ...flags of SGLang

Hooks are registered only in processes that run this module as their main module. No flag, variable
or configuration of another server can register them.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.trace_serving.dictation import Dictation
from benchmarks.trace_serving.script import Script

HOOKED = {
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": "forward",
    "sglang.srt.speculative.eagle_worker_v2.build_eagle_verify_input": "build_eagle_verify_input",
    "sglang_hvd.plugin.engine.step_drafts.StepDrafts.draft": "draft",
    "sglang_hvd.plugin.engine.step_drafts.StepDrafts._run_model_drafter": "run_model_drafter",
}


def register(script: Path) -> None:
    """Registers the hooks; SGLang puts them in place when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    dictation = Dictation(Script.load(script))
    for target, name in HOOKED.items():
        HookRegistry.register(target, getattr(dictation, name), HookType.AROUND)


def main(flags: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    HookRegistry.apply_hooks()  # where plugins were loaded before, load_plugins does nothing
    missing = sorted(set(HOOKED) - HookRegistry._patched)
    if missing:
        raise RuntimeError(
            f"could not hook into {', '.join(missing)}: the log above has the reason"
        )
    run_server(prepare_server_args(flags))


# Processes that SGLang spawns run this module again, as __mp_main__.
if __name__ in ("__main__", "__mp_main__"):
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--script", type=Path, required=True)
    options, rest = parser.parse_known_args(sys.argv[1:])
    register(options.script)
    if __name__ == "__main__":
        main(rest)
