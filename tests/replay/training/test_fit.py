"""Training learns, repeats itself, and stores what it was told."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_hvd._native import NUM_BUCKETS
from sglang_hvd.payoff import POSITION_FEATURES
from sglang_hvd.payoff.predictor import AcceptancePredictor, Kind
from sglang_hvd.replay.core.training_rows import Lessons, TrainingRows
from sglang_hvd.replay.training.fit import JudgedTokens, TrainingSettings, train
from tests.payoff.made_up import random_rows

QUICK = TrainingSettings(
    hidden_sizes=(16,), learning_rate=0.01, batch_size=64, min_epochs=1, max_epochs=4
)


def trained(
    rows: TrainingRows | Lessons, settings: TrainingSettings = QUICK, kind: Kind = "survival"
) -> AcceptancePredictor:
    lessons = Lessons.of(rows) if isinstance(rows, TrainingRows) else rows
    return train(lessons, kind=kind, feature_settings={}, provenance={}, settings=settings)


def test_kind_survival_learns_the_distribution() -> None:
    rows = random_rows(500, seed=1)
    prediction = rows.predict(trained(random_rows(6000)))
    odds = 1 + rows.features[:, :1] + 2 * rows.positions[:, :, 0]
    acceptance = np.cumprod(1 / (1 + np.exp(-odds)), axis=1)
    acceptance *= np.arange(12) < rows.draft_lens[:, None]
    assert prediction.acceptance is not None
    assert np.abs(prediction.acceptance[:, :12] - acceptance).mean() < 0.05
    assert not prediction.acceptance[:, 12:].any()


def test_a_draft_accepted_whole_says_nothing_of_what_would_follow() -> None:
    # All drafts of one token are accepted, those of four never beyond the second.
    rows = random_rows(2000, longest=4)
    is_short = np.arange(2000) % 2 == 0
    rows = replace(
        rows,
        draft_lens=np.where(is_short, 1, 4).astype(np.int32),
        accepted_lens=np.where(is_short, 1, 2).astype(np.int32),
    )
    # Certainty takes more updates than the other tests need.
    acceptance = rows.predict(trained(rows, replace(QUICK, max_epochs=20))).acceptance
    assert acceptance is not None
    of_long = acceptance[~is_short].mean(axis=0)[:4]
    np.testing.assert_allclose(of_long, [1, 1, 0, 0], atol=0.05)


@pytest.mark.parametrize("longest", [4, 12])
def test_the_likelihood_of_worth_is_that_of_six_accepted_tokens(longest: int) -> None:
    rows = random_rows(200, longest=longest)
    batch = np.random.default_rng(1).permutation(200)[:150]
    outputs = np.random.default_rng(2).normal(size=(150, NUM_BUCKETS + len(POSITION_FEATURES)))
    found = JudgedTokens.of(Lessons.of(rows)).worth_log_likelihood(
        torch.from_numpy(outputs.astype(np.float32)), torch.from_numpy(batch)
    )
    wanted = []
    for row, output in zip(batch, outputs, strict=True):
        # The first sixteen depths have a bias each.
        of_tokens = [
            output[depth] + rows.positions[row, depth] @ output[NUM_BUCKETS:]
            for depth in range(min(6, longest))
        ]
        prob = float(np.prod([1 / (1 + np.exp(-odds)) for odds in of_tokens]))
        is_worth = rows.accepted_lens[row] >= 6
        is_long = rows.draft_lens[row] >= 6
        wanted.append(np.log(prob if is_worth else 1 - prob) if is_long else 0)
    assert (np.array(wanted) != 0).any() == (longest >= 6)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-6)


def test_a_certain_mistake_about_worth_is_dear_but_not_infinite() -> None:
    rows = random_rows(2, longest=12)
    rows = replace(
        rows,
        draft_lens=np.full(2, 12, np.int32),
        accepted_lens=np.array([2, 12], np.int32),
    )
    outputs = torch.zeros((2, NUM_BUCKETS + len(POSITION_FEATURES)))
    outputs[0, :NUM_BUCKETS], outputs[1, :NUM_BUCKETS] = 40, -40
    outputs.requires_grad_()
    found = JudgedTokens.of(Lessons.of(rows)).worth_log_likelihood(outputs, torch.arange(2))
    found.sum().backward()
    assert (found < -10).all()
    assert found.isfinite().all()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


def test_worth_counts_in_training() -> None:
    # The first token of a draft is right where its input is high, the others where it is low,
    # which one weight for all depths cannot say: it follows what counts.
    def crossed(seed: int) -> TrainingRows:
        random = np.random.default_rng(seed)
        rows = random_rows(4000, seed=seed, longest=8)
        positions = np.zeros_like(rows.positions)
        positions[:, :, 0] = random.normal(size=(4000, 1))
        odds = 2 - 3 * positions[:, :, 0]
        odds[:, 0] = 1 + 3 * positions[:, 0, 0]
        is_right = random.random((4000, 8)) < 1 / (1 + np.exp(-odds))
        accepted = np.cumprod(is_right, axis=1).sum(axis=1).astype(np.int32)
        lengths = np.full(4000, 8, np.int32)
        return replace(
            rows,
            features=np.zeros_like(rows.features),  # no noise to learn from
            positions=positions,
            draft_lens=lengths,
            accepted_lens=accepted,
        )

    rows, fresh = crossed(0), crossed(1)
    losses = []
    for weight in (0.0, 30.0):
        predictor = trained(rows, replace(QUICK, worth_weight=weight))
        probs = fresh.predict(predictor).prob_accepted(6)
        assert probs is not None
        probs = probs.clip(1e-6, 1 - 1e-6)
        right = np.where(fresh.accepted_lens >= 6, probs, 1 - probs)
        losses.append(-np.log(right).mean())
    assert losses[1] < 0.95 * losses[0]


def test_weights_say_what_counts() -> None:
    # Two halves that contradict each other; all the weight is on the second.
    rows = random_rows(1000, longest=1)
    accepted = (np.arange(1000) % 2).astype(np.int32)
    rows = replace(rows, draft_lens=np.ones(1000, np.int32), accepted_lens=accepted)
    lessons = Lessons.of(rows).weighted(accepted.astype(np.float32))
    assert rows.predict(trained(lessons, replace(QUICK, max_epochs=20))).accepted_lens.mean() > 0.9


def test_inputs_that_are_hidden_now_and_then_are_relied_on_together() -> None:
    # Two inputs say much the same, and the better one says nothing afterwards.
    rows, fresh = (with_a_noisy_copy(random_rows(8000, seed=seed)) for seed in (0, 1))
    wanted = np.maximum(fresh.features[:, 0] * 2, 0)
    features = fresh.features.copy()
    features[:, 0] = 0
    errors = []
    for share in (0.0, 0.3):
        hiding = replace(QUICK, input_dropout=share)
        predictor = trained(rows, hiding, kind="mlp")
        payoffs = replace(fresh, features=features).predict(predictor).accepted_lens
        errors.append(np.abs(payoffs - wanted).mean())
    assert errors[1] < 0.75 * errors[0]


def with_a_noisy_copy(rows: TrainingRows) -> TrainingRows:
    features = rows.features.copy()
    features[:, 1] = features[:, 0] + 0.3 * features[:, 1]
    accepted = np.maximum(features[:, 0] * 2, 0).round().astype(np.int32)
    return replace(rows, features=features, accepted_lens=accepted)


def test_the_papers_predictor_learns_the_accepted_length() -> None:
    rows = random_rows(4000)
    bend = np.maximum(rows.features[:, 0] * 2, 0).round().astype(np.int32)
    settings = replace(QUICK, input_dropout=0)
    predictor = trained(replace(rows, accepted_lens=bend), settings, kind="mlp")
    fresh = random_rows(500, seed=1)
    wanted = np.maximum(fresh.features[:, 0] * 2, 0)
    assert np.abs(fresh.predict(predictor).accepted_lens - wanted).mean() < 0.4


@pytest.mark.parametrize("kind", ["survival", "mlp"])
def test_the_same_rows_and_seed_give_the_same_predictor(kind: Kind) -> None:
    rows, fresh = random_rows(500), random_rows(50, seed=1)
    first, second = (fresh.predict(trained(rows, kind=kind)).accepted_lens for _ in range(2))
    assert first.tobytes() == second.tobytes()
    other = fresh.predict(trained(rows, replace(QUICK, seed=1), kind)).accepted_lens
    assert (first != other).any()


def test_predictors_carry_what_they_were_told() -> None:
    predictor = train(
        Lessons.of(random_rows(300)),
        kind="mlp",
        feature_settings={"max_depth": 64},
        provenance={"data": "made up"},
    )
    assert [weight.shape for weight in predictor.weights] == [(256, 14), (256, 256), (1, 256)]
    assert predictor.settings == {"max_depth": 64}
    assert predictor.provenance == {"data": "made up"}


def test_the_papers_settings_are_its_own_but_for_batches_of_small_data() -> None:
    sizes = {num: TrainingSettings.of_paper(num).batch_size for num in (100, 10**6, 10**8)}
    assert sizes == {100: 1, 10**6: 3906, 10**8: 65536}
    assert TrainingSettings().input_dropout > 0 == TrainingSettings.of_paper(100).input_dropout
    assert TrainingSettings().worth_weight > 0 == TrainingSettings.of_paper(100).worth_weight
    literal = TrainingSettings.of_paper(100, batch_size=65536)
    assert (literal.batch_size, literal.num_epochs(100)) == (65536, 20)


def test_more_rows_need_fewer_epochs() -> None:
    settings = TrainingSettings(num_row_visits=1_000_000, min_epochs=3, max_epochs=20)
    assert [settings.num_epochs(n) for n in (1, 50_000, 100_000, 10**6)] == [20, 20, 10, 3]


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        trained(random_rows(3).select(np.zeros(3, np.bool_)))
