"""A predictor that is right is left alone, one that is wrong is moved, within bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from sglang_hvd.payoff.calibration import (
    ORIGINS,
    FallbackChange,
    OnlineCalibration,
    Reliability,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.payoff.predictor import Prediction
from sglang_hvd.suffix_cache.token_ids import padded
from sglang_hvd.types import MATCH_COLUMNS, DraftBatch
from tests.payoff.calibration_oracle import MAX_SHIFT, NUM_BINS, Origin

Float64 = npt.NDArray[np.float64]
PROMPT, OUTPUT, SHARED = range(3)
THRESHOLD = 6.0
RIGHT, WRONG = 7, 8  # first tokens: drafts begin with RIGHT


def logit(probs: Float64) -> Float64:
    with np.errstate(divide="ignore"):
        return np.log(probs) - np.log1p(-probs)


def sigmoid(values: Float64) -> Float64:
    return 1 / (1 + np.exp(-values))


@dataclass(frozen=True)
class Drafts:
    """hazards: float64[num, MAX_DRAFT_LEN], predicted probability that a token is accepted if its
    predecessors are."""

    hazards: Float64
    lens: npt.NDArray[np.int32]
    origins: npt.NDArray[np.intp]

    @property
    def prediction(self) -> Prediction:
        acceptance = np.cumprod(self.hazards, axis=1)
        acceptance[np.arange(MAX_DRAFT_LEN) >= self.lens[:, None]] = 0
        acceptance = acceptance.astype(np.float32)
        return Prediction(acceptance.sum(axis=1), acceptance)

    @property
    def batch(self) -> DraftBatch:
        batch = DraftBatch.of_size(len(self.lens), MAX_DRAFT_LEN)
        batch.token_ids[:] = RIGHT
        batch.num_nodes[:] = self.lens
        batch.matches[:, MATCH_COLUMNS.index("origin")] = self.origins
        return batch

    def accepted(self, random: np.random.Generator, hazards: Float64) -> list[int]:
        """What is accepted where each token is with these probabilities."""
        is_missed = random.random(hazards.shape) >= hazards
        is_missed[np.arange(len(self.lens)), np.minimum(self.lens, MAX_DRAFT_LEN - 1)] = True
        return np.minimum(is_missed.argmax(axis=1), self.lens).tolist()


def some_drafts(random: np.random.Generator, num: int = 16) -> Drafts:
    """Good, middling and poor ones, as long as a served draft."""
    level = random.normal(2.5, 1.5, (num, 1))
    return Drafts(
        hazards=sigmoid(level + random.normal(0, 0.7, (num, MAX_DRAFT_LEN))),
        lens=random.integers(1, 32, num).astype(np.int32),
        origins=random.integers(0, len(ORIGINS), num),
    )


def observe(
    calibration: OnlineCalibration,
    slots: npt.NDArray[np.int32],
    drafts: Drafts,
    committed: Sequence[Sequence[int]],
    accepted: Sequence[int | None],
) -> list[FallbackChange]:
    """accepted: tokens of whole drafts; None where a draft was not verified."""
    verified_lens = np.where([a is None for a in accepted], 0, drafts.lens).astype(np.int32)
    of_verified = np.array([a or 0 for a in accepted], np.int32)
    whole = np.full(len(slots), np.nan, np.float32)
    return calibration.observe(slots, *padded(committed), of_verified, verified_lens, whole)


def serve(
    calibration: OnlineCalibration,
    num_cycles: int,
    truth: Callable[[Drafts], Float64],
    *,
    seed: int = 0,
    verifies: Callable[[Prediction], npt.NDArray[np.bool_]] | None = None,
) -> list[FallbackChange]:
    """Cycles of 16 requests each, whose tokens are accepted with the true hazards.

    verifies: which drafts are; default: those whose prediction reaches the threshold.
    """
    random = np.random.default_rng(seed)
    slots = np.arange(16, dtype=np.int32)
    changes = []
    for _ in range(num_cycles):
        drafts = some_drafts(random)
        prediction = calibration.correct(slots, drafts.batch, drafts.prediction)
        is_verified = (
            prediction.accepted_lens >= THRESHOLD if verifies is None else verifies(prediction)
        ).tolist()
        accepted = drafts.accepted(random, truth(drafts))
        token_ids = [[RIGHT] * a + [WRONG] for a in accepted]
        lens = [a if is_v else None for a, is_v in zip(accepted, is_verified, strict=True)]
        changes += observe(calibration, slots, drafts, token_ids, lens)
    return changes


def as_predicted(drafts: Drafts) -> Float64:
    return drafts.hazards


def shifts(calibration: OnlineCalibration) -> list[float]:
    return [figures.shift for figures in calibration.figures().values()]


@pytest.mark.parametrize("seed", range(5))
def test_a_predictor_that_is_right_stays_nearly_uncorrected(seed: int) -> None:
    calibration = OnlineCalibration(THRESHOLD)
    assert serve(calibration, 2000, as_predicted, seed=seed) == []
    assert np.abs(shifts(calibration)).max() < 0.2
    for figures in calibration.figures().values():
        assert figures.num_verified > 2000
        assert figures.mean_predicted == pytest.approx(figures.mean_accepted, rel=0.1)
        assert figures.first_token.share == pytest.approx(
            figures.first_token.mean_predicted, abs=0.06
        )
        full = [b for b in figures.bins if b.weight > 50]
        assert len(full) >= 4
        assert all(b.share == pytest.approx(b.mean_predicted, abs=0.2) for b in full)


@pytest.mark.parametrize("off", [-0.6, 0.6])
def test_the_shift_follows_the_error_in_log_odds(off: float) -> None:
    def truth(drafts: Drafts) -> Float64:
        """Hazards of acceptance probabilities that are all off by this much."""
        acceptance = sigmoid(logit(np.cumprod(drafts.hazards, axis=1)) + off)
        before = np.hstack([np.ones((len(acceptance), 1)), acceptance[:, :-1]])
        return acceptance / before

    calibration = OnlineCalibration(THRESHOLD)
    assert serve(calibration, 5000, truth) == []
    assert shifts(calibration) == pytest.approx([off] * 3, abs=0.2)
    for figures in calibration.figures().values():
        assert figures.mean_predicted == pytest.approx(figures.mean_accepted, rel=0.1)


def test_a_predictor_whose_hazards_are_all_off_is_corrected_on_average() -> None:
    def truth(drafts: Drafts) -> Float64:
        return sigmoid(logit(drafts.hazards) - 0.4)

    calibration = OnlineCalibration(THRESHOLD)
    assert serve(calibration, 5000, truth) == []
    assert max(shifts(calibration)) < -0.2
    for figures in calibration.figures().values():
        assert figures.mean_predicted == pytest.approx(figures.mean_accepted, rel=0.1)


def test_origins_are_corrected_apart() -> None:
    def truth(drafts: Drafts) -> Float64:
        off = np.where(drafts.origins == OUTPUT, -0.6, 0)[:, None]
        return sigmoid(logit(drafts.hazards) + off)

    calibration = OnlineCalibration(THRESHOLD)
    serve(calibration, 3000, truth)
    assert shifts(calibration)[OUTPUT] < -0.4
    assert np.abs([shifts(calibration)[PROMPT], shifts(calibration)[SHARED]]).max() < 0.2


@pytest.mark.parametrize(("hazard", "bound"), [(0.0, -MAX_SHIFT), (1.0, MAX_SHIFT)])
def test_no_shift_goes_beyond_its_bound(hazard: float, bound: float) -> None:
    calibration = OnlineCalibration(THRESHOLD)
    for seed in range(40):
        serve(calibration, 50, lambda drafts: np.full_like(drafts.hazards, hazard), seed=seed)
        assert np.abs(shifts(calibration)).max() <= MAX_SHIFT
    assert shifts(calibration) == [bound] * 3


def test_a_verified_draft_moves_the_shift_as_a_kalman_filter_does() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    hazards = np.full((1, MAX_DRAFT_LEN), 0.5)
    drafts = Drafts(hazards, np.array([8], np.int32), np.array([OUTPUT]))
    slots = np.array([0], np.int32)
    calibration.correct(slots, drafts.batch, drafts.prediction)
    observe(calibration, slots, drafts, [[RIGHT] * 3 + [WRONG]], [3])
    mean = 1 - 0.5**8
    scatter = mean * (1 + mean) * (1 - mean / 8)
    change, variance = scatter / (1 + 2 * mean), 0.25 + 5e-6
    gain = variance * change / (change**2 * variance + 3 * scatter + 0.5)
    assert shifts(calibration) == pytest.approx([0, gain * (3 - mean), 0])


def test_a_predictor_that_is_far_off_is_corrected_within_tens_of_drafts() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    drafts = Drafts(np.full((1, MAX_DRAFT_LEN), 0.8), np.array([8], np.int32), np.array([OUTPUT]))
    slots = np.array([0], np.int32)
    for _ in range(50):  # 3.3 tokens are predicted
        calibration.correct(slots, drafts.batch, drafts.prediction)
        observe(calibration, slots, drafts, [[WRONG]], [0])
    assert shifts(calibration)[1] == -1


def test_a_draft_that_was_not_verified_shows_only_its_first_token() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    random = np.random.default_rng(1)
    drafts = some_drafts(random)
    slots = np.arange(16, dtype=np.int32)
    outcomes = []
    for tokens in ([RIGHT], [RIGHT] * 9):  # nine: as the model drafter's draft may bring
        calibration = OnlineCalibration(THRESHOLD)
        calibration.correct(slots, drafts.batch, drafts.prediction)
        observe(calibration, slots, drafts, [tokens] * 16, [None] * 16)
        outcomes.append(calibration.figures())
    assert outcomes[0] == outcomes[1]
    assert all(f.num_verified == 0 and f.mean_accepted is None for f in outcomes[0].values())
    assert all(f.first_token.share == 1 for f in outcomes[0].values())
    assert min(shifts(calibration)) > 0  # all were right, which was less than certain


@pytest.fixture
def moved() -> OnlineCalibration:
    """Shifts of three kinds: down, none, up."""
    calibration = OnlineCalibration(THRESHOLD)
    drafts = Drafts(np.full((2, MAX_DRAFT_LEN), 0.8), np.full(2, 8, np.int32), np.array([0, 2]))
    slots = np.arange(2, dtype=np.int32)
    for _ in range(500):
        calibration.correct(slots, drafts.batch, drafts.prediction)
        observe(calibration, slots, drafts, [[WRONG], [RIGHT] * 8], [0, 8])
    assert shifts(calibration) == [-MAX_SHIFT, 0, MAX_SHIFT]
    return calibration


def test_corrected_acceptance_still_falls_with_depth(moved: OnlineCalibration) -> None:
    drafts = some_drafts(np.random.default_rng(3), 500)
    before = drafts.prediction
    after = moved.correct(np.arange(500, dtype=np.int32), drafts.batch, before)
    assert before.acceptance is not None
    assert after.acceptance is not None
    assert (np.diff(after.acceptance, axis=1) <= 0).all()
    assert ((after.acceptance >= 0) & (after.acceptance <= 1)).all()
    assert (after.acceptance[np.arange(MAX_DRAFT_LEN) >= drafts.lens[:, None]] == 0).all()
    np.testing.assert_allclose(after.accepted_lens, after.acceptance.sum(axis=1), rtol=1e-5)
    expected = sigmoid(logit(before.acceptance) + np.array([-1, 0, 1])[drafts.origins, None])
    np.testing.assert_allclose(after.acceptance, expected, rtol=1e-5)


def test_a_shift_of_zero_changes_no_bit(moved: OnlineCalibration) -> None:
    drafts = some_drafts(np.random.default_rng(3))
    rows = drafts.origins == OUTPUT
    after = moved.correct(np.arange(16, dtype=np.int32), drafts.batch, drafts.prediction)
    assert after.accepted_lens[rows].tobytes() == drafts.prediction.accepted_lens[rows].tobytes()
    assert after.accepted_lens[~rows].tobytes() != drafts.prediction.accepted_lens[~rows].tobytes()


def test_a_correction_does_not_depend_on_the_batch(moved: OnlineCalibration) -> None:
    drafts = some_drafts(np.random.default_rng(4))
    whole = moved.correct(np.arange(16, dtype=np.int32), drafts.batch, drafts.prediction)
    for row in range(16):
        one = Drafts(drafts.hazards[[row]], drafts.lens[[row]], drafts.origins[[row]])
        alone = moved.correct(np.array([0], np.int32), one.batch, one.prediction)
        assert alone.accepted_lens.tobytes() == whole.accepted_lens[[row]].tobytes()


def test_equal_calls_give_equal_bits() -> None:
    first, second = OnlineCalibration(THRESHOLD), OnlineCalibration(THRESHOLD)
    for calibration in (first, second):
        serve(calibration, 200, as_predicted)
    assert repr(first.figures()) == repr(second.figures())


def test_reliability_is_kept_by_predicted_probability() -> None:
    calibration = OnlineCalibration(2.5)  # three tokens
    hazards = np.full((2, MAX_DRAFT_LEN), 1.0)
    hazards[:, 2] = (0.25, 0.95)
    drafts = Drafts(hazards, np.array([4, 4], np.int32), np.array([SHARED, SHARED]))
    slots = np.array([5, 2], np.int32)
    calibration.correct(slots, drafts.batch, drafts.prediction)
    observe(calibration, slots, drafts, [[RIGHT] * 2 + [WRONG], [RIGHT] * 3 + [WRONG]], [2, 3])
    bins = calibration.figures()["shared"].bins
    assert len(bins) == NUM_BINS
    assert (bins[2].mean_predicted, bins[2].share) == pytest.approx((0.25, 0))
    assert (bins[9].mean_predicted, bins[9].share) == pytest.approx((0.95, 1))
    assert sum(b.weight for b in bins) == 2
    assert [b.share for i, b in enumerate(bins) if i not in (2, 9)] == [None] * 8


def test_old_outcomes_are_forgotten() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    serve(calibration, 1000, lambda drafts: sigmoid(logit(drafts.hazards) - 0.3))
    before = calibration.figures()["prompt"]
    serve(calibration, 3000, lambda drafts: sigmoid(logit(drafts.hazards) + 0.3))
    after = calibration.figures()["prompt"]
    assert before.mean_accepted is not None
    assert after.mean_accepted is not None
    assert after.mean_accepted > before.mean_accepted + 1
    assert all(b.weight < 1001 for b in after.bins)


def test_a_predictor_of_bare_lengths_is_measured_and_not_corrected() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    drafts = some_drafts(np.random.default_rng(5))
    lengths = Prediction(np.full(16, 8, np.float32), None)
    slots = np.arange(16, dtype=np.int32)
    for _ in range(5):
        assert calibration.correct(slots, drafts.batch, lengths) is lengths
        observe(calibration, slots, drafts, [[WRONG]] * 16, [0] * 16)
    for figures in calibration.figures().values():
        assert (figures.mean_predicted, figures.mean_accepted) == pytest.approx((8, 0))
        assert figures.shift == figures.first_token.weight == 0
        assert {of_bin.weight for of_bin in figures.bins} == {0}


@pytest.mark.parametrize("factor", [0.2, 0.45, 0.55, 1.0, 1.9, 2.2, 5.0])
@pytest.mark.parametrize(("predicted", "one_in", "num_cycles"), [(10, 2, 200), (1, 10, 400)])
def test_the_fallback_starts_where_twice_or_half_of_the_prediction_is_accepted(
    predicted: int, one_in: int, num_cycles: int, factor: float
) -> None:
    calibration = OnlineCalibration(THRESHOLD)
    lengths = Prediction(np.array([predicted], np.float32), None)
    drafts = Drafts(np.ones((1, MAX_DRAFT_LEN)), np.array([64], np.int32), np.array([SHARED]))
    slots = np.array([0], np.int32)
    accepted = round(predicted * factor * one_in)  # and none of the others
    for cycle in range(num_cycles):
        calibration.correct(slots, drafts.batch, lengths)
        num = accepted if cycle % one_in == one_in - 1 else 0
        changes = observe(calibration, slots, drafts, [[RIGHT] * num + [WRONG]], [num])
        if changes:
            assert cycle > 100  # not before a hundred drafts
            break
    is_off = not 0.5 <= factor <= 2
    assert any(calibration.native.are_fallback()) == is_off
    assert [f.is_fallback for f in calibration.figures().values()] == [False, False, is_off]
    assert calibration.native.are_fallback()[SHARED] == is_off
    if is_off:
        [change] = changes
        assert (change.origin, change.is_fallback) == ("shared", True)
        assert change.mean_predicted == pytest.approx(predicted)


def test_chance_does_not_start_the_fallback() -> None:
    # One draft in twelve has 2.5 tokens accepted in the mean, the others none: in a fifth of such
    # runs they bring half or twice of the mean at some time.
    mean, random = 0.2, np.random.default_rng(5)
    drafts = Drafts(np.ones((1, MAX_DRAFT_LEN)), np.array([64], np.int32), np.array([SHARED]))
    slots, lengths = np.array([0], np.int32), Prediction(np.array([mean], np.float32), None)
    for _ in range(50):
        calibration = OnlineCalibration(THRESHOLD)
        for num in (random.random(400) < 0.08) * random.geometric(1 / 2.5, size=400):
            calibration.correct(slots, drafts.batch, lengths)
            observe(calibration, slots, drafts, [[RIGHT] * num + [WRONG]], [int(num)])
        assert not any(calibration.native.are_fallback())


def test_the_fallback_ends_when_the_figures_are_right_again() -> None:
    calibration = OnlineCalibration(THRESHOLD)

    def all_of_them(prediction: Prediction) -> npt.NDArray[np.bool_]:
        return prediction.accepted_lens >= 0

    def far_off(drafts: Drafts) -> Float64:
        return sigmoid(logit(drafts.hazards) - 3)

    on = serve(calibration, 400, far_off, verifies=all_of_them)
    assert {change.origin for change in on} == set(ORIGINS)
    assert all(change.is_fallback for change in on)
    assert all(change.mean_accepted * 2 < change.mean_predicted for change in on)
    off = serve(calibration, 2000, as_predicted, verifies=all_of_them)
    assert [change.origin for change in off if not change.is_fallback] == [c.origin for c in off]
    assert {change.origin for change in off} == set(ORIGINS)
    assert not any(calibration.native.are_fallback())


def test_a_predictor_that_stays_wrong_stays_in_fallback() -> None:
    calibration = OnlineCalibration(THRESHOLD)

    def far_off(drafts: Drafts) -> Float64:
        return sigmoid(logit(drafts.hazards) - 3)

    serve(calibration, 400, far_off)
    assert any(calibration.native.are_fallback())
    changes = serve(calibration, 2000, far_off, verifies=lambda p: p.accepted_lens >= 2)
    assert not any(not change.is_fallback for change in changes)


def test_a_predictor_of_which_nothing_is_verified_any_more_is_put_to_the_test_again() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    serve(calibration, 400, lambda drafts: sigmoid(logit(drafts.hazards) - 3))
    assert any(calibration.native.are_fallback())

    def nothing(prediction: Prediction) -> npt.NDArray[np.bool_]:
        return np.zeros(len(prediction.accepted_lens), np.bool_)

    changes = serve(calibration, 4000, as_predicted, verifies=nothing)
    assert {change.is_fallback for change in changes} == {False}
    assert not any(calibration.native.are_fallback())


def test_each_trial_that_fails_makes_the_next_wait_twice_as_long() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    trials: list[int] = []
    for cycle in range(15_000):
        # All drafts while the predictor decides, none of an origin in fallback.
        changes = serve(
            calibration,
            1,
            lambda drafts: sigmoid(logit(drafts.hazards) - 3),
            seed=cycle,
            verifies=lambda prediction: np.full(
                len(prediction.accepted_lens), not calibration.figures()[ORIGINS[0]].is_fallback
            ),
        )
        trials += [cycle for c in changes if c.origin == ORIGINS[0] and not c.is_fallback]
    waits = np.diff([0, *trials])
    assert len(waits) == 3
    assert waits[1:] == pytest.approx(2 * waits[:-1], rel=0.1)


def test_a_slot_without_a_prediction_teaches_nothing() -> None:
    calibration = OnlineCalibration(THRESHOLD)
    drafts = some_drafts(np.random.default_rng(6), 2)
    slots = np.array([3, 9], np.int32)
    observe(calibration, slots, drafts, [[RIGHT]] * 2, [1, 1])  # before any was predicted
    calibration.correct(slots, drafts.batch, drafts.prediction)
    observe(calibration, slots, drafts, [[WRONG], []], [0, None])  # the second committed nothing
    observe(calibration, slots, drafts, [[WRONG]] * 2, [0, 0])  # observed already
    assert sum(f.num_verified for f in calibration.figures().values()) == 1


@pytest.mark.parametrize(
    ("off", "num_cycles", "share_verified"), [(-3, 1500, 0.8), (0, 1500, 0.8), (-3, 8000, 0.01)]
)
def test_it_is_what_the_rules_say(off: float, num_cycles: int, share_verified: float) -> None:
    calibration, oracle = OnlineCalibration(THRESHOLD), [Origin() for _ in ORIGINS]
    random, slots = np.random.default_rng(7), np.arange(16, dtype=np.int32)
    depth, num_changes = int(THRESHOLD), 0
    for cycle in range(num_cycles):
        drafts = some_drafts(random)
        prediction = calibration.correct(slots, drafts.batch, drafts.prediction)
        assert prediction.acceptance is not None
        accepted = drafts.accepted(random, sigmoid(logit(drafts.hazards) + off))
        committed = [[RIGHT] * num + [WRONG] for num in accepted]
        # All of a draft, a part of it, or nothing. A part's prediction is the sum over its tokens.
        share = 0.8 if cycle < 40 else share_verified  # of few, a trial comes before they tell
        verified_lens = np.minimum(random.integers(1, 40, 16), drafts.lens).astype(np.int32)
        verified_lens[random.random(16) >= share] = 0
        of_part = np.minimum(accepted, verified_lens).astype(np.int32)
        sums = np.cumsum(prediction.acceptance, axis=1)
        expected = sums[np.arange(16), np.maximum(verified_lens, 1) - 1]
        changes = calibration.observe(slots, *padded(committed), of_part, verified_lens, expected)
        wanted = []
        for row, origin in enumerate(drafts.origins.tolist()):
            of_verified = int(of_part[row]), int(verified_lens[row]), float(expected[row])
            change = oracle[origin].observe(
                first_prob=float(prediction.acceptance[row, 0]),
                threshold_prob=float(prediction.acceptance[row, depth - 1]),
                draft_len=int(drafts.lens[row]),
                depth=depth,
                is_first_right=accepted[row] > 0,
                verified=of_verified if verified_lens[row] else None,
            )
            if change is not None:
                wanted.append(FallbackChange(ORIGINS[origin], *change))
        assert changes == wanted
        num_changes += len(changes)
    for figures, of_origin in zip(calibration.figures().values(), oracle, strict=True):
        assert figures.num_verified == of_origin.num_verified
        assert figures.is_fallback == of_origin.is_fallback
        assert figures.shift == of_origin.shift
        assert (figures.mean_predicted, figures.mean_accepted) == of_origin.verified.means[:2]
        assert figures.first_token == Reliability(*of_origin.first_tokens.means)
        assert figures.bins == tuple(Reliability(*sums.means) for sums in of_origin.bins)
    assert num_changes == {(-3, 0.8): 3, (0, 0.8): 0, (-3, 0.01): 12}[off, share_verified]
