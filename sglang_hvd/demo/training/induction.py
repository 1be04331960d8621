"""Initialises a decoder as an n-gram copier, so that minutes of training suffice.

Small decoders learn to copy by growing an induction circuit (Olsson et al. 2022, "In-context
Learning and Induction Heads"). Some heads fetch the preceding tokens. Another head looks for an
earlier place with the same preceding tokens and reads which token came next. The circuit emerges
late in training, long after the time that a demo may take. Here the weights begin as that circuit
and training refines it. The EAGLE3 drafter begins with the same circuit on the target's states.

The residual stream has one constant channel, channels for the code of the token, and one slot for
the code of each of the last `num_attention_heads` tokens. The first channels of a code hold the
form in which a word is written, the others the word. So ` name`, `_name` and `Name` start similar.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from sglang_hvd.demo.training.demo_tokenizer import Spelling
from sglang_hvd.demo.training.eagle3 import LlamaForCausalLMEagle3

_CONSTANT = 0.5  # channel 0 of every embedding; the norm of the token code is about one
_POSITION_NATS = 8.0  # by how much a head prefers its own distance to the neighbouring ones
_MATCH_NATS = 18.0  # what each equal preceding token adds to the score of an earlier place
_NUM_FORM_CHANNELS = 8
_RECENCY_NATS = 0.15  # what one rotary frequency adds to the score of the query's own place
# For each head, the tokens that have to be equal, as places back from the query and places back
# from the copied token. The heads copy what followed the same three tokens; what followed the last
# token but one; and what followed the same two tokens further back, whatever is between.
_MATCHES = (
    ((0, 1), (1, 2), (2, 3)),
    ((1, 1),),
    ((3, 2), (4, 3)),
    ((2, 2), (3, 3)),
)
_COPY_GAINS = (12.0, 1.0, 0.5, 0.5)
_NOISE = 0.1  # the part of the random weights that is kept where the circuit is written


@dataclass(frozen=True, slots=True)
class _Layout:
    num_slots: int
    slot_size: int
    code_size: int

    @classmethod
    def of(cls, c: PreTrainedConfig) -> "_Layout":
        num_slots = c.num_attention_heads
        slot_size = min(c.hidden_size // 2 // num_slots, c.head_dim)
        return cls(num_slots, slot_size, c.hidden_size - 1 - num_slots * slot_size)

    def code(self) -> slice:
        return slice(1, 1 + self.code_size)

    def form(self) -> slice:
        """Channels of the code that say how the word is written."""
        return slice(1, 1 + _NUM_FORM_CHANNELS)

    def word(self) -> slice:
        """Channels of the code that say which word it is."""
        return slice(1 + _NUM_FORM_CHANNELS, 1 + self.code_size)

    def slot(self, index: int) -> slice:
        """Channels for the code of the token `index + 1` places back."""
        start = 1 + self.code_size + index * self.slot_size
        return slice(start, start + self.slot_size)


@torch.no_grad()
def init_as_copier(
    target: PreTrainedModel, spellings: Sequence[Spelling], *, generator: torch.Generator
) -> None:
    """Sets all weights at random, then writes the circuit into the embeddings and two layers."""
    c = target.config
    _init_random(target, generator)
    layout = _Layout.of(c)
    embedding = target.model.embed_tokens.weight
    embedding[:, 0] = _CONSTANT
    for part, channels in (("form", layout.form()), ("word", layout.word())):
        kinds = [getattr(spelling, part) for spelling in spellings]
        first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        vectors = embedding[[first[kind] for kind in kinds]][:, channels]
        length = sqrt(vectors.shape[1] / c.hidden_size)
        embedding[:, channels] = F.normalize(vectors, dim=1) * length
    embedding[:, 1 + layout.code_size :] *= 0.3
    compress = _orthogonal(layout.slot_size, layout.code_size, generator)
    compress *= 0.9 * sqrt(layout.code_size / layout.slot_size)
    _equalise(embedding[:, layout.code()], compress)
    if not c.tie_word_embeddings:
        target.lm_head.weight.copy_(embedding)
    code_norm = sqrt(layout.code_size / c.hidden_size)
    _write_previous_tokens(target, layout, compress, embedding.norm(dim=1).mean().item())
    _write_matches(target, layout, compress, 0.9 * code_norm, generator)


def _equalise(codes: Tensor, compress: Tensor) -> None:
    """Scales what `compress` reads of each code to the same norm, in place.

    Otherwise a code that is longer than the sought one may match it better than it does itself.
    """
    read = codes @ compress.T
    norm = read.norm(dim=1, keepdim=True)
    codes += (read * (norm.mean() / norm - 1)) @ torch.linalg.pinv(compress).T


def _init_random(target: PreTrainedModel, generator: torch.Generator) -> None:
    for name, weight in target.named_parameters():
        if weight.dim() == 2:
            std = 1 / sqrt(weight.shape[1])
            if name.endswith("down_proj.weight"):
                std *= 0.05
            elif name.endswith("o_proj.weight"):
                std *= 0.1
            weight.normal_(std=std, generator=generator)


def _write_previous_tokens(
    target: PreTrainedModel, layout: _Layout, compress: Tensor, embedding_norm: float
) -> None:
    """Layer 0: head h attends h + 1 places back and puts the token's code into slot h.

    Queries and keys are constant vectors on the fast rotary frequencies. The query is turned by the
    wanted distance, so that their product peaks there.
    """
    c = target.config
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
    frequencies = _frequencies(c)
    fast = torch.nonzero(frequencies > 0.03).flatten()
    drop = (1 - frequencies[fast].cos()).sum().item()  # of the score, one place off the peak
    amplitude = sqrt(_POSITION_NATS * sqrt(c.head_dim) / drop)
    scale = sqrt(c.hidden_size) / embedding_norm  # of the input norm
    for group in range(c.num_key_value_heads):
        base = group * c.head_dim
        key[base + fast, 0] = amplitude / (_CONSTANT * scale)
        value[base : base + layout.slot_size] = 0
        value[base : base + layout.slot_size, layout.code()] = compress
    half = c.head_dim // 2
    for head in range(c.num_attention_heads):
        base = head * c.head_dim
        turn = -(head + 1) * frequencies[fast]
        query[base + fast, 0] = turn.cos() * amplitude / (_CONSTANT * scale)
        query[base + half + fast, 0] = turn.sin() * amplitude / (_CONSTANT * scale)
        rows = torch.arange(layout.slot_size)
        output[layout.slot(head).start + rows, base + rows] = 1 / scale
    if hasattr(attention, "q_norm"):
        norm = amplitude * sqrt(len(fast) / c.head_dim)
        attention.q_norm.weight.fill_(norm)
        attention.k_norm.weight.fill_(norm)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a vector of about unit length from the normed input of an attention."""

    columns: slice
    matrix: Tensor  # [vector, columns]


