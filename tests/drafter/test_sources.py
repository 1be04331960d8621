"""The drafter's predictor is corrected, distrusted and replaced while requests run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.drafter import ChainPrediction, HybridDrafter
from sglang_hvd.payoff import AcceptancePredictor, TokenClasses
from sglang_hvd.payoff.predictor import feature_settings
from sglang_hvd.replay.core.single_cycles import (
    DraftPlan,
    VerifyOutcome,
    outcome_batch,
    single_plans,
)
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import MODEL_ONLY
from tests.payoff.made_up import constant_survival, random_predictor

CLASSES = TokenClasses.from_strings([chr(33 + token) for token in range(60)])

# With a 3 after it the prompt begins again, and so does the draft.
PROMPT = [*range(1, 18), 0, 1, 2]
DRAFT = [*range(4, 18), 0, 1, 2, 3, *range(4, 17)]


SURE, UNSURE = constant_survival(0.99), constant_survival(0.5)


def drafter(
    predictor: AcceptancePredictor = SURE, *, policy: Policy = "payoff", **settings: object
) -> HybridDrafter:
    config = HvdConfig(policy=policy, **settings)  # type: ignore[arg-type]
    return HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, deterministic=True),
        predictor=predictor if config.predicts else None,
        token_classes=CLASSES,
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=len(DRAFT) + 1,
    )


def cycle(made: HybridDrafter, *, num_right: int) -> DraftPlan:
    """A new request plans its first cycle, and so many tokens of its draft are right."""
    rid = object()
    made.start(rid, PROMPT)
    made.extend(rid, [3])
    [plan] = single_plans(made.plan([rid]))
    num_accepted = num_right if plan.source == "cache" else 0
    committed = [*DRAFT[:num_accepted], 0 if num_right == num_accepted else DRAFT[0]]
    made.commit([rid], outcome_batch([VerifyOutcome(committed, num_accepted)]))
    made.finish(rid, output_ids=None, keep=False)
    return plan


def with_planned_batch() -> HybridDrafter:
    """Requests "a" and "b" verify DRAFT next, "without draft" nothing of the cache's."""
    made = drafter(threshold=1.0)
    for rid in "ab":
        made.start(rid, PROMPT)
        made.extend(rid, [3])
    made.start("without draft", [40])
    made.plan(["a", "without draft", "b"])
    return made


def payoff(plan: DraftPlan) -> float:
    assert plan.predicted_len is not None
    return plan.predicted_len


def test_the_reported_payoff_is_the_corrected_one() -> None:
    made = drafter(threshold=1.0)
    plans = [cycle(made, num_right=7) for _ in range(90)]
    assert all(plan.source == "cache" for plan in plans)
    first, last = payoff(plans[0]), payoff(plans[-1])
    assert first == pytest.approx(sum(0.99**k for k in range(1, 32)), rel=1e-4)
    assert last < first - 0.1
    calibration = made.calibration()
    assert calibration is not None
    figures = calibration["prompt"]
    assert figures.num_verified == 90
    assert figures.mean_accepted == pytest.approx(7)
    assert figures.mean_predicted == pytest.approx(np.mean(list(map(payoff, plans))), rel=0.01)
    assert figures.shift < 0
    assert calibration["shared"].num_verified == calibration["output"].num_verified == 0


@pytest.mark.parametrize(("threshold", "share"), [(4.0, 1), (5.0, 0)])
def test_reliability_is_that_of_reaching_the_threshold(threshold: float, share: float) -> None:
    made = drafter(threshold=threshold)
    for _ in range(5):
        assert cycle(made, num_right=4).source == "cache"
    calibration = made.calibration()
    assert calibration is not None
    assert {of_bin.share for of_bin in calibration["prompt"].bins} == {None, share}


def test_without_calibration_the_payoff_stays_the_predictors() -> None:
    made = drafter(threshold=1.0, calibrate=False)
    assert len({cycle(made, num_right=0).predicted_len for _ in range(150)}) == 1
    assert made.calibration() is None


