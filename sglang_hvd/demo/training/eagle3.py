"""The EAGLE3 drafter of the demo target, in the layout that SGLang's `llama_eagle3.py` loads."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


def drafter_config(
    target: PreTrainedConfig, *, aux_layer_ids: Sequence[int], draft_vocab_size: int
) -> LlamaConfig:
    """One Llama layer of the target's sizes, which reads the target's states after some layers."""
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters"),
        *("rms_norm_eps", "dtype"),
    )
    return LlamaConfig(
        **{name: getattr(target, name) for name in same},
        num_hidden_layers=1,
        tie_word_embeddings=False,
        draft_vocab_size=draft_vocab_size,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
            "use_aux_hidden_state": True,
        },
    )


class LlamaForCausalLMEagle3(LlamaPreTrainedModel):
    """The drafter. Its class and weights have the names that SGLang expects.

    It has no embeddings: it uses the target's. Row j of its input holds the embedding of token
    j + 1 and the target's states at token j. Row j predicts token j + 2.
    """

    def __init__(self, config: LlamaConfig, draft_token_ids: Tensor) -> None:
        """draft_token_ids: int64 [draft vocabulary], the target's token of every draft token,
        ascending."""
        super().__init__(config)
        size = config.hidden_size
        num_aux = len(config.eagle_config["eagle_aux_hidden_state_layer_ids"])
        self.fc = nn.Linear(num_aux * size, size, bias=False)
        self.midlayer = LlamaDecoderLayer(config, layer_idx=0)
        attention = self.midlayer.self_attn  # reads an embedding and a state, next to each other
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * size, num_outputs, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[draft_token_ids] = True
        # SGLang adds a draft token to its entry here to get the target's token.
        self.register_buffer("d2t", draft_token_ids - torch.arange(len(draft_token_ids)))
        self.register_buffer("t2d", is_drafted)
        self.post_init()

    def project(
        self, normed_embeds: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, length, head_dim], the keys and values once for
        each head that reads them."""
        attention = self.midlayer.self_attn
        x = torch.cat((normed_embeds, self.midlayer.hidden_norm(hidden)), dim=-1)
        q, k, v = (
            projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, positions[None]))
        groups = attention.num_key_value_groups
        return q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)

    def unroll(self, embeds: Tensor, aux: Tensor, num_steps: int) -> list[Tensor]:
        """States [batch, length, hidden] after each of `num_steps` drafting steps.

        Step 0 reads the target's states. At row j, step k reads what step k - 1 left at row j - 1.
        It attends, as in serving, to step 0 up to row j - k and to one row of every later step
        (training-time test, EAGLE-3 section 3.2).
        """
        layer = self.midlayer
        scale = layer.self_attn.scaling
        length = embeds.shape[1]
        rows = torch.arange(length)
        normed_embeds = layer.input_layernorm(embeds)
        hidden = self.fc(aux)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        for step in range(num_steps):
            q, k, v = self.project(normed_embeds, hidden, rows)
            keys.append(k)
            values.append(v)
            if step == 0:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                hides = rows[None, :] > rows[:, None] - step
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
    """Row j of the result is row j - rows of x, along the second last dimension."""
    return x if rows == 0 else F.pad(x[:, :, :-rows], (0, 0, rows, 0))
