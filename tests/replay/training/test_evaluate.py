"""How predictors are judged on walks."""

from pathlib import Path

import numpy as np
import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.replay.core.model_drafter import ModelDrafter
from sglang_hvd.replay.core.recording_walk import RecordingWalk
from sglang_hvd.replay.core.walk import WalkSettings
from sglang_hvd.replay.training.evaluate import judge, judging_walks
from sglang_hvd.traces.writer import TraceWriter
from tests.payoff.made_up import constant_survival, linear
from tests.replay.made_up import rows, walk, walked
from tests.traces.made_up import trace


def test_the_mean_calibration_leaves_out_families_without_a_curve() -> None:
    def family(name: str, num_drafts: int, accepted: int) -> RecordingWalk:
        return walk(name, rows([accepted] * num_drafts), num_cycles=num_drafts, num_cache=0)

    # Every draft is predicted to reach the threshold with probability .5 ** 6.
    few, many = family("few", 4, 0), family("many", 100, 31)
    for walks in ([few, many], [many, few]):
        evaluations = judge(walks, {"half": constant_survival(0.5)}, cache_mode="votes", at="cycle")
        [mean] = [e for e in evaluations if (e.file, e.predictor) == ("mean", "half")]
        assert mean.quality.calibration_error == pytest.approx(1 - 0.5**6)


def test_drafts_that_a_cut_text_hides_are_not_judged(number_tokenizer: Path) -> None:
    recorded = number_tokenizer.with_name("cut.hvdt")
    unknown = {"model": "", "tokenizer_fingerprint": ""}
    random = np.random.default_rng(0)
    with TraceWriter(recorded, **unknown) as writer:
        for session in range(4):
            prompt = random.permutation(199)[:100]
            copied = prompt[10:50]  # every draft is right, as far as the text goes
            writer.write(
                trace(prompt, copied, session=str(session), family="f", is_cut=True, **unknown)
            )
    every_token = WalkSettings(HvdConfig(policy="model"), model_drafter=ModelDrafter(0))
    [recording] = walked(recorded, number_tokenizer, every_token)
    seen, judged = recording.rows(), recording.judged_rows()
    assert seen is not None
    assert judged is not None
    assert len(judged) == len(seen) - 4 * 5
    # A predictor that selects all drafts of six tokens or more is never wrong.
    by_length = {"by length": linear({"draft_len": 1})}
    for evaluation in judge([recording], by_length, cache_mode="votes", at="position"):
        assert evaluation.quality.num_drafts == len(judged)
        if evaluation.predictor == "by length":
            assert evaluation.quality.precision == evaluation.quality.average_precision == 1


def test_predictors_are_judged_uncorrected() -> None:
    assert HvdConfig().calibrate
    walks = judging_walks(HvdConfig(), without=frozenset())
    assert not any(settings.config.calibrate for settings in walks.values())
