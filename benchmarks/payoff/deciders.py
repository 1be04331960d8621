"""How well what ships ranks cache drafts at cycle starts, by who decides where cycles start.

    python -m benchmarks.payoff.deciders --traces DIR --tokenizer FILE [--cache-mode votes|paper]
        [--json FILE]

As `sglang-hvd evaluate` judges, in the mean over families, on sessions that the predictors were not
trained on. A policy that verifies good drafts has few cycles that start inside a copy, where it is
easy to know that the copy goes on. `allocate` decides by the costs that ship, at batch size 1.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import run, write_rows
from benchmarks.payoff.options import replay_options
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff.predictor import shipped_predictors
from sglang_hvd.replay.evaluate import judge, nothing_to_judge, trained_sessions
from sglang_hvd.replay.recordings import MEAN, find_recordings
from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.replay.walk import WalkSettings, walk_recordings

_DECIDERS = {
    "model drafter always": HvdConfig(policy="model"),
    "frequency": HvdConfig(policy="frequency"),
    "payoff, threshold 6": HvdConfig(policy="payoff", threshold=PAPER_THRESHOLD),
    "payoff": HvdConfig(policy="payoff"),
    "allocate": HvdConfig(policy="allocate"),
    "cache always": HvdConfig(policy="cache"),
}
_COSTS = Path(__file__).parents[2] / "configs/costs/llama-3.1-8b-h100.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    options = replay_options("payoff.deciders", "Average precision by who decides.", arguments)
    recordings = find_recordings(options.traces)
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    mode = options.cache_mode
    predictors = shipped_predictors(mode)
    without, costs = trained_sessions(predictors), StepCosts.load(_COSTS)
    rows = []
    print("| who decides | drafts | oracle share | default | mlp | frequency |")
    print("|---|---|---|---|---|---|")
    for decider, of_decider in _DECIDERS.items():
        config = of_decider.model_copy(update={"cache_mode": mode, "calibrate": False})
        walks = walk_recordings(
            recordings,
            tokenizer,
            WalkSettings(config, without=without, costs=costs),
            label=decider,
            num_processes=2,
        )
        judged = judge(walks, predictors, cache_mode=mode, at="cycle")
        means = [each for each in judged if each.file == MEAN]
        if not means:
            raise nothing_to_judge([walk.excluding(without) for walk in walks])
        quality = means[0].quality
        cells = [_figure(each.quality.average_precision) for each in means]
        print(
            f"| {decider} | {quality.num_drafts} | {_figure(quality.oracle_share)} | "
            f"{' | '.join(cells)} |",
            flush=True,
        )
        rows += [{"decides": decider, **each.row()} for each in means]
    write_rows(options.json, rows)
    return 0


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    run(main)
