"""Trains predictors. No other core file needs torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from sglang_hvd._native import NUM_BUCKETS, bucket_of
from sglang_hvd.config import WORTH_LEN
from sglang_hvd.payoff.features import FEATURE_NAMES, PAPER_FEATURES, POSITION_FEATURES
from sglang_hvd.payoff.predictor import AcceptancePredictor, Kind
from sglang_hvd.replay.core.training_rows import Lessons


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How a predictor is fitted. The defaults are those of kind survival.

    batch_size: rows per update.
    num_row_visits: rows of all epochs together. It decides the number of epochs, from min_epochs to
        max_epochs: on little data more epochs fit the noise, on much data fewer suffice.
    weight_decay: of AdamW.
    input_dropout: probability, below 1, that an update does not see an input of a row. The input is
        then at its mean, and the others are scaled up. The inputs of a draft's tokens are always
        seen. Dropout keeps the predictor from relying on a few inputs, since what they tell about
        the training texts may not hold for others.
    worth_weight: weight of the likelihood that a draft is, or is not, worth its verification by the
        paper's threshold, relative to the likelihood of its tokens. Kind mlp has neither.
    """

    hidden_sizes: tuple[int, ...] = (96, 32)
    learning_rate: float = 2e-3
    batch_size: int = 1024
    num_row_visits: int = 3_000_000
    min_epochs: int = 4
    max_epochs: int = 20
    weight_decay: float = 1e-2
    input_dropout: float = 0.05
    worth_weight: float = 1.0
    seed: int = 42

    @classmethod
    def of_paper(cls, num_rows: int, batch_size: int | None = None) -> "TrainingSettings":
        """The paper's settings (table 10), with 20 epochs.

        batch_size: None: the paper's 65536, reduced so that an epoch has at least 256 updates. Adam
            needs some thousand updates, which only the paper's amount of data gives otherwise.
        """
        return cls(
            hidden_sizes=(256, 256),
            learning_rate=1e-3,
            batch_size=batch_size or max(1, min(65536, num_rows // 256)),
            min_epochs=20,
            weight_decay=0,
            input_dropout=0,
            worth_weight=0,
        )

    def num_epochs(self, num_rows: int) -> int:
        wanted = round(self.num_row_visits / max(1, num_rows))
        return min(max(wanted, self.min_epochs), self.max_epochs)


def train(
    lessons: Lessons,
    *,
    kind: Kind,
    feature_settings: Mapping[str, float | str],
    provenance: Mapping[str, object],
    settings: TrainingSettings | None = None,
) -> AcceptancePredictor:
    """Fits a predictor, deterministically.

    Kind mlp, the paper's, minimises the squared error of the accepted length. Kind survival
    maximises the likelihood of the judged tokens: that the accepted tokens are accepted, and the
    one after them is not. A draft that was accepted completely does not show what would have
    followed, so drafts of all lengths can be learned from together. It also maximises the
    likelihood that a draft is, or is not, worth its verification, if the draft is long enough (see
    worth_weight).

    feature_settings, provenance: stored with the predictor.

    Raises ValueError if there is nothing to learn from.
    """
    if not len(lessons):
        raise ValueError("training needs at least one row")
    if settings is None:
        settings = TrainingSettings.of_paper(len(lessons)) if kind == "mlp" else TrainingSettings()
    names = PAPER_FEATURES if kind == "mlp" else FEATURE_NAMES
    features = lessons.features[:, : len(names)]
    mean = features.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = features.std(axis=0, dtype=np.float64).astype(np.float32)
    std[std < 1e-6] = 1  # a feature that never varies
    with _one_thread():
        generator = torch.Generator().manual_seed(settings.seed)
        num_outputs = 1 if kind == "mlp" else NUM_BUCKETS + len(POSITION_FEATURES)
        network = _network((len(names), *settings.hidden_sizes, num_outputs), generator)
        inputs = torch.from_numpy((features - mean) / std)
        _fit(network, inputs, lessons, kind, settings, generator)
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    return AcceptancePredictor(
        kind=kind,
        mean=mean,
        std=std,
        weights=tuple(layer.weight.detach().numpy().copy() for layer in layers),
        biases=tuple(layer.bias.detach().numpy().copy() for layer in layers),
        settings=feature_settings,
        provenance=provenance,
    )


@dataclass(frozen=True, slots=True)
class JudgedTokens:
    """The tokens of Lessons as tensors.

    first, num: int64[num_rows], index of a row's first judged token, and their number.
    positions: float32[num_tokens, len(POSITION_FEATURES)].
    buckets: int64[num_tokens], of the tokens' depths.
    is_accepted: bool[num_tokens].
    head: float32[num_rows, k, len(POSITION_FEATURES)], the first tokens of each draft, judged or
        not, which decide whether it is worth its verification.
    head_buckets: int64[k].
    is_long, is_worth: bool[num_rows], whether a draft has k tokens, and whether all were accepted.
    """

    first: torch.Tensor
    num: torch.Tensor
    positions: torch.Tensor
    buckets: torch.Tensor
    is_accepted: torch.Tensor
    head: torch.Tensor
    head_buckets: torch.Tensor
    is_long: torch.Tensor
    is_worth: torch.Tensor

    @classmethod
    def of(cls, lessons: Lessons) -> "JudgedTokens":
        num, first = lessons.num_judged, lessons.first
        depths = np.arange(len(lessons.positions)) - np.repeat(first, num)
        longest = max(int(num.max()), lessons.head.shape[1])
        buckets = np.array([bucket_of(depth) for depth in range(longest)])
        return cls(
            first=torch.from_numpy(first),
            num=torch.from_numpy(num.astype(np.int64)),
            positions=torch.from_numpy(lessons.positions),
            buckets=torch.from_numpy(buckets[depths]),
            is_accepted=torch.from_numpy(depths < np.repeat(lessons.accepted_lens, num)),
            head=torch.from_numpy(lessons.head),
            head_buckets=torch.from_numpy(buckets[: lessons.head.shape[1]]),
            is_long=torch.from_numpy(lessons.is_long),
            is_worth=torch.from_numpy(lessons.accepted_lens >= WORTH_LEN),
        )

    def log_likelihood(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Log likelihood of each row's judged tokens: float32[len(batch)].

        outputs: float32[len(batch), NUM_BUCKETS + len(POSITION_FEATURES)], of the network.
        batch: int64[num_rows], indices of rows.
        """
        num = self.num[batch]
        row = torch.repeat_interleave(torch.arange(len(batch)), num)
        before = num.cumsum(0) - num
        token = torch.arange(len(row)) + (self.first[batch] - before)[row]
        of_row = outputs[row]
        log_odds = of_row.gather(1, self.buckets[token, None])[:, 0]
        log_odds = log_odds + (of_row[:, NUM_BUCKETS:] * self.positions[token]).sum(dim=1)
        log_probs = nn.functional.logsigmoid(
            torch.where(self.is_accepted[token], log_odds, -log_odds)
        )
        return torch.zeros(len(batch)).index_add(0, row, log_probs)

    def worth_log_likelihood(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Log likelihood that each draft is, or is not, worth its verification, 0 for drafts that
        are too short to be: float32[len(batch)]. Takes the arguments of log_likelihood."""
        log_odds = outputs[:, self.head_buckets]
        log_odds = log_odds + (outputs[:, None, NUM_BUCKETS:] * self.head[batch]).sum(dim=2)
        # Below certainty, because the log of the remainder must be finite.
        log_prob = nn.functional.logsigmoid(log_odds).sum(dim=1).clamp(max=-1e-6)
        log_prob = torch.where(self.is_worth[batch], log_prob, torch.log1p(-log_prob.exp()))
        return torch.where(self.is_long[batch], log_prob, torch.zeros(()))


def _fit(
    network: nn.Sequential,
    inputs: torch.Tensor,
    lessons: Lessons,
    kind: Kind,
    settings: TrainingSettings,
    generator: torch.Generator,
) -> None:
    judged = None if kind == "mlp" else JudgedTokens.of(lessons)
    accepted_lens = torch.from_numpy(lessons.accepted_lens)
    weights = torch.from_numpy(lessons.weights)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        shown = inputs[batch]
        if settings.input_dropout:
            is_kept = torch.rand(shown.shape, generator=generator) >= settings.input_dropout
            shown = shown * is_kept / (1 - settings.input_dropout)
        outputs = network(shown)
        if judged is None:
            return (weights[batch] * (outputs[:, 0] - accepted_lens[batch]).square()).mean()
        log_likelihood = judged.log_likelihood(outputs, batch)
        if settings.worth_weight:
            of_worth = judged.worth_log_likelihood(outputs, batch)
            log_likelihood = log_likelihood + settings.worth_weight * of_worth
        return -(weights[batch] * log_likelihood).mean()

    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    num_epochs = settings.num_epochs(len(lessons))
    num_updates = num_epochs * -(-len(lessons) // settings.batch_size)
    # The paper's learning rate is constant, so kind mlp has no schedule.
    schedule = (
        None
        if kind == "mlp"
        else torch.optim.lr_scheduler.OneCycleLR(
            optimizer, settings.learning_rate, total_steps=num_updates + 1, pct_start=0.1
        )
    )
    for _ in range(num_epochs):
        for batch in torch.randperm(len(lessons), generator=generator).split(settings.batch_size):
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Computes with one thread, so that any number of cores gives the same predictor. Batches this
    small gain little from more threads, and lose much if others use the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _network(sizes: tuple[int, ...], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(sizes):
        linear = nn.Linear(num_in, num_out)
        # The bounds are torch's defaults. The generator is ours, so no global state changes.
        bound = num_in**-0.5
        for parameter in (linear.weight, linear.bias):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
