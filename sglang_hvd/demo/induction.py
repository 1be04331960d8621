"""Starts a decoder as an n-gram copier, so that minutes of training need not discover copying.

Small decoders learn to copy by growing an induction circuit (Olsson et al. 2022, "In-context
Learning and Induction Heads"): heads that fetch the preceding tokens, then a head that looks for
an earlier place with the same preceding tokens and reads which token came next. It emerges late,
long after the time that a demo may take. Here the weights begin as that circuit and training
refines it: the target model of the demo is trained, its starting point is not random. The EAGLE3
drafter begins with the same circuit on the target's states.

Channels of the residual stream: one constant, the code of the token, and one slot for the code of
each of the last `num_heads` tokens. A code begins with the form in which a word is written and
ends with the word itself, so that ` name`, `_name` and `Name` start as relatives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from sglang_hvd.demo.eagle3 import Eagle3Model
from sglang_hvd.demo.tokenizer import Spelling
from sglang_hvd.demo.transformer import Architecture, Attention, TargetModel

_CONSTANT = 0.5  # channel 0 of every embedding; the norm of the token code is about one
_POSITION_NATS = 8.0  # by how much a head prefers its own distance to the next ones
_MATCH_NATS = 6.0  # what each equal preceding token adds to the score of an earlier place
_NUM_FORM_CHANNELS = 8
_RECENCY_NATS = 0.3  # what one rotary frequency adds to the score of the query's own place
# By head: which tokens have to be equal, as places back from the query and back from the copied
# token. What followed the same three tokens; what followed the last token but one; the same two
# tokens, whatever stands between them and the next.
_MATCHES = (
    ((0, 1), (1, 2), (2, 3)),
    ((1, 1),),
    ((0, 1), (1, 2)),
    ((2, 2), (3, 3)),
)
_COPY_GAINS = (3.0, 1.0, 3.0, 1.0)
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

    def form(self) -> slice:
        """The part of the code that says how the word is written."""
        return slice(1, 1 + _NUM_FORM_CHANNELS)

    def word(self) -> slice:
        """The part of the code that says which word it is."""
        return slice(1 + _NUM_FORM_CHANNELS, 1 + self.code_size)

    def slot(self, index: int) -> slice:
        """Channels for the code of the token `index + 1` places back."""
        start = 1 + self.code_size + index * self.slot_size
        return slice(start, start + self.slot_size)


@torch.no_grad()
def init_as_copier(
    target: TargetModel, spellings: Sequence[Spelling], *, generator: torch.Generator
) -> None:
    """Sets all weights: random, then the circuit in the embeddings and the first two layers."""
    a = target.a
    _init_random(target, generator)
    layout = _Layout.of(a)
    embedding = target.model.embed_tokens.weight
    embedding[:, 0] = _CONSTANT
    for part, channels in (("form", layout.form()), ("word", layout.word())):
        kinds = [getattr(spelling, part) for spelling in spellings]
        first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        embedding[:, channels] = embedding[[first[kind] for kind in kinds]][:, channels]
    embedding[:, 1 + layout.code_size :] *= 0.3
    if not a.is_tied:
        target.lm_head.weight.copy_(embedding)
    code_norm = sqrt(layout.code_size / a.hidden_size)
    compress = _orthogonal(layout.slot_size, layout.code_size, generator)
    compress *= 0.9 * sqrt(layout.code_size / layout.slot_size)
    _write_previous_tokens(target, layout, compress, embedding.norm(dim=1).mean().item())
    _write_matches(target, layout, compress, 0.9 * code_norm, generator)


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


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a vector of about unit length off the normed input of an attention."""

    columns: slice
    matrix: Tensor  # [vector, columns]


def _write_matches(
    target: TargetModel,
    layout: _Layout,
    compress: Tensor,
    slot_norm: float,
    generator: torch.Generator,
) -> None:
    """Layer 1 compares the slots, and the token itself, with the slots of earlier places."""
    a = target.a
    stream_norm = sqrt(_CONSTANT**2 + layout.code_size / a.hidden_size + a.num_heads * slot_norm**2)
    scale = sqrt(a.hidden_size) / stream_norm  # of the input norm
    slots = [
        _Reader(layout.slot(index), torch.eye(layout.slot_size) / (scale * slot_norm))
        for index in range(3)
    ]
    token = _Reader(layout.code(), compress / (scale * slot_norm))
    _write_copying(
        target.model.layers[1].self_attn,
        known=lambda back, _: slots[back - 1] if back else token,
        sought=slots,
        value=layout.code(),
        scale=scale,
        generator=generator,
    )


