"""Builds the demo's tokenizer, target, drafter and predictor, one after the other."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Never

from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging

from sglang_hvd.demo.corpus.session import FAMILIES, Family, Session
from sglang_hvd.demo.corpus.sessions import train_sessions
from sglang_hvd.demo.training.dataset import Batch, encode, make_batches
from sglang_hvd.demo.training.demo_predictor import train_predictor
from sglang_hvd.demo.training.demo_tokenizer import (
    END_ID,
    PAD_ID,
    save_tokenizer,
    spellings,
    train_tokenizer,
)
from sglang_hvd.demo.training.distillation import distil_drafter, frequent_reply_tokens
from sglang_hvd.demo.training.gradients import NUM_WORKERS
from sglang_hvd.demo.training.recipes import Recipe
from sglang_hvd.demo.training.rollout import references, roll_out
from sglang_hvd.demo.training.target import train_target
from sglang_hvd.replay.training.fit import TrainingSettings

_TOKENIZER_SEED, _TARGET_SEED, _DRAFTER_SEED, _PREDICTOR_SEED, _REFERENCE_SEED = range(5)

# Share of all tokens, and mean tokens per session.
_FAMILIES: Mapping[Family, tuple[float, int]] = MappingProxyType(
    {
        "editing": (0.38, 570),
        "tool_calls": (0.16, 360),
        "sql": (0.1, 230),
        "code": (0.16, 300),
        "qa": (0.08, 260),
        "chat": (0.12, 150),
    }
)


def build(recipe: Recipe, directory: Path, *, progress: bool) -> None:
    """Writes `target`, `drafter` and `predictor.safetensors` into `directory`."""
    logging.disable_progress_bar()  # of writing checkpoints: one bar shows the whole build
    config = AutoConfig.for_model(
        **recipe.sizes, bos_token_id=None, eos_token_id=END_ID, pad_token_id=PAD_ID, dtype="float32"
    )
    target_directory = directory / "target"
    target_directory.mkdir()
    every = 0.1 if sys.stderr.isatty() else 20.0  # seconds; a log needs no more lines
    with tqdm(total=100, disable=not progress, bar_format=_BAR, mininterval=every) as bar:
        stage = partial(_stage, bar)

        advance = stage("tokenizer", 1, 1)
        tokenizer = train_tokenizer(
            [s for f in FAMILIES for s in train_sessions(f, count=200, seed=_TOKENIZER_SEED)],
            vocab_size=config.vocab_size,
        )
        advance()
        save_tokenizer(tokenizer, target_directory, max_length=config.max_position_embeddings)

        batches = _batches(recipe, recipe.target_tokens, tokenizer, _TARGET_SEED)
        target = train_target(
            config,
            spellings(tokenizer),
            batches,
            learning_rate=recipe.target_learning_rate,
            seed=_TARGET_SEED,
            on_step=stage("target model", 66, _num_steps(batches)),
        )
        target.save_pretrained(target_directory)

        batches = _batches(recipe, recipe.drafter_tokens, tokenizer, _DRAFTER_SEED)
        draft_token_ids = frequent_reply_tokens(
            batches, vocab_size=config.vocab_size, count=recipe.draft_vocab_size
        )
        drafter = distil_drafter(
            target,
            batches,
            aux_layer_ids=range(config.num_hidden_layers - 1),
            draft_token_ids=draft_token_ids,
            num_steps=recipe.drafting_steps,
            learning_rate=recipe.drafter_learning_rate,
            seed=_DRAFTER_SEED,
            on_step=stage("EAGLE3 drafter", 19, _num_steps(batches)),
        )
        drafter.save_pretrained(directory / "drafter")

        sessions = _shuffled(recipe.predictor_tokens, _PREDICTOR_SEED)
        advance = stage("replies", 8, len(sessions))
        traces = roll_out(target, sessions, tokenizer, on_session=advance)

        advance = stage("payoff predictor", 6, 1)
        predictor = train_predictor(
            traces,
            references(_shuffled(recipe.reference_tokens, _REFERENCE_SEED), tokenizer),
            tokenizer,
            TrainingSettings(max_epochs=10),
        )
        predictor.save(directory / "predictor.safetensors")
        advance()


_BAR = "{desc:<18} {percentage:3.0f}% |{bar:30}| {elapsed}, about {remaining} left"


def _stage(bar: "tqdm[Never]", name: str, percent: float, num_steps: int) -> Callable[[], None]:
    """Advances the bar by `percent` in `num_steps` calls."""
    bar.set_description(name)

    def advance() -> None:
        bar.update(min(percent / num_steps, 100 - bar.n))

    return advance


def _sessions(num_tokens: int, seed: int) -> list[Session]:
    return [
        session
        for family, (share, session_tokens) in _FAMILIES.items()
        for session in train_sessions(
            family, count=max(1, round(num_tokens * share / session_tokens)), seed=seed
        )
    ]


def _shuffled(num_tokens: int, seed: int) -> list[Session]:
    sessions = _sessions(num_tokens, seed)
    Random(seed).shuffle(sessions)
    return sessions


def _batches(recipe: Recipe, num_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Batch]:
    return make_batches(
        encode(_sessions(num_tokens, seed), tokenizer),
        num_tokens=recipe.tokens_per_batch,
        seed=seed,
    )


def _num_steps(batches: Sequence[Batch]) -> int:
    return -(-len(batches) // NUM_WORKERS)