@pytest.mark.parametrize(("frequency_threshold", "source"), [(1.0, "cache"), (31.0, "model")])
def test_the_frequency_rule_decides_while_the_predictor_is_off(
    frequency_threshold: float, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = drafter(threshold=2.0, frequency_threshold=frequency_threshold)
    sources = [cycle(made, num_right=0).source for _ in range(160)]
    num_verified = 106  # the weight of that many passes a hundred
    assert sources[:num_verified] == ["cache"] * num_verified
    assert sources[num_verified:] == [source] * (160 - num_verified)
    [message] = [record.getMessage() for record in caplog.records]
    assert "origin prompt" in message
    assert "0.00 accepted" in message
    assert "The predictor is wrong and is ignored for them" in message
    calibration = made.calibration()
    assert calibration is not None
    assert {name: f.is_fallback for name, f in calibration.items()} == {
        "prompt": True,
        "output": False,
        "shared": False,
    }


def test_drafts_of_another_origin_are_still_the_predictors_to_decide() -> None:
    made = drafter(threshold=2.0, frequency_threshold=31.0)
    for _ in range(120):
        cycle(made, num_right=0)
    assert cycle(made, num_right=0).source == "model"
    made.start("r", [0])
    made.extend("r", PROMPT)  # the match lies in the output
    made.extend("r", [3])
    [plan] = single_plans(made.plan(["r"]))
    assert plan.source == "cache"


def test_the_predictor_decides_again_when_it_is_right_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = drafter(threshold=2.0, frequency_threshold=0.0)
    for _ in range(120):
        cycle(made, num_right=0)
    for _ in range(600):
        cycle(made, num_right=len(DRAFT))
    assert ["The predictor is " in record.message for record in caplog.records] == [True, True]
    assert "right again" in caplog.records[1].message
    calibration = made.calibration()
    assert calibration is not None
    assert not calibration["prompt"].is_fallback


def test_outcomes_belong_to_their_requests_in_any_order() -> None:
    made = with_planned_batch()
    made.commit(
        ["b", "without draft"],
        outcome_batch([VerifyOutcome([*DRAFT[:8], 0], 8), VerifyOutcome([41], 0)]),
    )
    calibration = made.calibration()
    assert calibration is not None
    assert calibration["prompt"].num_verified == 1
    assert calibration["prompt"].mean_accepted == 8
    made.commit(["a"], outcome_batch([VerifyOutcome([*DRAFT[:4], 0], 4)]))
    assert (made.calibration() or {})["prompt"].mean_accepted == pytest.approx(6, abs=0.01)


def test_a_whole_batch_may_be_committed_in_another_order() -> None:
    made = with_planned_batch()
    of_drafts = [VerifyOutcome([*DRAFT[:num], 0], num) for num in (8, 4)]
    made.commit(["without draft", "b", "a"], outcome_batch([VerifyOutcome([41], 0), *of_drafts]))
    figures = (made.calibration() or {})["prompt"]
    assert (figures.num_verified, figures.mean_accepted) == (2, pytest.approx(6, abs=0.01))


def test_a_text_that_ends_inside_its_draft_had_no_more_of_it() -> None:
    made = drafter(threshold=1.0)
    made.start("r", PROMPT)
    made.extend("r", [3])
    made.plan(["r"])
    made.commit(["r"], outcome_batch([VerifyOutcome(DRAFT[:2], 2)]))
    figures = (made.calibration() or {})["prompt"]
    assert (figures.num_verified, figures.mean_accepted) == (1, 2)
    assert figures.first_token.share == 1


def test_equal_calls_give_equal_plans() -> None:
    first, second = drafter(threshold=3.0), drafter(threshold=3.0)
    for num_right in np.random.default_rng(0).integers(0, 6, 300).tolist():
        one, other = cycle(first, num_right=num_right), cycle(second, num_right=num_right)
        assert (one.source, one.predicted_len) == (other.source, other.predicted_len)


def test_another_predictor_takes_over_from_the_next_plan_on_and_starts_uncorrected() -> None:
    made = drafter(threshold=1.0)
    for _ in range(50):
        cycle(made, num_right=0)
    made.start("running", PROMPT)
    made.extend("running", [3])
    [before] = single_plans(made.plan(["running"]))
    made.use_predictor(UNSURE)
    assert made.predictor is UNSURE
    made.commit(
        ["running"], outcome_batch([VerifyOutcome([*DRAFT[:7], 0], 7)])
    )  # of the old one's cycle
    calibration = made.calibration()
    assert calibration is not None
    assert {f.num_verified for f in calibration.values()} == {0}
    assert {f.shift for f in calibration.values()} == {0}
    made.extend("running", PROMPT[:3])
    [after] = single_plans(made.plan(["running"]))
    assert payoff(after) == pytest.approx(1, abs=0.01)  # 1/2 + 1/4 + ...
    assert payoff(before) > 10


def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    made = drafter()
    good, bad, other = (tmp_path / f"{name}.safetensors" for name in ("good", "bad", "other"))
    UNSURE.save(good)
    bad.write_bytes(good.read_bytes()[:-1])
    replace(UNSURE, settings=feature_settings(HvdConfig(history_window=4))).save(other)
    for path, says in (
        (bad, r"bad\.safetensors is corrupt or truncated"),
        (other, r"was trained for history_window 4, the configuration has 8"),
        (tmp_path / "missing", r"missing is not a file"),
    ):
        with pytest.raises(ValueError, match=says) as error:
            made.use_predictor(made.read_predictor(path))
        assert "\n" not in str(error.value)
        assert made.predictor is SURE
    made.use_predictor(made.read_predictor(good))
    assert made.predictor is not None
    assert made.predictor.fingerprint == UNSURE.fingerprint != SURE.fingerprint


def test_a_policy_without_predictor_takes_none(tmp_path: Path) -> None:
    UNSURE.save(tmp_path / "good.safetensors")
    with pytest.raises(ValueError, match=r"^the frequency policy has no predictor to replace$"):
        drafter(policy="frequency").read_predictor(tmp_path / "good.safetensors")


def test_a_request_that_never_verifies_cache_drafts_corrects_nothing() -> None:
    made = drafter(threshold=1.0)
    for _ in range(50):
        rid = object()
        made.start(rid, PROMPT, limits=MODEL_ONLY)
        made.extend(rid, [3])
        made.plan([rid])
        made.commit([rid], outcome_batch([VerifyOutcome([0], 0)]))  # the draft says 4
        made.finish(rid, output_ids=None, keep=False)
    calibration = made.calibration()
    assert calibration is not None
    assert {figures.shift for figures in calibration.values()} == {0}
    cycle(made, num_right=0)
    calibration = made.calibration()
    assert calibration is not None
    assert calibration["prompt"].shift < 0


def test_a_corrected_prediction_does_not_depend_on_the_batch() -> None:
    made = drafter(random_predictor(), threshold=1.0)
    for num_right in np.random.default_rng(0).integers(0, 9, 300).tolist():
        cycle(made, num_right=num_right)
    calibration = made.calibration()
    assert calibration is not None
    assert calibration["prompt"].shift != 0
    rids = list(range(70))
    for rid in rids:
        made.start(rid, [*PROMPT[rid % 15 :], *range(rid % 7), *PROMPT[rid % 15 :]])
        made.extend(rid, [3])
    together = made.propose(rids)
    assert isinstance(together.predicted, ChainPrediction)
    payoffs = together.predicted.prediction.accepted_lens.copy()
    of_model = together.predicted.model_lens.copy()
    assert len(np.unique(payoffs)) > 30
    for rid in rids:
        alone = made.propose([rid]).predicted
        assert isinstance(alone, ChainPrediction)
        assert alone.prediction.accepted_lens.tobytes() == payoffs[rid : rid + 1].tobytes()
        assert alone.model_lens.tobytes() == of_model[rid : rid + 1].tobytes()
