"""Compares the gate that weighs both predictions with fixed thresholds, for several model drafters.

    python -m benchmarks.experiments.gate --traces DIR --tokenizer FILE [--cache-mode votes|paper]
        [--json FILE]

Sessions that the shipped predictor was trained on fill the shared cache and are not counted. The
model drafters are simulated (sglang_hvd/replay/core/model_drafter.py). Times are for batch size 1,
in milliseconds. They are derived for an 8B model in 16 bits from an H100's memory bandwidth (16 GB
at 3.35 TB/s for a target step), with eight rounds of a one-layer drafter; they are not measured.
"""

from collections.abc import Sequence

from benchmarks.command import run, write_rows
from benchmarks.experiments.options import replay_options
from sglang_hvd.config import HvdConfig
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff import DEFAULT_PREDICTORS, AcceptancePredictor
from sglang_hvd.replay.core.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.replay.core.recordings import (
    NOTHING_LEFT,
    TraceTokenizer,
    find_recordings,
    mean_over_families,
)
from sglang_hvd.replay.core.walk import WalkSettings, walk_recordings
from sglang_hvd.replay.training.tables import markdown_table

# All widths have equal verification costs, so that only the choice of the draft matters.
COSTS = StepCosts(
    about="8B in 16 bits on an H100 at batch size 1, by memory bandwidth",
    batch_sizes=(1, 2),
    widths=(1, 2, 3),
    verify=((4.8, 5.2, 5.2), (4.8, 5.2, 5.2)),
    draft_round=(2.0 / 7, 2.0 / 7),
    draft_extend=((0.3, 0.3, 0.3), (0.3, 0.3, 0.3)),
)

_DRAFTERS = {
    "0.75, correlated": ModelDrafter(0.75, ODDS_RATIOS["correlated"]),
    "2.2, independent": ModelDrafter(2.2, ODDS_RATIOS["independent"]),
    "2.2, correlated": ModelDrafter(2.2, ODDS_RATIOS["correlated"]),
    "4.2, correlated": ModelDrafter(4.2, ODDS_RATIOS["correlated"]),
}

_MODEL_ONLY = "model drafter only"
_THRESHOLDS: tuple[str | float | None, ...] = (_MODEL_ONLY, None, 1.0, 2.0, 3.0, 4.5, 6.0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = replay_options("experiments.gate", "Compare gates of the payoff policy.", arguments)
    recordings = find_recordings(options.traces)
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    trained_on = AcceptancePredictor.load(DEFAULT_PREDICTORS[options.cache_mode]).trained_sessions
    rows = []
    for drafter_name, drafter in _DRAFTERS.items():
        for threshold in _THRESHOLDS:
            is_model_only = threshold == _MODEL_ONLY
            config = HvdConfig(
                policy="model" if is_model_only else "payoff",
                cache_mode=options.cache_mode,
                threshold=threshold if isinstance(threshold, float) else None,
            )
            walks = walk_recordings(
                recordings,
                tokenizer,
                WalkSettings(config, model_drafter=drafter, costs=COSTS),
                label=f"{drafter_name}: {threshold}",
                num_processes=2,
            )
            found = [(walk.family, walk.excluding(trained_on).totals()) for walk in walks]
            if not any(totals.num_cycles for _, totals in found):
                raise ValueError(NOTHING_LEFT)
            cycles, share, speed = (
                mean_over_families((family, getattr(totals, name)) for family, totals in found)
                for name in ("cycles_per_1k_tokens", "cache_share", "tokens_per_ms")
            )
            rows.append(
                {
                    "model_drafter": drafter_name,
                    "gate": "the better prediction" if threshold is None else str(threshold),
                    "cycles_per_1k_tokens": cycles,
                    "cache_share": share,
                    "tokens_per_ms": speed,
                }
            )
    columns = {
        "model_drafter": "model drafter",
        "gate": "gate",
        "cycles_per_1k_tokens": "cycles per 1K tokens",
        "cache_share": "cache share",
        "tokens_per_ms": "tokens per ms",
    }
    print(markdown_table(columns, rows, num_labels=2))
    write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    run(main)
