"""The predictor of how much of a cache draft is accepted: its inference and its file."""

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

from sglang_hvd._native import NUM_BUCKETS, Network
from sglang_hvd.config import SHIPPED_PREFIX, CacheMode, HvdConfig
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

# The shipped predictors by cache mode. Their provenance says what they were trained on and how good
# they are.
DEFAULT_PREDICTORS: Mapping[CacheMode, Path] = {
    mode: Path(__file__).with_name(f"{mode}_predictor.safetensors") for mode in get_args(CacheMode)
}

# The paper's predictors for comparison, trained on the same cycles.
PAPER_PREDICTORS: Mapping[CacheMode, Path] = {
    mode: Path(__file__).with_name(f"{mode}_mlp.safetensors") for mode in get_args(CacheMode)
}

Kind = Literal["survival", "mlp"]

_FORMAT = "sglang_hvd.payoff"
# Raise it also when a feature keeps its name but changes its meaning: a file has only the names.
_FORMAT_VERSION = "2"
_FEATURES: Mapping[Kind, tuple[str, ...]] = {"survival": FEATURE_NAMES, "mlp": PAPER_FEATURES}
_NUM_OUTPUTS: Mapping[Kind, int] = {"survival": NUM_BUCKETS + len(POSITION_FEATURES), "mlp": 1}

# The settings that the features depend on, without limits that only cut drafts short.
_FEATURE_SETTINGS = (
    "cache_mode",
    "max_depth",
    "max_spec_factor",
    "max_spec_offset",
    "min_token_prob",
    "history_window",
)


def predictor_file(config: HvdConfig) -> Path:
    """The file that the configuration names, or else the shipped one for its cache mode.

    Raises ValueError, in one line, for a name of a predictor that does not ship.
    """
    return located(config.predictor or DEFAULT_PREDICTORS[config.cache_mode])


def located(path: Path) -> Path:
    """The file of a predictor. shipped:NAME is NAME.safetensors in the folder of this module.

    Raises ValueError, in one line, for a name of a predictor that does not ship.
    """
    if not str(path).startswith(SHIPPED_PREFIX):
        return path
    folder = Path(__file__).parent
    shipped = {file.stem: file for file in sorted(folder.glob("*.safetensors"))}
    name = str(path).removeprefix(SHIPPED_PREFIX)
    if name not in shipped:
        raise ValueError(f"predictor {path} does not ship: choose from {', '.join(shipped)}")
    return shipped[name]


def shipped_predictors(cache_mode: CacheMode) -> dict[str, "AcceptancePredictor"]:
    """The shipped predictors by name: "default", and the paper's as "mlp"."""
    return {
        "default": AcceptancePredictor.load(DEFAULT_PREDICTORS[cache_mode]),
        "mlp": AcceptancePredictor.load(PAPER_PREDICTORS[cache_mode]),
    }


