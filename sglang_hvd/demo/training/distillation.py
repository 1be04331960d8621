"""Distils the EAGLE3 drafter from the target's states and output distributions."""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sglang_hvd.demo.training.dataset import Batch
from sglang_hvd.demo.training.eagle3 import LlamaForCausalLMEagle3, drafter_config
from sglang_hvd.demo.training.gradients import NUM_WORKERS, set_gradients, workers
from sglang_hvd.demo.training.induction import init_drafter_as_copier
from sglang_hvd.demo.training.target import set_learning_rate


def frequent_reply_tokens(batches: Sequence[Batch], *, vocab_size: int, count: int) -> Tensor:
    """The draft vocabulary: the tokens that replies use most, int64 [count], ascending."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for batch in batches:
        counts += torch.bincount(batch.token_ids[batch.is_reply], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def distil_drafter(
    target: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    aux_layer_ids: Sequence[int],
    draft_token_ids: Tensor,
    num_steps: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[], None],
) -> LlamaForCausalLMEagle3:
    """A drafter after one pass over `batches` with `num_steps` drafting steps unrolled in each.

    aux_layer_ids: layers after which the drafter reads the target's states.
    draft_token_ids: int64 [draft vocabulary], ascending. The target's distribution over these
        tokens is the label. Later drafting steps weigh less (EAGLE-3 section 3.2).

    Its weights are float32 values that float16 can hold.
    """
    config = drafter_config(
        target.config, aux_layer_ids=aux_layer_ids, draft_vocab_size=len(draft_token_ids)
    )
    drafter = LlamaForCausalLMEagle3(config, draft_token_ids)
    _init(drafter, target, draft_token_ids, torch.Generator().manual_seed(seed))
    weights = [{"params": list(drafter.parameters()), "lr": learning_rate, "peak": learning_rate}]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    steps = [batches[i : i + NUM_WORKERS] for i in range(0, len(batches), NUM_WORKERS)]
    with workers() as pool:
        for step, group in enumerate(steps):
            set_learning_rate(optimizer, step, len(steps), decaying=0.3)
            num_learned = sum(int(_drafted_rows(batch).sum()) for batch in group)
            losses = [
                partial(
                    _loss,
                    drafter,
                    target,
                    batch,
                    aux_layer_ids=aux_layer_ids,
                    draft_token_ids=draft_token_ids,
                    num_steps=num_steps,
                )
                for batch in group
            ]
            set_gradients(pool, drafter, losses, scale=1 / num_learned)
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            on_step()
    return drafter.half().float().requires_grad_(False)


def _loss(
    drafter: LlamaForCausalLMEagle3,
    target: PreTrainedModel,
    batch: Batch,
    *,
    aux_layer_ids: Sequence[int],
    draft_token_ids: Tensor,
    num_steps: int,
) -> Tensor:
    """Cross entropy with the target's distribution, summed over the drafted tokens."""
    with torch.no_grad():
        embeds, aux, normed = target_states(target, batch.token_ids, aux_layer_ids=aux_layer_ids)
        is_learned = _drafted_rows(batch)
        logits = target.lm_head(normed[is_learned])
        best = logits.argmax(-1)
        logits = logits[:, draft_token_ids]
        # The drafter cannot say a token outside its vocabulary, so it learns nothing there.
        is_sayable = torch.isin(best, draft_token_ids)
        wanted = logits.softmax(-1) * is_sayable[:, None]
    loss = torch.zeros(())
    for depth, hidden in enumerate(drafter.unroll(embeds, aux, num_steps)):
        drafted = drafter.lm_head(drafter.norm(hidden[is_learned])).log_softmax(-1)
        loss = loss - 0.8**depth * (wanted * drafted).sum()
    return loss


@torch.no_grad()
def target_states(
    target: PreTrainedModel, token_ids: Tensor, *, aux_layer_ids: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """What the target tells about each token but the last: three tensors [batch, length - 1, ...].

    Row j has the embedding of token j + 1 and the states after `aux_layer_ids` at token j, from
    which the drafter predicts token j + 2. Its last part is the target's normed output at token
    j + 1, from which the target predicts the same token.
    """
    output = target.model(token_ids, use_cache=False, output_hidden_states=True)
    states = output.hidden_states  # the input of every layer, then the normed output
    aux = torch.cat([states[layer + 1] for layer in aux_layer_ids], dim=-1)
    return states[0][:, 1:], aux[:, :-1], states[-1][:, 1:]


def _drafted_rows(batch: Batch) -> Tensor:
    """bool [batch, length - 1]: whether tokens j + 1 and j + 2 of row j belong to a reply."""
    return F.pad(batch.is_reply[:, 1:-1] & batch.is_reply[:, 2:], (0, 1))


@torch.no_grad()
def _init(
    drafter: LlamaForCausalLMEagle3,
    target: PreTrainedModel,
    draft_token_ids: Tensor,
    generator: torch.Generator,
) -> None:
    for name, weight in drafter.named_parameters():
        if weight.dim() == 2:
            std = 1 / sqrt(weight.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= 0.3
            weight.normal_(std=std, generator=generator)
    init_drafter_as_copier(drafter, target, generator=generator)
    drafter.lm_head.weight.copy_(target.lm_head.weight[draft_token_ids])
