"""Trains a predictor that ships in the package, and says how good it is.

    python -m sglang_hvd.replay.train_default --traces DIR --tokenizer tokenizer.json
        [--cache-mode votes|paper]

DIR holds text traces (*.jsonl, see traces.py); files without a permissive licence are left out.
The last quarter of each file's sessions is held out. Training has two rounds: first on the cycles
of decoding with the model drafter alone and with the cache alone, then on these and on the cycles
that the first predictor's own decisions lead to, whose recent-history features are like those of
serving.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, CacheMode, HvdConfig, Policy
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, PayoffPredictor, TokenClasses
from sglang_hvd.payoff.predictor import feature_settings
from sglang_hvd.payoff.training import TrainingSettings, train
from sglang_hvd.replay.metrics import PayoffQuality, payoff_quality
from sglang_hvd.replay.simulator import (
    ReplayedCycle,
    ReplaySummary,
    replay,
    summarize,
    training_rows,
)
from sglang_hvd.replay.traces import (
    TextTrace,
    load_tokenizer,
    read_text_traces,
    token_strings,
    tokenize,
)
from sglang_hvd.suffix_cache import SuffixCache

# The model drafter: the paper's EAGLE3 tree (table 7), and accepted tokens in each of its cycles,
# between those with the paper's three models (appendix C: 3.2, 2.2 and 0.8).
_NUM_MODEL_STEPS = 8
_NUM_MODEL_ACCEPTED = 2

# Longest cache drafts in training, in turns: what is verified of a draft depends on the server's
# verify width. Quality is measured at the default width.
_DRAFT_LIMITS = (31, 7, 31, 15, 31, 63)

# So that the longest recordings do not outweigh all others. Per file, policy and round.
_MAX_ROWS = 20_000

_Rows = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of text traces from one source."""

    path: Path
    source: TextTrace  # its first line
    num_sessions: int
    heldout_sessions: frozenset[str]

    @classmethod
    def open(cls, path: Path) -> "Recording":
        lines = list(read_text_traces(path))
        if not lines:
            raise ValueError(f"{path}: no traces")
        sessions = list(dict.fromkeys(line.session for line in lines))
        heldout = sessions[-max(1, len(sessions) // 4) :]
        return cls(path, lines[0], len(sessions), frozenset(heldout))

    @property
    def is_permissive(self) -> bool:
        """The repository is MIT or Apache-2.0, and no text in it is for non-commercial use only."""
        licence = self.source.licence
        return licence.startswith(("MIT", "Apache-2.0")) and "NC" not in licence


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    tokenizer: Tokenizer
    eos_token_id: int
    token_classes: TokenClasses

    @classmethod
    def load(cls, path: Path, eos_token: str) -> "Vocabulary":
        tokenizer = load_tokenizer(path)
        eos_token_id = tokenizer.token_to_id(eos_token)
        if eos_token_id is None:
            raise ValueError(f"{path} has no token {eos_token}: set --eos-token")
        return cls(tokenizer, eos_token_id, TokenClasses.from_strings(token_strings(tokenizer)))


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The cycles of a recording under a policy: of training and of held-out sessions."""

    training: list[ReplayedCycle]
    heldout: list[ReplayedCycle]


def replay_recording(
    recording: Recording,
    vocabulary: Vocabulary,
    config: HvdConfig,
    predictor: PayoffPredictor | None = None,
) -> Replayed:
    """Replays a recording in order, its earlier requests in the shared cache of the later ones."""
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=predictor,
        token_classes=vocabulary.token_classes,
        num_model_steps=_NUM_MODEL_STEPS,
        max_cache_draft_tokens=DEFAULT_VERIFY_WIDTH - 1,
    )
    print(f"{recording.path.name}: replay, policy {config.policy}", file=sys.stderr)
    replayed = Replayed([], [])
    lines = read_text_traces(recording.path)
    traces = tokenize(lines, vocabulary.tokenizer, eos_token_id=vocabulary.eos_token_id)
    for index, trace in enumerate(traces):
        is_heldout = trace.session in recording.heldout_sessions
        limit = None if is_heldout else _DRAFT_LIMITS[index % len(_DRAFT_LIMITS)]
        cycles = replay(
            trace,
            drafter,
            num_model_accepted=_NUM_MODEL_ACCEPTED,
            max_cache_draft_tokens=limit,
        )
        (replayed.heldout if is_heldout else replayed.training).extend(cycles)
    return replayed


def train_default(
    recordings: Sequence[Recording],
    vocabulary: Vocabulary,
    cache_mode: CacheMode,
    settings: TrainingSettings,
) -> PayoffPredictor:
    """The predictor after both rounds, with its provenance but without its quality."""
    policies: tuple[Policy, ...] = ("model", "cache")
    configs = [HvdConfig(policy=policy, cache_mode=cache_mode) for policy in policies]
    off_policy = [
        _sample(replay_recording(recording, vocabulary, config).training)
        for config in configs
        for recording in recordings
    ]
    first = _train(off_policy, recordings, vocabulary, cache_mode, settings)
    config = HvdConfig(cache_mode=cache_mode)
    on_policy = [
        _sample(replay_recording(recording, vocabulary, config, first).training)
        for recording in recordings
    ]
    return _train([*off_policy, *on_policy], recordings, vocabulary, cache_mode, settings)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A predictor on the held-out sessions of a recording.

    quality: of its predictions at the starts of the cycles that its own decisions lead to.
    policies: what each policy made of the sessions.
    """

    recording: Recording
    quality: PayoffQuality
    policies: Mapping[str, ReplaySummary]


def evaluate(
    recording: Recording,
    vocabulary: Vocabulary,
    cache_mode: CacheMode,
    predictor: PayoffPredictor,
) -> Evaluation:
    """Replays the recording under every policy."""
    configs = [HvdConfig(policy=policy, cache_mode=cache_mode) for policy in get_args(Policy)]
    heldout = {
        config.policy: replay_recording(recording, vocabulary, config, predictor).heldout
        for config in configs
    }
    features, accepted_lens = training_rows(heldout["payoff"])
    return Evaluation(
        recording,
        payoff_quality(predictor.predict(features), accepted_lens, threshold=HvdConfig().threshold),
        {policy: summarize(cycles) for policy, cycles in heldout.items()},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the predictor that ships in the package.")
    parser.add_argument(
        "--traces", type=Path, required=True, help="folder of text traces (*.jsonl)"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json for them")
    parser.add_argument("--eos-token", default="<|im_end|>", help="token that ends every output")
    parser.add_argument("--cache-mode", choices=get_args(CacheMode), default=HvdConfig().cache_mode)
    parser.add_argument(
        "--output", type=Path, help="file to write (default: the one that ships for this mode)"
    )
    parser.add_argument("--epochs", type=int, default=TrainingSettings().num_epochs)
    given = parser.parse_args(arguments)
    output = given.output or DEFAULT_PREDICTORS[given.cache_mode]
    settings = TrainingSettings(num_epochs=given.epochs)
    try:
        vocabulary = Vocabulary.load(given.tokenizer, given.eos_token)
        print(_run(given.traces, vocabulary, given.cache_mode, output, settings))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(
    traces: Path,
    vocabulary: Vocabulary,
    cache_mode: CacheMode,
    output: Path,
    settings: TrainingSettings,
) -> str:
    if not output.parent.is_dir():
        raise ValueError(f"{output}: no folder to write it to")
    recordings = [Recording.open(path) for path in sorted(traces.glob("*.jsonl"))]
    recordings = [recording for recording in recordings if recording.is_permissive]
    if not recordings:
        raise ValueError(f"{traces}: no traces (*.jsonl) with a permissive licence")
    predictor = train_default(recordings, vocabulary, cache_mode, settings)
    evaluations = [
        evaluate(recording, vocabulary, cache_mode, predictor) for recording in recordings
    ]
    quality = [
        {"dataset": e.recording.source.dataset, "family": e.recording.source.family}
        | asdict(e.quality)
        for e in evaluations
    ]
    provenance = {**predictor.provenance, "heldout": quality}
    replace(predictor, provenance=provenance).save(output)
    return _report(evaluations)


def _sample(cycles: Iterable[ReplayedCycle], seed: int = 42) -> _Rows:
    features, accepted_lens = training_rows(cycles)
    if len(features) > _MAX_ROWS:
        rows = np.random.default_rng(seed).choice(len(features), _MAX_ROWS, replace=False)
        features, accepted_lens = features[rows], accepted_lens[rows]
    return features, accepted_lens


def _train(
    samples: Sequence[_Rows],
    recordings: Sequence[Recording],
    vocabulary: Vocabulary,
    cache_mode: CacheMode,
    settings: TrainingSettings,
) -> PayoffPredictor:
    features = np.concatenate([rows for rows, _ in samples])
    accepted_lens = np.concatenate([labels for _, labels in samples])
    return train(
        features,
        accepted_lens,
        feature_settings=feature_settings(HvdConfig(cache_mode=cache_mode)),
        provenance={
            "datasets": [
                {
                    "dataset": recording.source.dataset,
                    "repository": f"github.com/{recording.source.source_repo}",
                    "licence": recording.source.licence,
                    "num_sessions": recording.num_sessions,
                    "num_heldout_sessions": len(recording.heldout_sessions),
                }
                for recording in recordings
            ],
            "num_rows": len(features),
            "num_model_accepted": _NUM_MODEL_ACCEPTED,
            "token_classes": vocabulary.token_classes.fingerprint,
            "training": asdict(settings),
        },
        settings=settings,
    )


def _report(evaluations: Sequence[Evaluation]) -> str:
    """Markdown tables; their last lines and the policies are means over the families."""
    rows = [
        (e.recording.source.family, e.recording.source.dataset, _shares(e.quality))
        for e in evaluations
    ]
    by_family: dict[str, list[list[float | None]]] = {}
    for family, _, shares in rows:
        by_family.setdefault(family, []).append(shares)
    rows.append(("mean over families", "", _mean([_mean(rows) for rows in by_family.values()])))
    lines = [
        "| family | dataset | worth verifying | precision | recall | average precision |",
        "|---|---|---|---|---|---|",
        *(f"| {family} | {name} | {_cells(shares)} |" for family, name, shares in rows),
        "",
        "| policy | cycles per 1K tokens | mean accepted length | cache share |",
        "|---|---|---|---|",
    ]
    for policy in evaluations[0].policies:
        figures: dict[str, list[list[float | None]]] = {}
        for e in evaluations:
            figures.setdefault(e.recording.source.family, []).append(_figures(e.policies[policy]))
        means = _mean([_mean(family) for family in figures.values()])
        lines.append(f"| {policy} | {_cells(means)} |")
    return "\n".join(lines)


def _shares(quality: PayoffQuality) -> list[float | None]:
    return [quality.oracle_share, quality.precision, quality.recall, quality.average_precision]


def _figures(summary: ReplaySummary) -> list[float | None]:
    return [summary.cycles_per_1k_tokens, summary.mean_accepted_len, summary.cache_share]


def _mean(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Mean of each column over the rows that have a value there."""
    columns = [
        [value for value in column if value is not None] for column in zip(*rows, strict=True)
    ]
    return [sum(column) / len(column) if column else None for column in columns]


def _cells(values: Sequence[float | None]) -> str:
    return " | ".join("-" if value is None else f"{value:.3g}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