def _write_matches(
    target: PreTrainedModel,
    layout: _Layout,
    compress: Tensor,
    slot_norm: float,
    generator: torch.Generator,
) -> None:
    """Layer 1: heads compare the token and the slots with the slots of earlier places."""
    c = target.config
    stream_norm = sqrt(
        _CONSTANT**2 + layout.code_size / c.hidden_size + c.num_attention_heads * slot_norm**2
    )
    scale = sqrt(c.hidden_size) / stream_norm  # of the input norm
    slots = [
        _Reader(layout.slot(index), torch.eye(layout.slot_size) / (scale * slot_norm))
        for index in range(4)
    ]
    token = _Reader(layout.code(), compress / (scale * slot_norm))
    _write_copying(
        target.model.layers[1].self_attn,
        known=lambda back, _: slots[back - 1] if back else token,
        sought=slots[:3],
        value=layout.code(),
        scale=scale,
        generator=generator,
    )


@torch.no_grad()
def init_drafter_as_copier(
    drafter: LlamaForCausalLMEagle3, target: PreTrainedModel, *, generator: torch.Generator
) -> None:
    """Writes the circuit into the drafter. It reads the slots from the target's state after layer 0
    and compares them one token further on.

    Row j knows token j + 1 from its embedding, token j from the code in the target's state and
    earlier tokens from the slots. It looks for a row whose embedding followed the same tokens.
    """
    c = target.config
    layout = _Layout.of(c)
    drafter.fc.weight *= _NOISE
    drafter.fc.weight[:, : c.hidden_size] += torch.eye(c.hidden_size)
    embedding = target.model.embed_tokens.weight
    embedding_scale = sqrt(c.hidden_size) / embedding.norm(dim=1).mean().item()
    code = layout.code()
    code_norm = embedding[:, code].norm(dim=1).mean().item()
    # How the target's first head writes a code into the slot of the preceding token.
    first = target.model.layers[0]
    to_slot = first.self_attn.v_proj.weight[: c.head_dim] * first.input_layernorm.weight
    to_slot = first.self_attn.o_proj.weight[layout.slot(0), : c.head_dim] @ to_slot[:, code]
    to_slot *= embedding_scale
    slot_norm = (embedding[:, code] @ to_slot.T).norm(dim=1).mean().item()
    state_norm = sqrt(_CONSTANT**2 + code_norm**2 + layout.num_slots * slot_norm**2)
    scale = sqrt(c.hidden_size) / state_norm

    def in_state(columns: slice) -> slice:
        return slice(c.hidden_size + columns.start, c.hidden_size + columns.stop)

    token = _Reader(in_state(code), torch.eye(layout.code_size) / (scale * code_norm))
    slots = [
        _Reader(in_state(layout.slot(i)), torch.eye(layout.slot_size) / (scale * slot_norm))
        for i in range(3)
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
        sought=[token, *slots[:2]],
        value=code,
        scale=embedding_scale,
        generator=generator,
    )