def feature_settings(config: HvdConfig) -> dict[str, float | str]:
    """The settings of a configuration that decide what the features mean."""
    settings = {name: getattr(config, name) for name in _FEATURE_SETTINGS}
    return {**settings, "min_token_prob": config.lowest_token_prob}


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A prediction for each request's cache draft; unspecified in rows without a draft.

    accepted_lens: float32[num_requests], mean accepted length in tokens; the bonus token is not
        counted.
    acceptance: float32[num_requests, MAX_DRAFT_LEN], probability that more than j tokens are
        accepted, 0 from the draft's length on. None from a predictor of bare lengths.
    """

    accepted_lens: Array
    acceptance: Array | None

    def prob_accepted(self, num_tokens: int) -> Array | None:
        """Probability that at least num_tokens tokens are accepted: float32[num_requests]. None
        from a predictor of bare lengths."""
        if self.acceptance is None:
            return None
        if num_tokens < 1:
            return np.ones(len(self.acceptance), np.float32)
        if num_tokens > self.acceptance.shape[1]:
            return np.zeros(len(self.acceptance), np.float32)
        return self.acceptance[:, num_tokens - 1]


@dataclass(frozen=True, slots=True, eq=False)
class AcceptancePredictor:
    """A multilayer perceptron with ReLU that predicts how much of a cache draft is accepted.

    kind: "mlp", the paper's, has one output: the accepted length. "survival" predicts the
        probability of each accepted length. Its outputs are, for each depth of the draft, the log
        odds that a token there is accepted if those before it are, and a weight for each of
        POSITION_FEATURES, which are added to the log odds.
    mean, std: float32[num_features], the normalisation of the features.
    weights: float32[num_out, num_in] per layer.
    biases: float32[num_out] per layer.
    settings: the feature_settings of the cache drafts it was trained on.
    provenance: for people to read: training data, training settings and quality, as JSON values.
    network: the native network of these layers.

    Raises ValueError, in one line, for tensors of another shape or type or that are not finite.
    """

    kind: Kind
    mean: Array
    std: Array
    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    settings: Mapping[str, float | str]
    provenance: Mapping[str, object]
    network: Network = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_tensors()
        network = Network(self.mean, self.std, self.weights, self.biases)
        object.__setattr__(self, "network", network)

    def predict(self, drafts: DraftFeatures) -> Prediction:
        """Predicts for each row. A row's result has the same bits whatever the other rows are and
        on every machine, so a request's decision does not depend on its batch. Not thread-safe."""
        num_rows = len(drafts.draft_lens)
        accepted_lens = np.empty(num_rows, np.float32)
        if self.kind == "mlp":
            self.network.predict_len(drafts.features, accepted_lens)
            return Prediction(accepted_lens, None)
        acceptance = np.empty((num_rows, MAX_DRAFT_LEN), np.float32)
        self.network.predict_acceptance(
            drafts.features, drafts.positions, drafts.draft_lens, accepted_lens, acceptance
        )
        return Prediction(accepted_lens, acceptance)

    @property
    def trained_sessions(self) -> frozenset[str]:
        """Fingerprints of the recorded sessions it was trained on, if its provenance has them."""
        sessions = self.provenance.get("trained_sessions", [])
        return frozenset(map(str, sessions)) if isinstance(sessions, list) else frozenset()

    @property
    def fingerprint(self) -> str:
        """Identifies the predictor: equal predictors have equal fingerprints in all files."""
        digest = hashlib.sha256(repr((self.kind, sorted(self.settings.items()))).encode())
        for tensor in (self.mean, self.std, *self.weights, *self.biases):
            digest.update(repr(tensor.shape).encode())
            digest.update(tensor.tobytes())
        return digest.hexdigest()[:16]

    @classmethod
    def of_config(cls, config: HvdConfig) -> "AcceptancePredictor":
        """Loads the predictor that a configuration names, or else the shipped one for its cache
        mode.

        Raises ValueError, in one line, if it cannot be read, was trained for other settings or is
        not of the kind that the policy needs.
        """
        path = predictor_file(config)
        predictor = cls.load(path)
        for name, got in feature_settings(config).items():
            if got != predictor.settings[name]:
                raise ValueError(
                    f"predictor {path} was trained for {name} {predictor.settings[name]}, the "
                    f"configuration has {got}: retrain it or give another"
                )
        if config.policy == "allocate" and predictor.kind != "survival":
            raise ValueError(
                f"policy allocate needs a predictor of kind survival, {path} is of kind "
                f"{predictor.kind}: use policy payoff with it"
            )
        return predictor

    def save(self, path: Path) -> None:
        """Writes the predictor. An existing file of that name is replaced in one step.

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
    def load(cls, path: Path) -> "AcceptancePredictor":
        """Reads a predictor. Raises ValueError, in one line, for a file that is not a complete and
        valid predictor of these features. path: a file, or shipped:NAME (see located)."""
        path = located(path)
        try:
            if not path.is_file():
                raise ValueError(f"predictor {path} is not a file: give another")
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(
                        f"predictor {path} is not a file of sglang-hvd train: give another"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"predictor {path} cannot be read: {reason}") from None
        except (SafetensorError, TypeError, AttributeError) as error:
            # TypeError and AttributeError: a tensor has a type that numpy lacks.
            raise ValueError(f"predictor {path} is corrupt or truncated: {error}") from None
        try:
            return cls._from_file(tensors, metadata)
        except ValueError as error:
            raise ValueError(f"predictor {path} {error}") from None

    @classmethod
    def _from_file(
        cls, tensors: Mapping[str, Array], metadata: Mapping[str, str]
    ) -> "AcceptancePredictor":
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
            raise ValueError(f"has invalid settings: {where}: {first['msg']}: retrain") from None
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
        # Earlier releases did not write a fingerprint.
        written = metadata.get("fingerprint", predictor.fingerprint)
        if written != predictor.fingerprint:
            raise ValueError("is corrupt: its tensors do not match its fingerprint: copy it again")
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
