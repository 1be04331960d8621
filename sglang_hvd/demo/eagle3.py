"""The EAGLE3 drafter of the demo target, in the layout of SGLang's `llama_eagle3.py`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_hvd.demo.transformer import MLP, Architecture, Attention, RMSNorm, rotary


class Eagle3Layer(nn.Module):
    """One decoder layer that reads the token embedding beside the hidden state."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.self_attn = Attention(a, 2 * a.hidden_size)
        self.mlp = MLP(a)
        self.input_layernorm = RMSNorm(a.hidden_size, a.norm_eps)
        self.hidden_norm = RMSNorm(a.hidden_size, a.norm_eps)
        self.post_attention_layernorm = RMSNorm(a.hidden_size, a.norm_eps)


class Eagle3Model(nn.Module):
    """Drafter whose parameter names equal those of the checkpoint; embeddings are the target's.

    Row j of its input holds the embedding of token j + 1 and the target's states at token j; it
    predicts token j + 2.
    """

    def __init__(self, architecture: Architecture, *, num_aux: int, draft_vocab_size: int) -> None:
        super().__init__()
        a = architecture
        self.a = a
        self.fc = nn.Linear(num_aux * a.hidden_size, a.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(a)
        self.norm = RMSNorm(a.hidden_size, a.norm_eps)
        self.lm_head = nn.Linear(a.hidden_size, draft_vocab_size, bias=False)

    def unroll(self, embeds: Tensor, aux: Tensor, num_steps: int) -> list[Tensor]:
        """States [batch, length, hidden] after each of `num_steps` drafting steps.

        Step 0 reads the target's states. Step k reads at row j what step k - 1 left at row j - 1
        and attends, as in serving, to step 0 up to row j - k and to one row of every later step
        (training-time test, EAGLE-3 section 3.2).
        """
        layer = self.midlayer
        length = embeds.shape[1]
        rope = rotary(self.a, torch.arange(length))
        normed_embeds = layer.input_layernorm(embeds)
        hidden = self.fc(aux)
        groups = self.a.num_heads // self.a.num_kv_heads
        rows = torch.arange(length)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        for step in range(num_steps):
            x = torch.cat((normed_embeds, layer.hidden_norm(hidden)), dim=-1)
            q, k, v = layer.self_attn.project(x, rope)
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            keys.append(k)
            values.append(v)
            if step == 0:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                hides = rows[None, :] > rows[:, None] - step
                scale = self.a.head_dim**-0.5
                scores = (q @ keys[0].transpose(2, 3)) * scale
                scores = scores.masked_fill(hides, -torch.inf)
                later = [
                    (q * _shift(keys[i], step - i)).sum(-1, keepdim=True) * scale
                    for i in range(1, step + 1)
                ]
                weights = torch.cat((scores, *later), dim=-1).softmax(-1)
                out = weights[..., :length] @ values[0]
                for i in range(1, step + 1):
                    out = out + weights[..., length + i - 1, None] * _shift(values[i], step - i)
            hidden = hidden + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            states.append(hidden)
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return states


def _shift(x: Tensor, rows: int) -> Tensor:
    """Row j takes row j - rows, along the second last dimension."""
    return x if rows == 0 else F.pad(x[:, :, :-rows], (0, 0, rows, 0))
