"""Inference of the payoff predictor, and the file it lives in."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from sglang_hvd.config import CacheMode, HvdConfig
from sglang_hvd.payoff._native import NUM_BUCKETS, Network
from sglang_hvd.payoff.features import (
    FEATURE_NAMES,
    MAX_DRAFT_LEN,
    PAPER_FEATURES,
    POSITION_FEATURES,
)
from sglang_hvd.payoff.token_classes import TokenClass
from sglang_hvd.payoff.tracker import DraftFeatures
from sglang_hvd.whole_file import write_whole

Array = npt.NDArray[np.float32]
_Json = TypeVar("_Json")

# Those that ship in the package, by cache mode. Their provenance says what they were trained on and
# how good they are.
DEFAULT_PREDICTORS: Mapping[CacheMode, Path] = {
    mode: Path(__file__).with_name(f"{mode}_predictor.safetensors") for mode in get_args(CacheMode)
}

# The paper's predictors, to compare with, trained on the same cycles.
PAPER_PREDICTORS: Mapping[CacheMode, Path] = {
    mode: Path(__file__).with_name(f"{mode}_mlp.safetensors") for mode in get_args(CacheMode)
}

Kind = Literal["survival", "mlp"]

_FORMAT = "sglang_hvd.payoff"
# To be raised when a feature changes its meaning under the same name, too.
_FORMAT_VERSION = "2"
_FEATURES: Mapping[Kind, tuple[str, ...]] = {"survival": FEATURE_NAMES, "mlp": PAPER_FEATURES}
_NUM_OUTPUTS: Mapping[Kind, int] = {"survival": NUM_BUCKETS + len(POSITION_FEATURES), "mlp": 1}

# The settings that the features depend on. Limits that only cut drafts short are not among them.
_FEATURE_SETTINGS = (
    "cache_mode",
    "max_depth",
    "max_spec_factor",
    "max_spec_offset",
    "min_token_prob",
    "history_window",
)


def predictor_file(config: HvdConfig) -> Path:
    """The predictor that is asked for, or else the one that ships."""
    return config.predictor or DEFAULT_PREDICTORS[config.cache_mode]


def shipped_predictors(cache_mode: CacheMode) -> dict[str, "PayoffPredictor"]:
    """Those that ship: "default" and the paper's, "mlp"."""
    return {
        "default": PayoffPredictor.load(DEFAULT_PREDICTORS[cache_mode]),
        "mlp": PayoffPredictor.load(PAPER_PREDICTORS[cache_mode]),
    }


