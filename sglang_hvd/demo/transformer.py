"""The decoder of the demo models in plain torch, with the parameter names of Llama and Qwen3."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a Llama- or Qwen3-shaped decoder; Qwen3 adds norms on queries and keys."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float
    has_qk_norm: bool
    is_tied: bool
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention; `input_size` differs from the hidden size in an EAGLE3 layer."""

    def __init__(self, architecture: Architecture, input_size: int) -> None:
        super().__init__()
        a = architecture
        self.a = a
        self.q_proj = nn.Linear(input_size, a.num_heads * a.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, a.num_kv_heads * a.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, a.num_kv_heads * a.head_dim, bias=False)
        self.o_proj = nn.Linear(a.num_heads * a.head_dim, a.hidden_size, bias=False)
        if a.has_qk_norm:
            self.q_norm = RMSNorm(a.head_dim, a.norm_eps)
            self.k_norm = RMSNorm(a.head_dim, a.norm_eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, length, head_dim], rotated to their positions."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.a.num_heads, self.a.head_dim)
        k = self.k_proj(x).view(batch, length, self.a.num_kv_heads, self.a.head_dim)
        v = self.v_proj(x).view(batch, length, self.a.num_kv_heads, self.a.head_dim)
        if self.a.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return (
            _rotate(q.transpose(1, 2), rope),
            _rotate(k.transpose(1, 2), rope),
            v.transpose(1, 2),
        )

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: "LayerKeyValues | None"
    ) -> Tensor:
        q, k, v = self.project(x, rope)
        if past is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = past.append(k, v)
            length, total = q.shape[2], k.shape[2]
            is_visible = torch.ones(length, total, dtype=torch.bool).tril(total - length)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.gate_proj = nn.Linear(a.hidden_size, a.intermediate_size, bias=False)
        self.up_proj = nn.Linear(a.hidden_size, a.intermediate_size, bias=False)
        self.down_proj = nn.Linear(a.intermediate_size, a.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.self_attn = Attention(a, a.hidden_size)
        self.mlp = MLP(a)
        self.input_layernorm = RMSNorm(a.hidden_size, a.norm_eps)
        self.post_attention_layernorm = RMSNorm(a.hidden_size, a.norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: "LayerKeyValues | None"
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """`model.*` of a Llama or Qwen3 checkpoint."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.a = a
        self.embed_tokens = nn.Embedding(a.vocab_size, a.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(a) for _ in range(a.num_layers))
        self.norm = RMSNorm(a.hidden_size, a.norm_eps)

    def forward(self, token_ids: Tensor, cache: "KeyValues | None" = None) -> list[Tensor]:
        """[batch, length] -> the input of every layer, then the normed output, each [.., hidden].

        cache: holds the tokens before `token_ids`, which are appended; None: there are none.
        """
        first = 0 if cache is None else cache.num_tokens
        rope = rotary(self.a, torch.arange(first, first + token_ids.shape[1]))
        x = self.embed_tokens(token_ids)
        states = [x]
        for index, layer in enumerate(self.layers):
            x = layer(x, rope, None if cache is None else cache.layers[index])
            states.append(x)
        states[-1] = self.norm(x)
        return states


class LayerKeyValues:
    """Keys and values [1, kv heads, tokens, head_dim] of one layer."""

    def __init__(self, architecture: Architecture) -> None:
        empty = torch.empty(1, architecture.num_kv_heads, 0, architecture.head_dim)
        self.keys, self.values = empty, empty

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, the new ones last."""
        self.keys = torch.cat((self.keys, keys), dim=2)
        self.values = torch.cat((self.values, values), dim=2)
        return self.keys, self.values


class KeyValues:
    """The KV cache of one sequence."""

    def __init__(self, architecture: Architecture) -> None:
        self.layers = [LayerKeyValues(architecture) for _ in range(architecture.num_layers)]

    @property
    def num_tokens(self) -> int:
        return self.layers[0].keys.shape[2]

    def truncate(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        for layer in self.layers:
            layer.keys, layer.values = (
                layer.keys[:, :, :num_tokens],
                layer.values[:, :, :num_tokens],
            )


class TargetModel(nn.Module):
    """The target model; parameter names equal those of the exported checkpoint."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.a = architecture
        self.model = Decoder(architecture)
        self.lm_head = nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
        if architecture.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor) -> list[Tensor]:
        """See `Decoder.forward`."""
        return self.model(token_ids)


def rotary(architecture: Architecture, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the given positions."""
    half = torch.arange(0, architecture.head_dim, 2).float() / architecture.head_dim
    angles = positions.float()[:, None] * (architecture.rope_theta**-half)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