def _write_copying(
    attention: nn.Module,
    *,
    known: Callable[[int, int], _Reader],
    sought: Sequence[_Reader],
    value: slice,
    scale: float,
    generator: torch.Generator,
) -> None:
    """Makes each head find places with the same preceding tokens and copy the token there.

    Tokens are compared on rotary frequencies that are too slow to matter within the context. On the
    middle frequencies a constant prefers the latest of the equal places.

    known: the reader of the token that is a number of places back from the query (first argument),
        in the form of an entry of `sought` (second argument).
    sought: readers of the tokens before the copied token, the nearest first.
    value: input columns with the code of the copied token, from channel 1 of their part of the
        input. The head adds the code to the same channels of the output.
    scale: factor of the norm on the part of the input that holds `value` and the constant.
    """
    c = attention.config
    weights = query, key, read, output = (
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
    )
    for weight in weights:
        weight *= _NOISE
    frequencies = _frequencies(c)
    half = c.head_dim // 2
    slow = torch.nonzero(frequencies < 2e-3).flatten()
    slow = torch.cat((slow, half + slow))
    middle = torch.nonzero((frequencies >= 2e-3) & (frequencies < 0.1)).flatten()
    share = len(slow) // len(sought)
    recency = sqrt(_RECENCY_NATS * sqrt(c.head_dim)) / (scale * _CONSTANT)
    copied = torch.arange(min(value.stop - value.start, c.head_dim))
    heads_per_group = c.num_attention_heads // c.num_key_value_heads
    for group in range(c.num_key_value_heads):
        keys = group * c.head_dim
        rows = [slow[place * share : (place + 1) * share] for place in range(len(sought))]
        mixes: list[Tensor] = []
        for place, reader in enumerate(sought):
            size = len(reader.matrix)
            mix = _orthogonal(share, size, generator)
            mixes.append(mix * sqrt(size / share) * sqrt(_MATCH_NATS * sqrt(c.head_dim)))
            key[keys + rows[place], reader.columns] = mixes[place] @ reader.matrix
        key[keys + middle, 0] = recency
        read[keys + copied, value.start + copied] = 1
        for head in range(group * heads_per_group, (group + 1) * heads_per_group):
            kind = head % len(_MATCHES)
            queries = head * c.head_dim
            for known_back, sought_back in _MATCHES[kind]:
                reader, place = known(known_back, sought_back), sought_back - 1
                query[queries + rows[place], reader.columns] = mixes[place] @ reader.matrix
            query[queries + middle, 0] = recency
            output[1 + copied, queries + copied] = _COPY_GAINS[kind] / scale
    if hasattr(attention, "q_norm"):
        norm = sqrt(len(sought) * _MATCH_NATS / sqrt(c.head_dim))
        attention.q_norm.weight.fill_(norm)
        attention.k_norm.weight.fill_(norm)


def _frequencies(c: PreTrainedConfig) -> Tensor:
    steps = torch.arange(0, c.head_dim, 2).float() / c.head_dim
    return c.rope_parameters["rope_theta"] ** -steps


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random matrix with orthonormal rows or columns, whichever are fewer."""
    tall = torch.randn(max(rows, columns), min(rows, columns), generator=generator)
    basis = torch.linalg.qr(tall)[0]
    return basis if rows >= columns else basis.T.contiguous()