def feature_settings(config: HvdConfig) -> dict[str, float | str]:
    """The settings of a configuration that decide what the features mean."""
    settings = {name: getattr(config, name) for name in _FEATURE_SETTINGS}
    return {**settings, "min_token_prob": config.lowest_token_prob}


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What is expected of each request's cache draft. Rows without a draft hold no meaning.

    payoffs: float32[num_requests], expected accepted length in tokens, bonus token not counted.
    survival: float32[num_requests, MAX_DRAFT_LEN], probability that more than j tokens are
        accepted, 0 from the draft's length on; None from a predictor that gives a bare number.
    """

    payoffs: Array
    survival: Array | None

    def reaches(self, num_tokens: int) -> Array | None:
        """Probability that at least so many tokens are accepted: float32[num_requests]."""
        if self.survival is None:
            return None
        if num_tokens < 1:
            return np.ones(len(self.survival), np.float32)
        if num_tokens > self.survival.shape[1]:
            return np.zeros(len(self.survival), np.float32)
        return self.survival[:, num_tokens - 1]


@dataclass(frozen=True, slots=True, eq=False)
class PayoffPredictor:
    """A multilayer perceptron with ReLU that predicts how much of a cache draft is accepted.

    kind: "mlp", the paper's: one output, the accepted length. "survival": the outputs are, for
        each depth of the draft, the log odds that a token there is accepted if those before it
        are, and what each of POSITION_FEATURES adds to them; so it knows the distribution.
    mean, std: float32[num_features], the normalisation of the features.
    weights: float32[num_out, num_in] per layer.
    biases: float32[num_out] per layer.
    settings: the feature_settings of the cache drafts it was trained on.
    provenance: training data, training settings and quality, as JSON values for people.

    Raises ValueError, in one line, for tensors of another shape or type or that are not finite.
    """

    kind: Kind
    mean: Array
    std: Array
    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    settings: Mapping[str, float | str]
    provenance: Mapping[str, object]
    _network: Network = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_tensors()
        network = Network(self.mean, self.std, list(self.weights), list(self.biases))
        object.__setattr__(self, "_network", network)

    def predict(self, drafts: DraftFeatures) -> Prediction:
        """A row's result is the same to the last bit whatever the other rows are and on every
        machine, so a request's decision does not depend on its batch. Not thread-safe."""
        num_rows = len(drafts.draft_lens)
        payoffs = np.empty(num_rows, np.float32)
        if self.kind == "mlp":
            self._network.predict_length(drafts.features, payoffs)
            return Prediction(payoffs, None)
        survival = np.empty((num_rows, MAX_DRAFT_LEN), np.float32)
        self._network.predict_survival(
            drafts.features, drafts.positions, drafts.draft_lens, payoffs, survival
        )
        return Prediction(payoffs, survival)

    @property
    def trained_sessions(self) -> frozenset[str]:
        """Fingerprints of the recorded sessions it was trained on, as far as it says."""
        sessions = self.provenance.get("trained_sessions", [])
        return frozenset(map(str, sessions)) if isinstance(sessions, list) else frozenset()

    @property
    def fingerprint(self) -> str:
        """Names the predictor: equal for equal ones, whatever file they come from."""
        digest = hashlib.sha256(repr((self.kind, sorted(self.settings.items()))).encode())
        for tensor in (self.mean, self.std, *self.weights, *self.biases):
            digest.update(repr(tensor.shape).encode())
            digest.update(tensor.tobytes())
        return digest.hexdigest()[:16]

    @classmethod
    def of_config(cls, config: HvdConfig) -> "PayoffPredictor":
        """The predictor that a configuration names, or else the shipped one for its cache mode.

        Raises ValueError, in one line, if it cannot be read, was trained for other settings or is
        not of the kind that the policy needs.
        """
        path = predictor_file(config)
        predictor = cls.load(path)
        for name, got in feature_settings(config).items():
            if got != predictor.settings[name]:
                raise ValueError(
                    f"predictor {path} was trained for {name} {predictor.settings[name]}, the "
                    f"configuration has {got}: retrain or give another"
                )
        if config.policy == "allocate" and predictor.kind != "survival":
            raise ValueError(
                f"the allocate policy needs a predictor of distributions, {path} is of kind "
                f"{predictor.kind}: use policy payoff with it"
            )
        return predictor

    def save(self, path: Path) -> None:
        """Writes the predictor; a file of that name stays whole until it is replaced.

        Raises ValueError, in one line, if it cannot be written.
        """
        tensors = {"mean": self.mean, "std": self.std}
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            tensors |= {f"weight_{index}": weight, f"bias_{index}": bias}
        metadata = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "kind": self.kind,
            "features": json.dumps(_FEATURES[self.kind]),
            "position_features": json.dumps(POSITION_FEATURES),
            "token_classes": json.dumps([c.name for c in TokenClass]),
            "settings": json.dumps(dict(self.settings)),
            "provenance": json.dumps(dict(self.provenance)),
            "fingerprint": self.fingerprint,
        }
        write_whole(path, to_bytes(tensors, metadata))

    @classmethod
    def load(cls, path: Path) -> "PayoffPredictor":
        """Reads a predictor. Raises ValueError, in one line, for a file that is not a whole and
        sound predictor of these features."""
        try:
            if not path.is_file():
                raise ValueError(f"predictor {path} is not a file: give another")
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"predictor {path} is not a payoff predictor")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"predictor {path} cannot be read: {reason}") from None
        except (SafetensorError, TypeError, AttributeError) as error:
            # The latter two: tensors of a type that numpy does not have.
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
        kind = _read_kind(metadata)
        for key, wanted in (
            ("features", _FEATURES[kind]),
            ("position_features", POSITION_FEATURES),
            ("token_classes", tuple(c.name for c in TokenClass)),
        ):
            got = tuple(_read_json(metadata, key, list))
            if got != wanted:
                different = sorted(set(map(str, got)) ^ set(map(str, wanted)))
                raise ValueError(
                    f"was trained for other {key.replace('_', ' ')} "
                    f"({', '.join(different) or 'in another order'}): retrain"
                )
        settings = _read_json(metadata, "settings", dict)
        if set(settings) != set(_FEATURE_SETTINGS):
            raise ValueError(f"has settings for {', '.join(settings)}: retrain")
        if settings["cache_mode"] not in get_args(CacheMode):
            raise ValueError(f"has the cache mode {settings['cache_mode']!r}: retrain")
        try:
            HvdConfig.model_validate(settings)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"has settings that cannot be: {where}: {first['msg']}") from None
        num_layers = (len(tensors) - 2) // 2
        names = ["mean", "std"]
        names += [f"{kind}_{layer}" for layer in range(num_layers) for kind in ("weight", "bias")]
        if num_layers < 1 or set(tensors) != set(names):
            raise ValueError(f"has the tensors {', '.join(sorted(tensors))}: retrain")
        predictor = cls(
            kind=kind,
            mean=tensors["mean"],
            std=tensors["std"],
            weights=tuple(tensors[f"weight_{layer}"] for layer in range(num_layers)),
            biases=tuple(tensors[f"bias_{layer}"] for layer in range(num_layers)),
            settings=settings,
            provenance=_read_json(metadata, "provenance", dict),
        )
        # Earlier releases wrote none.
        written = metadata.get("fingerprint", predictor.fingerprint)
        if written != predictor.fingerprint:
            raise ValueError("is corrupt: its numbers are not those that were written")
        return predictor

    def _check_tensors(self) -> None:
        width = len(_FEATURES[self.kind])
        wanted: dict[str, tuple[Array, tuple[int, ...]]] = {
            "mean": (self.mean, (width,)),
            "std": (self.std, (width,)),
        }
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            is_last = layer == len(self.weights) - 1
            num_out = _NUM_OUTPUTS[self.kind] if is_last else bias.size
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
        smallest = np.finfo(np.float32).tiny
        if (self.std < smallest).any():
            raise ValueError("has a standard deviation that is not positive")


def _read_json(metadata: Mapping[str, str], key: str, kind: type[_Json]) -> _Json:
    try:
        value = json.loads(metadata.get(key, ""))
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"has no readable {key} in its metadata") from None
    if not isinstance(value, kind):
        raise ValueError(f"has no readable {key} in its metadata")
    return value


def _read_kind(metadata: Mapping[str, str]) -> Kind:
    for kind in _FEATURES:
        if metadata.get("kind") == kind:
            return kind
    raise ValueError(f"is of an unknown kind, {metadata.get('kind')}: retrain")
