"""Inference of the payoff predictor, and the file it lives in."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from sglang_hvd.config import CacheMode, HvdConfig, flag_name
from sglang_hvd.payoff.features import FEATURE_NAMES

Array = npt.NDArray[np.float32]
_Json = TypeVar("_Json")

# Those that ship in the package, by cache mode. Their provenance says what they were trained on and
# how good they are.
DEFAULT_PREDICTORS: Mapping[CacheMode, Path] = {
    mode: Path(__file__).with_name(f"{mode}_predictor.safetensors") for mode in get_args(CacheMode)
}

_FORMAT = "sglang_hvd.payoff.mlp"
# To be raised when a feature changes its meaning under the same name, too.
_FORMAT_VERSION = "1"

# The settings that the features depend on. Limits that only cut drafts short are not among them.
_FEATURE_SETTINGS = (
    "cache_mode",
    "max_depth",
    "max_spec_factor",
    "max_spec_offset",
    "min_token_prob",
    "history_window",
)


def feature_settings(config: HvdConfig) -> dict[str, float | str]:
    """The settings of a configuration that decide what the features mean."""
    settings = {name: getattr(config, name) for name in _FEATURE_SETTINGS}
    return {**settings, "min_token_prob": config.lowest_token_prob}


@dataclass(frozen=True, slots=True, eq=False)
class PayoffPredictor:
    """A multilayer perceptron with ReLU that predicts a cache draft's accepted length.

    mean, std: float32[num_features], the normalisation of the features.
    weights: float32[num_out, num_in] per layer, the last with one output.
    biases: float32[num_out] per layer.
    settings: the feature_settings of the cache drafts it was trained on.
    provenance: training data, training settings and quality, as JSON values for people.
    """

    mean: Array
    std: Array
    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    settings: Mapping[str, float | str]
    provenance: Mapping[str, object]

    def predict(self, features: Array) -> Array:
        """Expected accepted tokens, bonus token not counted: float32[num_rows].

        features: float32[num_rows, num_features], see build_features.

        A row's result is the same to the last bit whatever the other rows are, so a request's
        decision does not depend on its batch: einsum adds up each output in one fixed order,
        which a matrix product of BLAS does not.
        """
        hidden = (np.ascontiguousarray(features) - self.mean) / self.std
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = np.maximum(np.einsum("ri,oi->ro", hidden, weight) + bias, 0)
        payoff: Array = np.einsum("ri,oi->ro", hidden, self.weights[-1])[:, 0] + self.biases[-1]
        return payoff

    @classmethod
    def of_config(cls, config: HvdConfig) -> "PayoffPredictor":
        """The predictor that a configuration names, or else the shipped one for its cache mode.

        Raises ValueError, in one line, if it cannot be read or was trained for other settings.
        """
        path = config.predictor or DEFAULT_PREDICTORS[config.cache_mode]
        predictor = cls.load(path)
        for name, got in feature_settings(config).items():
            if got != predictor.settings[name]:
                raise ValueError(
                    f"predictor {path} was trained for {name} {predictor.settings[name]}, the "
                    f"configuration has {got}: retrain or set {flag_name('predictor')}"
                )
        return predictor

    def save(self, path: Path) -> None:
        """Writes the predictor; a file of that name stays whole until it is replaced."""
        tensors = {"mean": self.mean, "std": self.std}
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            tensors |= {f"weight_{index}": weight, f"bias_{index}": bias}
        metadata = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "features": json.dumps(FEATURE_NAMES),
            "settings": json.dumps(dict(self.settings)),
            "provenance": json.dumps(dict(self.provenance)),
        }
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_bytes(to_bytes(tensors, metadata))
            os.replace(written, path)

    @classmethod
    def load(cls, path: Path) -> "PayoffPredictor":
        """Reads a predictor. Raises ValueError, in one line, for a file that is not a whole and
        sound predictor of these features."""
        if not path.is_file():
            raise ValueError(f"predictor {path} is not a file: set {flag_name('predictor')}")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"predictor {path} is not a payoff predictor")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"predictor {path} is corrupt or truncated: {error}") from None
        try:
            return cls._from_file(tensors, metadata)
        except ValueError as error:
            raise ValueError(f"predictor {path} {error}") from None

    @classmethod
    def _from_file(
        cls, tensors: Mapping[str, Array], metadata: Mapping[str, str]
    ) -> "PayoffPredictor":
        version = metadata.get("format_version")
        if version != _FORMAT_VERSION:
            raise ValueError(f"has format version {version}, wanted {_FORMAT_VERSION}: retrain")
        features = tuple(_read_json(metadata, "features", list))
        if features != FEATURE_NAMES:
            raise ValueError(
                f"was trained for the features {', '.join(map(str, features))}, wanted "
                f"{', '.join(FEATURE_NAMES)}: retrain"
            )
        settings = _read_json(metadata, "settings", dict)
        if set(settings) != set(_FEATURE_SETTINGS):
            raise ValueError(f"has settings for {', '.join(settings)}: retrain")
        num_layers = (len(tensors) - 2) // 2
        names = ["mean", "std"]
        names += [f"{kind}_{layer}" for layer in range(num_layers) for kind in ("weight", "bias")]
        if num_layers < 1 or set(tensors) != set(names):
            raise ValueError(f"has the tensors {', '.join(sorted(tensors))}: retrain")
        predictor = cls(
            mean=tensors["mean"],
            std=tensors["std"],
            weights=tuple(tensors[f"weight_{layer}"] for layer in range(num_layers)),
            biases=tuple(tensors[f"bias_{layer}"] for layer in range(num_layers)),
            settings=settings,
            provenance=_read_json(metadata, "provenance", dict),
        )
        predictor._check_tensors()
        return predictor

    def _check_tensors(self) -> None:
        width = len(FEATURE_NAMES)
        wanted: dict[str, tuple[Array, tuple[int, ...]]] = {
            "mean": (self.mean, (width,)),
            "std": (self.std, (width,)),
        }
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            is_last = layer == len(self.weights) - 1
            num_out = 1 if is_last else bias.size
            wanted[f"bias_{layer}"] = (bias, (num_out,))
            wanted[f"weight_{layer}"] = (weight, (num_out, width))
            width = num_out
        for name, (tensor, shape) in wanted.items():
            if tensor.dtype != np.float32 or tensor.shape != shape:
                raise ValueError(
                    f"has {name} {tensor.dtype}{list(tensor.shape)}, wanted float32{list(shape)}"
                )
            if not np.isfinite(tensor).all():
                raise ValueError(f"has values in {name} that are not finite")
        if (self.std <= 0).any():
            raise ValueError("has a standard deviation that is not positive")


def _read_json(metadata: Mapping[str, str], key: str, kind: type[_Json]) -> _Json:
    try:
        value = json.loads(metadata.get(key, ""))
    except json.JSONDecodeError:
        raise ValueError(f"has no readable {key} in its metadata") from None
    if not isinstance(value, kind):
        raise ValueError(f"has no readable {key} in its metadata")
    return value
