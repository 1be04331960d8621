"""Inference, and files that are refused."""

import json
import re
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from sglang_hvd.config import CacheMode, HvdConfig
from sglang_hvd.payoff import DEFAULT_PREDICTORS, FEATURE_NAMES, PayoffPredictor
from sglang_hvd.payoff.predictor import feature_settings

WIDTH = len(FEATURE_NAMES)


def random_predictor(seed: int = 0, hidden: tuple[int, ...] = (256, 256)) -> PayoffPredictor:
    random = np.random.default_rng(seed)
    sizes = [WIDTH, *hidden, 1]
    shapes = [(num_out, num_in) for num_in, num_out in pairwise(sizes)]
    return PayoffPredictor(
        mean=random.normal(size=WIDTH).astype(np.float32),
        std=random.uniform(0.5, 2, WIDTH).astype(np.float32),
        weights=tuple((random.normal(size=s) / s[1] ** 0.5).astype(np.float32) for s in shapes),
        biases=tuple(random.normal(size=s[0]).astype(np.float32) for s in shapes),
        settings=feature_settings(HvdConfig()),
        provenance={"data": "random numbers"},
    )


def random_features(num_rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, WIDTH)).astype(np.float32) * 4


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "predictor.safetensors"
    random_predictor(hidden=(8, 8)).save(path)
    return path


def test_a_row_is_the_same_to_the_last_bit_in_every_batch() -> None:
    predictor, features = random_predictor(), random_features(96)
    whole = predictor.predict(features)
    for num_rows in range(1, 70):
        start = (7 * num_rows) % (96 - num_rows + 1)
        part = predictor.predict(features[start : start + num_rows])
        assert part.tobytes() == whole[start : start + num_rows].tobytes()
    order = np.random.default_rng(2).permutation(96)
    assert predictor.predict(features[order]).tobytes() == whole[order].tobytes()


def test_the_layout_of_the_features_in_memory_changes_nothing() -> None:
    predictor, features = random_predictor(), random_features(40)
    shifted = np.zeros(features.size + 1, dtype=np.float32)[1:].reshape(features.shape)
    shifted[:] = features
    for layout in (np.asfortranarray(features), shifted, np.repeat(features, 2, axis=0)[::2]):
        assert predictor.predict(layout).tobytes() == predictor.predict(features).tobytes()


@pytest.mark.parametrize("hidden", [(256, 256), (8,), ()])
def test_inference_equals_torch(hidden: tuple[int, ...]) -> None:
    predictor, features = random_predictor(hidden=hidden), random_features(200)
    signal = (torch.from_numpy(features) - torch.from_numpy(predictor.mean)) / torch.from_numpy(
        predictor.std
    )
    for index, (weight, bias) in enumerate(zip(predictor.weights, predictor.biases, strict=True)):
        signal = signal if index == 0 else signal.relu()
        signal = torch.nn.functional.linear(
            signal, torch.from_numpy(weight), torch.from_numpy(bias)
        )
    np.testing.assert_allclose(
        predictor.predict(features), signal[:, 0].numpy(), rtol=1e-5, atol=1e-5
    )


def test_no_drafts_need_no_prediction() -> None:
    assert random_predictor().predict(random_features(0)).shape == (0,)


def test_a_saved_predictor_predicts_the_same_and_keeps_its_metadata(tmp_path: Path) -> None:
    predictor, features = random_predictor(), random_features(20)
    path = tmp_path / "predictor.safetensors"
    predictor.save(path)
    loaded = PayoffPredictor.load(path)
    assert loaded.predict(features).tobytes() == predictor.predict(features).tobytes()
    assert loaded.settings == predictor.settings
    assert loaded.provenance == predictor.provenance
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved: Path) -> None:
    before = saved.read_bytes()
    predictor = random_predictor()
    object.__setattr__(predictor, "provenance", {"not JSON": object()})
    with pytest.raises(TypeError):
        predictor.save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        PayoffPredictor.load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite(
    path: Path,
    tensors: Callable[[dict[str, np.ndarray]], None] = lambda _: None,
    metadata: Callable[[dict[str, str]], None] = lambda _: None,
) -> Path:
    with safe_open(path, framework="numpy") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = dict(file.metadata())
    tensors(values)
    metadata(texts)
    save_file(values, path, texts)
    return path


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "is not a file: set --hvd-predictor" in refusal(tmp_path / "missing.safetensors")
    assert "is not a file" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04" * 50, struct.pack("<Q", 2**62)])
def test_a_file_of_another_kind_is_refused(saved: Path, content: bytes) -> None:
    saved.write_bytes(content)
    assert "is corrupt or truncated" in refusal(saved)


def test_a_truncated_file_is_refused_wherever_it_ends(saved: Path) -> None:
    content = saved.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        saved.write_bytes(content[:length])
        assert "is corrupt or truncated" in refusal(saved)
    saved.write_bytes(content + b"\0")
    assert "is corrupt or truncated" in refusal(saved)


