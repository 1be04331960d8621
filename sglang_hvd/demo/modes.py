"""The modes of decoding that the demo compares, each as the flags of one SGLang server."""

from __future__ import annotations

from typing import Literal, get_args

from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.demo.models import DemoModels

# plain: target only. eagle3, ngram: SGLang's own. The rest: HVD under that policy.
Mode = Literal[
    "plain", "eagle3", "ngram", "model", "cache", "frequency", "payoff", "both", "allocate"
]
MODES: tuple[Mode, ...] = get_args(Mode)
HVD_MODES: tuple[Policy, ...] = get_args(Policy)
DEFAULT_MODES: tuple[Mode, ...] = ("plain", "eagle3", HvdConfig().policy)

# The draft tree of both SGLang's EAGLE3 and HVD's model drafter. On a CPU the paper's 8 steps cost
# more time than their tokens save.
MODEL_TREE_FLAGS = (
    *("--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "16"),
)


def server_flags(mode: Mode, models: DemoModels) -> list[str]:
    """Flags of `python -m sglang.launch_server` for one mode. All modes serve the same target."""
    flags = ["--model-path", str(models.target), "--served-model-name", "demo"]
    drafter = ["--speculative-draft-model-path", str(models.drafter), *MODEL_TREE_FLAGS]
    if mode == "plain":
        return flags
    if mode == "eagle3":
        return [*flags, "--speculative-algorithm", "EAGLE3", *drafter]
    if mode == "ngram":
        return [
            *(*flags, "--speculative-algorithm", "NGRAM"),
            *("--speculative-num-draft-tokens", "16"),
        ]
    assert mode in HVD_MODES, f"mode {mode} is not an HVD policy"
    return [
        *(*flags, "--speculative-algorithm", "HVD", *drafter),
        *("--hvd-policy", mode, "--hvd-predictor", str(models.predictor)),
        *("--hvd-report-cycles", "true"),
    ]