@torch.no_grad()
def init_drafter_as_copier(
    drafter: Eagle3Model, target: TargetModel, *, generator: torch.Generator
) -> None:
    """Starts the drafter as a copier, too: it projects the target's state after layer 0, which
    holds the slots, and compares them one token further on.

    Row j knows token j + 1 by its embedding, token j by the code in the target's state and earlier
    tokens by its slots. Sought is a row whose embedding followed the same tokens.
    """
    a = target.a
    layout = _Layout.of(a)
    drafter.fc.weight *= _NOISE
    drafter.fc.weight[:, : a.hidden_size] += torch.eye(a.hidden_size)
    embedding = target.model.embed_tokens.weight
    embedding_scale = sqrt(a.hidden_size) / embedding.norm(dim=1).mean().item()
    code = layout.code()
    code_norm = embedding[:, code].norm(dim=1).mean().item()
    # What the target's first head makes of a code in the slot of the preceding token.
    first = target.model.layers[0]
    to_slot = first.self_attn.v_proj.weight[: a.head_dim] * first.input_layernorm.weight
    to_slot = first.self_attn.o_proj.weight[layout.slot(0), : a.head_dim] @ to_slot[:, code]
    to_slot *= embedding_scale
    slot_norm = (embedding[:, code] @ to_slot.T).norm(dim=1).mean().item()
    state_norm = sqrt(_CONSTANT**2 + code_norm**2 + layout.num_slots * slot_norm**2)
    scale = sqrt(a.hidden_size) / state_norm

    def in_state(columns: slice) -> slice:
        return slice(a.hidden_size + columns.start, a.hidden_size + columns.stop)

    token = _Reader(in_state(code), torch.eye(layout.code_size) / (scale * code_norm))
    slots = [
        _Reader(in_state(layout.slot(i)), torch.eye(layout.slot_size) / (scale * slot_norm))
        for i in range(2)
    ]

    def known(back: int, sought_back: int) -> _Reader:
        if back == 0:
            return _Reader(code, torch.eye(layout.code_size) / (embedding_scale * code_norm))
        if back == 1:
            as_slot = _Reader(in_state(code), to_slot / (scale * slot_norm))
            return token if sought_back == 1 else as_slot
        return slots[back - 2]

    _write_copying(
        drafter.midlayer.self_attn,
        known=known,
        sought=[token, *slots],
        value=code,
        scale=embedding_scale,
        generator=generator,
    )


def _write_copying(
    attention: Attention,
    *,
    known: Callable[[int, int], _Reader],
    sought: Sequence[_Reader],
    value: slice,
    scale: float,
    generator: torch.Generator,
) -> None:
    """Each head finds places that the same tokens preceded and copies the token there.

    Tokens are compared on rotary frequencies too slow to matter within the context; on the middle
    ones a constant prefers the latest of the equal places.

    known: the token so many places back from the query, as the second argument's `sought` has it.
    sought: the tokens that a key can read, nearest before the copied token first.
    value: input columns with the code of the copied token; they start at channel 1 in `value`'s
        part of the input, and the code is added there to the output.
    scale: of the norm on the part of the input that holds `value` and the constant.
    """
    a = attention.a
    weights = query, key, read, output = (
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
    )
    for weight in weights:
        weight *= _NOISE
    frequencies = _frequencies(a)
    half = a.head_dim // 2
    slow = torch.nonzero(frequencies < 2e-3).flatten()
    slow = torch.cat((slow, half + slow))
    middle = torch.nonzero((frequencies >= 2e-3) & (frequencies < 0.1)).flatten()
    share = len(slow) // len(sought)
    recency = sqrt(_RECENCY_NATS * sqrt(a.head_dim)) / (scale * _CONSTANT)
    copied = torch.arange(min(value.stop - value.start, a.head_dim))
    heads_per_group = a.num_heads // a.num_kv_heads
    for group in range(a.num_kv_heads):
        keys = group * a.head_dim
        rows = [slow[place * share : (place + 1) * share] for place in range(len(sought))]
        mixes: list[Tensor] = []
        for place, reader in enumerate(sought):
            size = len(reader.matrix)
            mix = _orthogonal(share, size, generator)
            mixes.append(mix * sqrt(size / share) * sqrt(_MATCH_NATS * sqrt(a.head_dim)))
            key[keys + rows[place], reader.columns] = mixes[place] @ reader.matrix
        key[keys + middle, 0] = recency
        read[keys + copied, value.start + copied] = 1
        for head in range(group * heads_per_group, (group + 1) * heads_per_group):
            kind = head % len(_MATCHES)
            queries = head * a.head_dim
            for known_back, sought_back in _MATCHES[kind]:
                reader, place = known(known_back, sought_back), sought_back - 1
                query[queries + rows[place], reader.columns] = mixes[place] @ reader.matrix
            query[queries + middle, 0] = recency
            output[1 + copied, queries + copied] = _COPY_GAINS[kind] / scale
    if a.has_qk_norm:
        norm = sqrt(len(sought) * _MATCH_NATS / sqrt(a.head_dim))
        attention.q_norm.weight.fill_(norm)
        attention.k_norm.weight.fill_(norm)


def _frequencies(a: Architecture) -> Tensor:
    return a.rope_theta ** -(torch.arange(0, a.head_dim, 2).float() / a.head_dim)


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A matrix with orthonormal rows or columns, whichever are shorter in number."""
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    basis = torch.linalg.qr(tall)[0]
    return basis if rows >= columns else basis.T.contiguous()
