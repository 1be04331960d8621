"""How well the shipped predictors rank cache drafts at cycle starts, by the policy that serves.

    python -m benchmarks.experiments.deciders --traces DIR --tokenizer FILE
        [--cache-mode votes|paper] [--json FILE]

The predictors are judged as by `sglang-hvd evaluate`, averaged over families, on sessions that they
were not trained on. The policy decides where cycles start: one that verifies good drafts has few
cycles inside a copy, where it is easy to predict that the copy continues. `allocate` uses the costs
that ship, at batch size 1.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import run, write_rows
from benchmarks.experiments.options import replay_options
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.costs import StepCosts
from sglang_hvd.payoff.predictor import shipped_predictors
from sglang_hvd.replay.core.recordings import MEAN, TraceTokenizer, find_recordings
from sglang_hvd.replay.core.walk import WalkSettings, walk_recordings
from sglang_hvd.replay.training.evaluate import judge, nothing_to_judge, trained_sessions
from sglang_hvd.replay.training.tables import markdown_table

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
    options = replay_options("experiments.deciders", "Average precision by policy.", arguments)
    recordings = find_recordings(options.traces)
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    mode = options.cache_mode
    predictors = shipped_predictors(mode)
    without, costs = trained_sessions(predictors), StepCosts.load(_COSTS)
    rows = []
    lines = []
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
        lines.append(
            {
                "policy": decider,
                "drafts": means[0].quality.num_drafts,
                "oracle share": means[0].quality.oracle_share,
                **{each.predictor: each.quality.average_precision for each in means},
            }
        )
        rows += [{"decides": decider, **each.row()} for each in means]
    print(markdown_table({name: name for name in lines[0]}, lines))
    write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    run(main)
