"""Checks that a GPU can be used."""

import os

import torch


def check_gpu() -> None:
    """Raises ValueError, in one line, if servers started here would not run on a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU: give --device cpu")
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise ValueError("--device cuda: SGLANG_USE_CPU_ENGINE=1 selects the CPU: unset it")
