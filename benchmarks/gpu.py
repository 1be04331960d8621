"""Whether servers that are started here would run on a GPU."""

import os

import torch


def check_gpu() -> None:
    """Raises ValueError, in one line, if they would not."""
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here: give --device cpu")
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise ValueError("--device cuda: SGLANG_USE_CPU_ENGINE is 1, for the CPU: unset it")
