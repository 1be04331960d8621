"""The gate that compares both predictions against fixed thresholds, with several model drafters.

    python -m benchmarks.payoff.gate --traces DIR --tokenizer FILE [--cache-mode votes|paper]
        [--json FILE]

Sessions that the shipped predictor was trained on fill the shared cache and are not counted. The
model drafters are simulated: see sglang_hvd/replay/model_drafter.py. Times at batch size 1, in
milliseconds, as an 8B model in 16 bits has them on an H100 by its memory bandwidth (16 GB at 3.35
TB/s for a step of the target) with eight rounds of a one-layer drafter; they are not measured.
"""

from collections.abc import Sequence

from benchmarks.command import run, write_rows
from benchmarks.payoff.options import replay_options
from sglang_hvd.allocation import StepCosts
from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import DEFAULT_PREDICTORS, AcceptancePredictor
from sglang_hvd.replay.metrics import mean_over_families
from sglang_hvd.replay.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.replay.recordings import find_recordings
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.replay.trained_on import NOTHING_LEFT
from sglang_hvd.replay.walk import WalkSettings, walk_recordings

# A verification costs the same at every width here: only the choice of the draft is looked at.
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
    options = replay_options("payoff.gate", "Gates of the payoff policy.", arguments)
    recordings = find_recordings(options.traces)
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    trained_on = AcceptancePredictor.load(DEFAULT_PREDICTORS[options.cache_mode]).trained_sessions
    rows = []
    print("| model drafter | gate | cycles per 1K tokens | cache share | tokens per ms |")
    print("|---|---|---|---|---|")
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
            gate = "the better prediction" if threshold is None else str(threshold)
            print(
                f"| {drafter_name} | {gate} | {cycles:.1f} | {share:.3f} | {speed:.3f} |",
                flush=True,
            )
            rows.append(
                {
                    "model_drafter": drafter_name,
                    "gate": gate,
                    "cycles_per_1k_tokens": cycles,
                    "cache_share": share,
                    "tokens_per_ms": speed,
                }
            )
    write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    run(main)
