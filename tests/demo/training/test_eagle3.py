import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sglang_hvd.demo.training.eagle3 import LlamaForCausalLMEagle3, drafter_config

NUM_STEPS = 3


def draft(
    drafter: LlamaForCausalLMEagle3, embeds: Tensor, aux: Tensor, anchor: int
) -> list[Tensor]:
    """The states that serving computes: prefill up to row `anchor`, then one row per step."""
    layer = drafter.midlayer
    hidden = drafter.fc(aux[:, : anchor + 1])
    keys, values = torch.empty(0), torch.empty(0)
    states: list[Tensor] = []
    rows = slice(0, anchor + 1)
    for step in range(NUM_STEPS):
        normed_embeds = layer.input_layernorm(embeds[:, rows])
        q, k, v = drafter.project(normed_embeds, hidden, torch.arange(rows.start, rows.stop))
        keys = k if step == 0 else torch.cat((keys, k), dim=2)
        values = v if step == 0 else torch.cat((values, v), dim=2)
        scores = (q[:, :, -1:] @ keys.transpose(2, 3)) * drafter.config.head_dim**-0.5
        attended = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        hidden = hidden[:, -1:] + layer.self_attn.o_proj(attended)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        states.append(hidden[0, 0])
        rows = slice(anchor + step + 1, anchor + step + 2)
    return states


@torch.no_grad()
def test_unrolled_steps_see_what_the_steps_of_serving_see(config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    of_drafter = drafter_config(config, aux_layer_ids=[0, 1], draft_vocab_size=32)
    drafter = LlamaForCausalLMEagle3(of_drafter, torch.arange(32))
    for weight in drafter.parameters():  # transformers begins with small weights: all states alike
        if weight.dim() == 2:
            weight.uniform_(-1, 1).mul_(weight.shape[1] ** -0.5)
    embeds = torch.randn(1, 12, config.hidden_size)
    aux = torch.randn(1, 12, 2 * config.hidden_size)
    unrolled = drafter.unroll(embeds, aux, NUM_STEPS)
    for anchor in (0, 4, 8):
        for step, state in enumerate(draft(drafter, embeds, aux, anchor)):
            torch.testing.assert_close(unrolled[step][0, anchor + step], state)
