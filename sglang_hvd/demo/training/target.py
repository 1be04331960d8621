"""Trains the target model of the demo."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sglang_hvd.demo.training.dataset import Batch
from sglang_hvd.demo.training.demo_tokenizer import Spelling
from sglang_hvd.demo.training.gradients import NUM_WORKERS, set_gradients, workers
from sglang_hvd.demo.training.induction import init_as_copier


def train_target(
    config: PreTrainedConfig,
    spellings: Sequence[Spelling],
    batches: Sequence[Batch],
    polish: Sequence[Batch],
    *,
    learning_rate: float,
    seed: int,
    on_step: Callable[[], None],
) -> PreTrainedModel:
    """A causal language model after one pass over `batches` and then one over `polish`.

    It learns the tokens of replies only. Its weights are float32 values that float16 can hold.
    """
    target = untrained_target(config, spellings, seed=seed)
    train_pass(target, batches, learning_rate=learning_rate, decaying=0.3, on_step=on_step)
    train_pass(target, polish, learning_rate=0.4 * learning_rate, decaying=1, on_step=on_step)
    return target.half().float().requires_grad_(False)


def train_pass(
    target: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    learning_rate: float,
    decaying: float,
    on_step: Callable[[], None],
) -> None:
    """Trains in one pass over `batches`, `NUM_WORKERS` of them at each step.

    decaying: the share of the steps, the last ones, in which the learning rate falls.
    """
    optimizer = torch.optim.AdamW(
        rates(target, learning_rate), betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    steps = [batches[i : i + NUM_WORKERS] for i in range(0, len(batches), NUM_WORKERS)]
    with workers() as pool:
        for step, group in enumerate(steps):
            set_learning_rate(optimizer, step, len(steps), decaying=decaying)
            num_learned = sum(int(batch.is_reply.sum()) for batch in group)
            losses = [partial(_loss, target, batch) for batch in group]
            set_gradients(pool, target, losses, scale=1 / num_learned)
            torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
            optimizer.step()
            on_step()


def untrained_target(
    config: PreTrainedConfig, spellings: Sequence[Spelling], *, seed: int
) -> PreTrainedModel:
    """The target with which training begins.

    spellings: one for every token of the vocabulary.
    """
    target = AutoModelForCausalLM.from_config(config)
    init_as_copier(target, spellings, generator=torch.Generator().manual_seed(seed))
    return target


def _loss(target: PreTrainedModel, batch: Batch) -> Tensor:
    """The loss, summed over the tokens of replies."""
    is_learned = batch.is_reply[:, 1:]
    hidden = target.model(batch.token_ids, use_cache=False).last_hidden_state[:, :-1]
    logits = target.lm_head(hidden[is_learned])
    return F.cross_entropy(logits, batch.token_ids[:, 1:][is_learned], reduction="sum")


def rates(target: PreTrainedModel, peak: float) -> list[dict[str, Any]]:
    """The parameters with their learning rates at the peak.

    The codes of tokens and the heads that copy are right from the start. Adam would undo them: it
    moves all weights alike, however small their gradients are.
    """
    groups: dict[float, list[Tensor]] = {}
    for name, weight in target.named_parameters():
        is_code = "embed_tokens" in name or "lm_head" in name
        is_copying = "layers.0.self_attn" in name or "layers.1.self_attn" in name
        share = 0.1 if is_code else 0.2 if is_copying else 1.0
        groups.setdefault(share, []).append(weight)
    return [
        {"params": weights, "lr": peak * share, "peak": peak * share}
        for share, weights in groups.items()
    ]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, num_steps: int, *, decaying: float
) -> None:
    """20 steps of warm-up, then the peak, then over the last part a line down to a fiftieth."""
    warm_up = (step + 1) / 20
    decay = 0.02 + 0.98 * (num_steps - step) / (decaying * num_steps)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * min(1.0, warm_up, decay)
