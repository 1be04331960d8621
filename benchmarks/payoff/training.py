"""Time to train a predictor on a million drafts.

    python -m benchmarks.payoff.training [--rows N]

The rows are made up. Only their number matters for the time, and the number of tokens with a known
label, which is as in recorded traces (three accepted tokens on average).
"""

import time

import numpy as np

from benchmarks.command import parser_of, run
from sglang_hvd.commands.arguments import count
from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import FEATURE_NAMES, POSITION_FEATURES
from sglang_hvd.payoff.predictor import feature_settings
from sglang_hvd.replay.core.training_rows import Lessons, TrainingRows
from sglang_hvd.replay.training.fit import TrainingSettings, train

_DRAFT_LEN = 31
_MEAN_ACCEPTED = 3
_TARGET_S = 120


def main() -> int:
    parser = parser_of("payoff.training", "Measure the time to train a predictor.")
    parser.add_argument("--rows", type=count, default=1_000_000)
    options = parser.parse_args()
    lessons = Lessons.of(_rows(options.rows))
    start = time.perf_counter()
    train(lessons, kind="survival", feature_settings=feature_settings(HvdConfig()), provenance={})
    seconds = time.perf_counter() - start
    num_epochs = TrainingSettings().num_epochs(options.rows)
    print(
        f"{options.rows} rows, {num_epochs} epochs: {seconds:.1f} s "
        f"(target for a million rows: {_TARGET_S} s)"
    )
    return 0


def _rows(num_rows: int) -> TrainingRows:
    random = np.random.default_rng(1)
    accepted = random.geometric(1 / (1 + _MEAN_ACCEPTED), num_rows) - 1
    accepted_lens = np.minimum(accepted, _DRAFT_LEN).astype(np.int32)
    return TrainingRows(
        features=random.standard_normal((num_rows, len(FEATURE_NAMES)), np.float32),
        positions=random.standard_normal(
            (num_rows, _DRAFT_LEN, len(POSITION_FEATURES)), np.float32
        ),
        draft_lens=np.full(num_rows, _DRAFT_LEN, np.int32),
        accepted_lens=accepted_lens,
        is_verified=np.ones(num_rows, np.bool_),
        is_worth_known=np.ones(num_rows, np.bool_),
    )


if __name__ == "__main__":
    run(main)
