"""The modes of decoding that the demo compares, each as the flags of one SGLang server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, get_args

from sglang_hvd.config import PAPER_SETTINGS, HvdConfig, Policy, option
from sglang_hvd.demo.models import DemoModels

# plain: target only. eagle3, ngram: SGLang's own. model to allocate: HVD under that policy.
# The last three draft from the paper's suffix cache. suffix: SuffixDecoding; the server loads the
# model drafter, because HVD needs one, and never runs it. frequency-paper, hvd-paper: the paper's
# rule-based hybrid, and its method. eagle3-adaptive: SGLang's EAGLE3, which adapts the number of
# draft steps to what is accepted.
Mode = Literal[
    "plain",
    "eagle3",
    "ngram",
    "model",
    "cache",
    "frequency",
    "payoff",
    "both",
    "allocate",
    "suffix",
    "frequency-paper",
    "hvd-paper",
    "eagle3-adaptive",
]
MODES: tuple[Mode, ...] = get_args(Mode)
# The policies of modes that are HVD under the paper's settings.
PAPER_MODES: Mapping[Mode, Policy] = {
    "suffix": "cache",
    "frequency-paper": "frequency",
    "hvd-paper": "payoff",
}
# SGLang cannot serve these on a CPU.
GPU_MODES: tuple[Mode, ...] = ("eagle3-adaptive",)
HVD_MODES: tuple[Mode, ...] = (*get_args(Policy), *PAPER_MODES)
# Those that "all" means. Each is a server, and the paper's are for comparison with the paper.
COMMON_MODES: tuple[Mode, ...] = tuple(
    mode for mode in MODES if mode not in (*PAPER_MODES, *GPU_MODES)
)
DEFAULT_MODES: tuple[Mode, ...] = ("plain", "eagle3", HvdConfig().policy)

# The draft tree of both SGLang's EAGLE3 and HVD's model drafter. On a CPU the paper's 8 steps cost
# more time than their tokens save.
MODEL_TREE_FLAGS = (
    *("--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "16"),
)

# SGLang adapts chains only; with a tree it warns and does not adapt. It begins with three steps.
_ADAPTIVE_FLAGS = (
    *("--speculative-adaptive", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)


def server_flags(mode: Mode, models: DemoModels) -> list[str]:
    """Flags of `python -m sglang.launch_server` for one mode. All modes serve the same target."""
    flags = ["--model-path", str(models.target), "--served-model-name", "demo"]
    drafter = ["--speculative-draft-model-path", str(models.drafter), *MODEL_TREE_FLAGS]
    if mode == "plain":
        return flags
    if mode == "eagle3":
        return [*flags, "--speculative-algorithm", "EAGLE3", *drafter]
    if mode == "eagle3-adaptive":
        return [*flags, "--speculative-algorithm", "EAGLE3", *drafter, *_ADAPTIVE_FLAGS]
    if mode == "ngram":
        return [
            *(*flags, "--speculative-algorithm", "NGRAM"),
            *("--speculative-num-draft-tokens", "16"),
        ]
    assert mode in HVD_MODES, f"mode {mode} is not of HVD"
    flags += ["--speculative-algorithm", "HVD", *drafter, "--hvd-report-cycles", "true"]
    if mode in PAPER_MODES:
        settings = HvdConfig.model_validate(PAPER_SETTINGS).for_policy(PAPER_MODES[mode])
        return [*flags, *_flags_of(settings)]
    return [*flags, "--hvd-policy", mode, "--hvd-predictor", str(models.predictor)]


def _flags_of(config: HvdConfig) -> list[str]:
    """The flags of the settings that were given."""
    flags = []
    for name in sorted(config.model_fields_set):
        flags += option(name, json.dumps(getattr(config, name), default=str).strip('"')).split()
    return flags
