"""What is refused at start is refused in the scheduler's process, too, which may have got another
environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.hooks.server_args import create_hvd_worker


@pytest.mark.parametrize("steps", ["0", "2.5"])
def test_a_scheduler_with_simulated_acceptance_does_not_start(
    steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_args = ServerArgs(model_path="none")
    server_args._hvd_launch = SimpleNamespace()
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", steps)

    def create() -> Any:
        return create_hvd_worker(lambda *_: None, SimpleNamespace(), server_args)

    if steps == "0":
        assert create() is HvdWorker
    else:
        with pytest.raises(ValueError, match="HVD does not support SGLANG_SIMULATE_ACC_LEN"):
            create()
