"""Checks that a GPU can be used."""

import os

import torch


def check_gpu(asked: str = "--device cuda", instead: str = "--device cpu") -> None:
    """Raises ValueError, in one line, if servers started here would not run on a GPU.

    asked: what needs one. instead: what to give if there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"{asked}: torch finds no GPU: give {instead}")
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise ValueError(f"{asked}: SGLANG_USE_CPU_ENGINE=1 selects the CPU: unset it")
