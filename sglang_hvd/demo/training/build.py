"""Builds the demo's tokenizer, target, drafter and predictor, one after the other."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Never

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from sglang_hvd.demo.corpus.session import FAMILIES, Family
from sglang_hvd.demo.corpus.sessions import train_sessions
from sglang_hvd.demo.provenance import metadata_of, provenance_of, sort_metadata
from sglang_hvd.demo.training.dataset import MOSTLY_HARD, Batch, batches_of, sessions_of
from sglang_hvd.demo.training.demo_predictor import cycle_rows, train_predictor
from sglang_hvd.demo.training.demo_tokenizer import (
    END_ID,
    PAD_ID,
    save_tokenizer,
    spellings,
    train_tokenizer,
)
from sglang_hvd.demo.training.distillation import distil_drafter, frequent_reply_tokens
from sglang_hvd.demo.training.gradients import NUM_WORKERS
from sglang_hvd.demo.training.measured_quality import (
    accepted_drafts,
    average_precision,
    exact_replies,
)
from sglang_hvd.demo.training.recipes import SEEDS, Recipe
from sglang_hvd.demo.training.rollout import references, roll_out
from sglang_hvd.demo.training.target import train_target, untrained_target
from sglang_hvd.replay.training.fit import TrainingSettings


def build(recipe: Recipe, directory: Path, *, progress: bool) -> None:
    """Writes `target`, `drafter` and `predictor.safetensors` into `directory`.

    Each file says in its metadata how it was made, and how good it is on sessions that were not
    trained on. With `progress` the quality is printed, too.
    """
    logging.disable_progress_bar()  # of writing checkpoints: one bar shows the whole build
    provenance = provenance_of(recipe)
    config = target_config(recipe)
    every = 0.1 if sys.stderr.isatty() else 20.0  # seconds; a log needs no more lines
    with tqdm(total=100, disable=not progress, bar_format=_BAR, mininterval=every) as bar:
        stage = partial(_stage, bar)

        advance = stage("tokenizer", 1, 1)
        tokenizer = build_tokenizer(recipe)
        advance()
        target_directory = directory / "target"
        target_directory.mkdir()
        save_tokenizer(tokenizer, target_directory, max_length=config.max_position_embeddings)

        batches = batches_of(
            recipe.target_tokens,
            SEEDS["target"],
            tokenizer,
            tokens_per_batch=recipe.tokens_per_batch,
        )
        polish = batches_of(
            recipe.polish_tokens,
            SEEDS["polish"],
            tokenizer,
            tokens_per_batch=recipe.tokens_per_batch,
            shares=MOSTLY_HARD,
        )
        target = train_target(
            config,
            spellings(tokenizer),
            batches,
            polish,
            learning_rate=recipe.target_learning_rate,
            seed=SEEDS["target"],
            on_step=stage("target model", 80, _num_steps(batches) + _num_steps(polish)),
        )
        advance = stage("quality", 2, 1)
        exact = exact_replies(target, tokenizer, num_sessions=recipe.measured_sessions)
        advance()
        untrained = untrained_target(config, spellings(tokenizer), seed=SEEDS["target"])
        _save(
            target,
            target_directory,
            provenance | {"untrained_norms": norms(untrained), "exact_replies": exact},
        )

        batches = batches_of(
            recipe.drafter_tokens,
            SEEDS["drafter"],
            tokenizer,
            tokens_per_batch=recipe.tokens_per_batch,
        )
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
            seed=SEEDS["drafter"],
            on_step=stage("EAGLE3 drafter", 11, _num_steps(batches)),
        )
        advance = stage("quality", 1, 1)
        accepted = accepted_drafts(
            drafter,
            target,
            tokenizer,
            num_steps=recipe.drafting_steps,
            num_sessions=recipe.measured_sessions,
        )
        advance()
        _save(drafter, directory / "drafter", provenance | {"accepted_drafts": accepted})

        sessions = sessions_of(recipe.predictor_tokens, SEEDS["replies"])
        advance = stage("replies", 2, len(sessions))
        replies = roll_out(target, sessions, tokenizer, on_session=advance)

        advance = stage("payoff predictor", 3, 1)
        replies += references(sessions_of(recipe.reference_tokens, SEEDS["references"]), tokenizer)
        predictor = train_predictor(
            cycle_rows(replies, tokenizer), TrainingSettings(max_epochs=10), {}
        )
        precision = average_precision(predictor, tokenizer, num_sessions=recipe.measured_sessions)
        file = directory / "predictor.safetensors"
        replace(predictor, provenance=provenance | {"average_precision": precision}).save(file)
        sort_metadata(file)
        advance()
    if progress:
        print(f"replies equal to the reference: {_listed(exact)}")
        print(f"accepted of {recipe.drafting_steps} drafted tokens: {_listed(accepted)}")
        print(f"average precision of the predictor: {precision:.3f}")


def target_config(recipe: Recipe) -> PreTrainedConfig:
    return AutoConfig.for_model(
        **recipe.sizes, bos_token_id=None, eos_token_id=END_ID, pad_token_id=PAD_ID, dtype="float32"
    )


def build_tokenizer(recipe: Recipe) -> Tokenizer:
    sessions = [
        session
        for family in FAMILIES
        for session in train_sessions(
            family, count=recipe.tokenizer_sessions, seed=SEEDS["tokenizer"]
        )
    ]
    return train_tokenizer(sessions, vocab_size=recipe.sizes["vocab_size"])


def norms(model: PreTrainedModel) -> dict[str, float]:
    """The Euclidean norm of each weight, to four digits, which are the same on every machine."""
    return {name: float(f"{weight.norm().item():.4g}") for name, weight in model.named_parameters()}


def _save(model: PreTrainedModel, directory: Path, provenance: Mapping[str, object]) -> None:
    """Writes a checkpoint with float16 weights. Its configuration says float32, as it is served."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata_of(provenance))
    sort_metadata(file)


_BAR = "{desc:<18} {percentage:3.0f}% |{bar:30}| {elapsed}, about {remaining} left"


def _stage(bar: "tqdm[Never]", name: str, percent: float, num_steps: int) -> Callable[[], None]:
    """Advances the bar by `percent` in `num_steps` calls."""
    bar.set_description(name)

    def advance() -> None:
        bar.update(min(percent / num_steps, 100 - bar.n))

    return advance


def _listed(by_family: Mapping[Family, float]) -> str:
    return ", ".join(f"{family} {value:.3f}" for family, value in by_family.items())


def _num_steps(batches: Sequence[Batch]) -> int:
    return -(-len(batches) // NUM_WORKERS)
