"""Trains the paper's predictor (appendix B, table 10): the only core file that needs torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sglang_hvd.payoff.features import FEATURE_NAMES
from sglang_hvd.payoff.predictor import PayoffPredictor

# Adam needs some thousand steps. The paper's batch of 65536 gives them only on its amount of data.
_MIN_UPDATES_PER_EPOCH = 256


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The paper's settings.

    batch_size: rows per update. None: the paper's 65536, but so small that an epoch has at least
        256 updates; a number is taken literally.
    """

    hidden_sizes: tuple[int, ...] = (256, 256)
    learning_rate: float = 1e-3
    batch_size: int | None = None
    num_epochs: int = 20
    seed: int = 42

    def rows_per_update(self, num_rows: int) -> int:
        if self.batch_size is not None:
            return self.batch_size
        return max(1, min(65536, num_rows // _MIN_UPDATES_PER_EPOCH))


def train(
    features: npt.NDArray[np.float32],
    accepted_lens: npt.NDArray[np.int32],
    *,
    feature_settings: Mapping[str, float | str],
    provenance: Mapping[str, object],
    settings: TrainingSettings | None = None,
) -> PayoffPredictor:
    """Fits accepted length by squared error with Adam, deterministically.

    features: float32[num_rows, num_features], see build_features.
    accepted_lens: int32[num_rows], accepted tokens of each row's cache draft.
    feature_settings, provenance: stored with the predictor.

    Raises ValueError if there is nothing to learn from.
    """
    if features.shape != (len(accepted_lens), len(FEATURE_NAMES)) or not len(features):
        raise ValueError(
            f"training needs float32[num_rows, {len(FEATURE_NAMES)}] features and as many "
            f"accepted lengths, got {list(features.shape)} and {list(accepted_lens.shape)}"
        )
    settings = settings or TrainingSettings()
    with _one_thread():
        return _fit(features, accepted_lens, settings, feature_settings, provenance)


def _fit(
    features: npt.NDArray[np.float32],
    accepted_lens: npt.NDArray[np.int32],
    settings: TrainingSettings,
    feature_settings: Mapping[str, float | str],
    provenance: Mapping[str, object],
) -> PayoffPredictor:
    mean = features.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = features.std(axis=0, dtype=np.float64).astype(np.float32)
    std[std == 0] = 1  # a feature that never varies

    inputs = torch.from_numpy((features - mean) / std)
    targets = torch.from_numpy(accepted_lens.astype(np.float32))
    generator = torch.Generator().manual_seed(settings.seed)
    network = _network(settings, generator)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    batch_size = settings.rows_per_update(len(inputs))
    for _ in range(settings.num_epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(batch_size):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(network(inputs[rows])[:, 0], targets[rows])
            loss.backward()
            optimizer.step()
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    return PayoffPredictor(
        mean=mean,
        std=std,
        weights=tuple(layer.weight.detach().numpy().copy() for layer in layers),
        biases=tuple(layer.bias.detach().numpy().copy() for layer in layers),
        settings=feature_settings,
        provenance=provenance,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in the order of one thread: the same predictor on any number of cores. Batches this
    small gain little from more threads, and lose much where the cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _network(settings: TrainingSettings, generator: torch.Generator) -> nn.Sequential:
    sizes = [len(FEATURE_NAMES), *settings.hidden_sizes, 1]
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(sizes):
        linear = nn.Linear(num_in, num_out)
        # torch's default bounds, drawn from our own generator so that nothing global is touched.
        bound = num_in**-0.5
        for parameter in (linear.weight, linear.bias):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
