from dataclasses import replace

import torch
from torch import Tensor

from sglang_hvd.demo.eagle3 import Eagle3Model
from sglang_hvd.demo.transformer import Architecture, rotary

NUM_STEPS = 3


def draft(drafter: Eagle3Model, embeds: Tensor, aux: Tensor, anchor: int) -> list[Tensor]:
    """The states that serving computes: prefill up to row `anchor`, then one row per step."""
    layer, a = drafter.midlayer, drafter.a
    groups = a.num_heads // a.num_kv_heads
    hidden = drafter.fc(aux[:, : anchor + 1])
    keys, values = torch.empty(0), torch.empty(0)
    states: list[Tensor] = []
    rows = slice(0, anchor + 1)
    for step in range(NUM_STEPS):
        normed = torch.cat(
            (layer.input_layernorm(embeds[:, rows]), layer.hidden_norm(hidden)), dim=-1
        )
        q, k, v = layer.self_attn.project(normed, rotary(a, torch.arange(rows.start, rows.stop)))
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        keys = k if step == 0 else torch.cat((keys, k), dim=2)
        values = v if step == 0 else torch.cat((values, v), dim=2)
        scores = (q[:, :, -1:] @ keys.transpose(2, 3)) * a.head_dim**-0.5
        attended = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        hidden = hidden[:, -1:] + layer.self_attn.o_proj(attended)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        states.append(hidden[0, 0])
        rows = slice(anchor + step + 1, anchor + step + 2)
    return states


@torch.no_grad()
def test_unrolled_steps_see_what_the_steps_of_serving_see(architecture: Architecture) -> None:
    torch.manual_seed(0)
    plain = replace(architecture, has_qk_norm=False, is_tied=False)
    drafter = Eagle3Model(plain, num_aux=2, draft_vocab_size=32)
    embeds = torch.randn(1, 12, plain.hidden_size)
    aux = torch.randn(1, 12, 2 * plain.hidden_size)
    unrolled = drafter.unroll(embeds, aux, NUM_STEPS)
    for anchor in (0, 4, 8):
        for step, state in enumerate(draft(drafter, embeds, aux, anchor)):
            torch.testing.assert_close(unrolled[step][0, anchor + step], state)
