"""Training learns, repeats itself, and stores what it was told."""

import numpy as np
import pytest

from sglang_hvd.payoff import FEATURE_NAMES
from sglang_hvd.payoff.training import TrainingSettings, train

WIDTH = len(FEATURE_NAMES)


def rows(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Accepted length = a bend in the first feature; the last feature never varies."""
    random = np.random.default_rng(seed)
    features = random.uniform(0, 10, (num_rows, WIDTH)).astype(np.float32)
    features[:, -1] = 3
    return features, np.maximum(features[:, 0] * 2 - 10, 0).round().astype(np.int32)


def test_it_learns_what_the_features_say() -> None:
    settings = TrainingSettings(hidden_sizes=(32,), learning_rate=0.01, batch_size=64, num_epochs=8)
    predictor = train(*rows(3000), feature_settings={}, provenance={}, settings=settings)
    features, accepted_lens = rows(500, seed=1)
    assert np.abs(predictor.predict(features) - accepted_lens).mean() < 0.5


def test_the_same_rows_give_the_same_predictor() -> None:
    settings = TrainingSettings(hidden_sizes=(16,), num_epochs=2)
    first, second = (
        train(*rows(2000), feature_settings={}, provenance={}, settings=settings) for _ in range(2)
    )
    features, _ = rows(50, seed=1)
    assert first.predict(features).tobytes() == second.predict(features).tobytes()


def test_another_seed_gives_another_predictor() -> None:
    features, _ = rows(50, seed=1)
    first, second = (
        train(
            *rows(2000),
            feature_settings={},
            provenance={},
            settings=TrainingSettings(hidden_sizes=(16,), num_epochs=1, seed=seed),
        )
        for seed in (1, 2)
    )
    assert (first.predict(features) != second.predict(features)).any()


def test_the_network_is_the_papers_and_carries_what_it_was_told() -> None:
    predictor = train(
        *rows(300),
        feature_settings={"max_depth": 64},
        provenance={"data": "made up"},
        settings=TrainingSettings(num_epochs=1),
    )
    assert [weight.shape for weight in predictor.weights] == [(256, WIDTH), (256, 256), (1, 256)]
    assert predictor.settings == {"max_depth": 64}
    assert predictor.provenance == {"data": "made up"}


def test_the_papers_batch_size_is_capped_for_small_data_unless_it_is_asked_for() -> None:
    assert TrainingSettings().rows_per_update(100) == 1
    assert TrainingSettings().rows_per_update(1_000_000) == 3906
    assert TrainingSettings().rows_per_update(100_000_000) == 65536
    assert TrainingSettings(batch_size=65536).rows_per_update(100) == 65536


def test_nothing_to_learn_from_is_refused() -> None:
    features, accepted_lens = rows(10)
    for bad_features in (features[:0], features[:, :-1], features[:5]):
        with pytest.raises(ValueError, match=rf"training needs float32\[num_rows, {WIDTH}\]"):
            train(
                bad_features,
                accepted_lens[: len(bad_features) and 10],
                feature_settings={},
                provenance={},
            )