def test_tensors_of_another_program_are_refused(saved: Path) -> None:
    save_file({"mean": np.zeros(3, dtype=np.float32)}, saved)
    assert refusal(saved).endswith("is not a payoff predictor")


def test_another_format_version_is_refused(saved: Path) -> None:
    rewrite(saved, metadata=lambda texts: texts.update(format_version="2"))
    assert "has format version 2, wanted 1: retrain" in refusal(saved)


@pytest.mark.parametrize(
    "features", [[*FEATURE_NAMES[:-1]], [*FEATURE_NAMES, "age"], [*reversed(FEATURE_NAMES)]]
)
def test_other_features_are_refused(saved: Path, features: list[str]) -> None:
    rewrite(saved, metadata=lambda texts: texts.update(features=json.dumps(features)))
    assert f"was trained for the features {', '.join(features)}, wanted" in refusal(saved)


@pytest.mark.parametrize("key", ["features", "settings", "provenance"])
@pytest.mark.parametrize("value", ["", "{", "null", "3"])
def test_unreadable_metadata_is_refused(saved: Path, key: str, value: str) -> None:
    rewrite(saved, metadata=lambda texts: texts.update({key: value}))
    assert f"has no readable {key} in its metadata" in refusal(saved)


def test_settings_that_are_not_ours_are_refused(saved: Path) -> None:
    rewrite(saved, metadata=lambda texts: texts.update(settings='{"max_depth": 64}'))
    assert "has settings for max_depth: retrain" in refusal(saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("bias_1"), "has the tensors bias_0, bias_2, mean"),
        (lambda t: t.update(extra=np.zeros(1)), "has the tensors bias_0, bias_1, bias_2, extra"),
        (lambda t: t.update(mean=np.zeros(3, np.float32)), r"has mean float32[3], wanted"),
        (lambda t: t.update(std=np.ones(WIDTH)), rf"has std float64[{WIDTH}], wanted float32"),
        (
            lambda t: t.update(weight_1=np.zeros((8, 9), np.float32)),
            "has weight_1 float32[8, 9], wanted float32[8, 8]",
        ),
        (
            lambda t: t.update(weight_2=np.zeros((2, 8), np.float32)),
            "has weight_2 float32[2, 8], wanted float32[1, 8]",
        ),
        (lambda t: t.update(bias_2=np.zeros((), np.float32)), "has bias_2 float32[], wanted"),
        (lambda t: t.update(bias_0=np.zeros((), np.float32)), "has bias_0 float32[], wanted"),
        (lambda t: t["bias_0"].fill(np.nan), "has values in bias_0 that are not finite"),
        (lambda t: t["weight_0"].fill(np.inf), "has values in weight_0 that are not finite"),
        (lambda t: t["std"].fill(0), "has a standard deviation that is not positive"),
    ],
)
def test_unsound_tensors_are_refused(
    saved: Path, change: Callable[[dict[str, np.ndarray]], None], says: str
) -> None:
    def on_copies(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name: tensor.copy() for name, tensor in tensors.items()}
        change(tensors)

    assert says in refusal(rewrite(saved, tensors=on_copies))


def test_the_configured_predictor_is_loaded(saved: Path) -> None:
    assert len(PayoffPredictor.of_config(HvdConfig(predictor=saved)).biases[0]) == 8


@pytest.mark.parametrize(
    "change", [{"cache_mode": "paper"}, {"min_token_prob": 0.2}, {"history_window": 4}]
)
def test_a_predictor_for_other_drafts_is_refused(saved: Path, change: dict[str, object]) -> None:
    [(name, value)] = change.items()
    trained = feature_settings(HvdConfig())[name]
    with pytest.raises(
        ValueError,
        match=f"{saved} was trained for {name} {trained}, the configuration has {value}: retrain",
    ):
        PayoffPredictor.of_config(HvdConfig(predictor=saved, **change))  # type: ignore[arg-type]


def test_shorter_drafts_than_it_was_trained_on_are_fine(saved: Path) -> None:
    PayoffPredictor.of_config(HvdConfig(predictor=saved, max_draft_tokens=8, verify_width=8))


@pytest.mark.parametrize("mode", get_args(CacheMode))
def test_the_shipped_predictors_fit_the_cache_modes(mode: CacheMode) -> None:
    predictor = PayoffPredictor.of_config(HvdConfig(cache_mode=mode))
    assert predictor.predict(random_features(3)).shape == (3,)


@pytest.mark.parametrize("mode", get_args(CacheMode))
def test_the_shipped_predictors_say_what_they_were_trained_on(mode: CacheMode) -> None:
    provenance = PayoffPredictor.load(DEFAULT_PREDICTORS[mode]).provenance
    datasets = provenance["datasets"]
    assert isinstance(datasets, list)
    assert datasets
    assert all("NC" not in dataset["licence"] for dataset in datasets)
    assert "heldout" in provenance
