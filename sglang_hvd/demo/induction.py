"""Starts a decoder as an n-gram copier, so that minutes of training need not discover copying.

Small decoders learn to copy by growing an induction circuit (Olsson et al. 2022, "In-context
Learning and Induction Heads"): heads that fetch the preceding tokens, then a head that looks for
an earlier place with the same preceding tokens and reads which token came next. It emerges late,
long after the time that a demo may take. Here the weights begin as that circuit and training
refines it: the target model of the demo is trained, its starting point is not random.

Channels of the residual stream: one constant, the code of the token, and one slot for the code of
each of the last `num_heads` tokens.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from sglang_hvd.demo.transformer import Architecture, TargetModel

_CONSTANT = 0.5  # channel 0 of every embedding; the norm of the token code is about one
_POSITION_NATS = 8.0  # by how much a head prefers its own distance to the next ones
_MATCH_NATS = 4.0  # what each equal preceding token adds to the score of an earlier place
_NOISE = 0.1  # what is left of the random start where the circuit is written


@dataclass(frozen=True, slots=True)
class _Layout:
    num_slots: int
    slot_size: int
    code_size: int

    @classmethod
    def of(cls, a: Architecture) -> "_Layout":
        slot_size = min(a.hidden_size // 2 // a.num_heads, a.head_dim)
        return cls(a.num_heads, slot_size, a.hidden_size - 1 - a.num_heads * slot_size)

    def code(self) -> slice:
        return slice(1, 1 + self.code_size)

    def slot(self, index: int) -> slice:
        """Channels for the code of the token `index + 1` places back."""
        start = 1 + self.code_size + index * self.slot_size
        return slice(start, start + self.slot_size)


@torch.no_grad()
def init_as_copier(target: TargetModel, *, generator: torch.Generator) -> None:
    """Sets all weights: random, then the circuit in the embeddings and the first two layers."""
    a = target.a
    _init_random(target, generator)
    layout = _Layout.of(a)
    embedding = target.model.embed_tokens.weight
    embedding[:, 0] = _CONSTANT
    embedding[:, 1 + layout.code_size :] *= 0.3
    if not a.is_tied:
        target.lm_head.weight.copy_(embedding)
    code_norm = sqrt(layout.code_size / a.hidden_size)
    compress = _orthogonal(layout.slot_size, layout.code_size, generator)
    compress *= 0.9 * sqrt(layout.code_size / layout.slot_size)
    _write_previous_tokens(target, layout, compress, embedding.norm(dim=1).mean().item())
    _write_match(target, layout, compress, 0.9 * code_norm, generator)


def _init_random(target: TargetModel, generator: torch.Generator) -> None:
    for name, weight in target.named_parameters():
        if weight.dim() == 2:
            std = 1 / sqrt(weight.shape[1])
            if name.endswith("down_proj.weight"):
                std *= 0.05
            elif name.endswith("o_proj.weight"):
                std *= 0.1
            weight.normal_(std=std, generator=generator)


def _write_previous_tokens(
    target: TargetModel, layout: _Layout, compress: Tensor, embedding_norm: float
) -> None:
    """Layer 0: head h attends h + 1 places back and puts the token's code into slot h.

    Queries and keys are constant vectors on the fast rotary frequencies; turning the query by
    the wanted distance makes their product peak there.
    """
    a = target.a
    attention = target.model.layers[0].self_attn
    query, key, value, output = (
        projection.weight
        for projection in (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
        )
    )
    for weight in (query, key, value, output):
        weight *= _NOISE
    frequencies = _frequencies(a)
    fast = torch.nonzero(frequencies > 0.03).flatten()
    drop = (1 - frequencies[fast].cos()).sum().item()  # of the score, one place off the peak
    amplitude = sqrt(_POSITION_NATS * sqrt(a.head_dim) / drop)
    scale = sqrt(a.hidden_size) / embedding_norm  # of the input norm
    for group in range(a.num_kv_heads):
        base = group * a.head_dim
        key[base + fast, 0] = amplitude / (_CONSTANT * scale)
        value[base : base + layout.slot_size] = 0
        value[base : base + layout.slot_size, layout.code()] = compress
    half = a.head_dim // 2
    for head in range(a.num_heads):
        base = head * a.head_dim
        turn = -(head + 1) * frequencies[fast]
        query[base + fast, 0] = turn.cos() * amplitude / (_CONSTANT * scale)
        query[base + half + fast, 0] = turn.sin() * amplitude / (_CONSTANT * scale)
        rows = torch.arange(layout.slot_size)
        output[layout.slot(head).start + rows, base + rows] = 1 / scale
    if a.has_qk_norm:
        norm = amplitude * sqrt(len(fast) / a.head_dim)
        attention.q_norm.weight.fill_(norm)
        attention.k_norm.weight.fill_(norm)


def _write_match(
    target: TargetModel,
    layout: _Layout,
    compress: Tensor,
    slot_norm: float,
    generator: torch.Generator,
) -> None:
    """Layer 1: one head of each group finds where the same tokens preceded and copies what came.

    The token j places before the query is compared with the token j + 1 places before the key, on
    rotary frequencies too slow to matter within the context.
    """
    a = target.a
    attention = target.model.layers[1].self_attn
    query, key = attention.q_proj.weight, attention.k_proj.weight
    value, output = attention.v_proj.weight, attention.o_proj.weight
    half = a.head_dim // 2
    slow = torch.nonzero(_frequencies(a) < 2e-3).flatten()
    slow = torch.cat((slow, half + slow))
    num_compared = layout.num_slots - 1
    share = len(slow) // num_compared
    stream_norm = sqrt(_CONSTANT**2 + layout.code_size / a.hidden_size + a.num_heads * slot_norm**2)
    scale = sqrt(a.hidden_size) / stream_norm
    match = sqrt(_MATCH_NATS * sqrt(a.head_dim)) / (scale * slot_norm)
    code_share = -(-layout.code_size // a.num_kv_heads)
    for group in range(a.num_kv_heads):
        keys = slice(group * a.head_dim, (group + 1) * a.head_dim)
        head = group * (a.num_heads // a.num_kv_heads)
        queries = slice(head * a.head_dim, (head + 1) * a.head_dim)
        for weight in (query[queries], key[keys], value[keys], output[:, queries]):
            weight *= _NOISE
        for place in range(num_compared):
            mix = _orthogonal(share, layout.slot_size, generator)
            mix *= sqrt(layout.slot_size / share) * match
            rows = slow[place * share : (place + 1) * share]
            key[keys.start + rows, layout.slot(place)] = mix
            if place == 0:
                query[queries.start + rows, layout.code()] = mix @ compress
            else:
                query[queries.start + rows, layout.slot(place - 1)] = mix
        first = group * code_share
        for channel in range(first, min(first + code_share, layout.code_size)):
            value[keys.start + channel - first, 1 + channel] = 1
            output[1 + channel, queries.start + channel - first] = 3 / scale
    if a.has_qk_norm:
        norm = sqrt(num_compared * _MATCH_NATS / sqrt(a.head_dim))
        attention.q_norm.weight.fill_(norm)
        attention.k_norm.weight.fill_(norm)


def _frequencies(a: Architecture) -> Tensor:
    return a.rope_theta ** -(torch.arange(0, a.head_dim, 2).float() / a.head_dim)


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A matrix with orthonormal rows or columns, whichever are shorter in number."""
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    basis = torch.linalg.qr(tall)[0]
    return basis if rows >= columns else basis.T.contiguous()
