import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig

from sglang_hvd.demo.training.demo_tokenizer import Spelling
from sglang_hvd.demo.training.eagle3 import LlamaForCausalLMEagle3, drafter_config
from sglang_hvd.demo.training.induction import init_as_copier, init_drafter_as_copier


def repeated_tokens(vocab_size: int) -> torch.Tensor:
    """[1, 400]: 200 random tokens, twice."""
    once = torch.randint(0, vocab_size, (1, 200), generator=torch.Generator().manual_seed(1))
    return torch.cat((once, once), dim=1)


@torch.no_grad()
def test_an_untrained_target_copies_a_repeated_text(
    config: PreTrainedConfig, spellings: list[Spelling]
) -> None:
    target = AutoModelForCausalLM.from_config(config)
    init_as_copier(target, spellings, generator=torch.Generator().manual_seed(0))
    token_ids = repeated_tokens(config.vocab_size)
    greedy = target(token_ids).logits.argmax(-1)
    copied = greedy[0, 205:-1] == token_ids[0, 206:]
    assert copied.float().mean() > 0.5


@torch.no_grad()
def test_an_untrained_drafter_copies_a_repeated_text(
    config: PreTrainedConfig, spellings: list[Spelling]
) -> None:
    generator = torch.Generator().manual_seed(0)
    target = AutoModelForCausalLM.from_config(config)
    init_as_copier(target, spellings, generator=generator)
    of_drafter = drafter_config(config, aux_layer_ids=[0, 1], draft_vocab_size=config.vocab_size)
    drafter = LlamaForCausalLMEagle3(of_drafter, torch.arange(config.vocab_size))
    init_drafter_as_copier(drafter, target, generator=generator)
    drafter.lm_head.weight.copy_(target.lm_head.weight)
    token_ids = repeated_tokens(config.vocab_size)
    states = target(token_ids, output_hidden_states=True).hidden_states
    aux = torch.cat((states[1], states[2]), dim=-1)
    [hidden] = drafter.unroll(states[0][:, 1:], aux[:, :-1], 1)
    drafted = drafter.lm_head(drafter.norm(hidden)).argmax(-1)
    copied = drafted[0, 205:-1] == token_ids[0, 207:]
    assert copied.float().mean() > 0.5


@torch.no_grad()
def test_forms_of_a_word_start_alike_and_other_words_do_not(
    config: PreTrainedConfig, spellings: list[Spelling]
) -> None:
    spellings[5:8] = [Spelling("name", form) for form in ("aa", " aa", "_aa")]
    target = AutoModelForCausalLM.from_config(config)
    init_as_copier(target, spellings, generator=torch.Generator().manual_seed(0))
    code = target.model.embed_tokens.weight[:, 1:64]  # after the constant, before the slots
    alike = F.cosine_similarity(code[5:6], code[6:])
    assert alike[:2].min() > 0.7 > alike[2:].max()


@torch.no_grad()
def test_no_token_matches_another_better_than_itself(
    config: PreTrainedConfig, spellings: list[Spelling]
) -> None:
    target = AutoModelForCausalLM.from_config(config)
    init_as_copier(target, spellings, generator=torch.Generator().manual_seed(0))
    code = target.model.embed_tokens.weight[:, 1:64]
    # What the first head writes for each token, from which later layers find the token again.
    slot = code @ target.model.layers[0].self_attn.v_proj.weight[:16, 1:64].T
    assert ((code @ code.T).argmax(1) == torch.arange(len(code))).all()
    assert ((slot @ slot.T).argmax(1) == torch.arange(len(code))).all()
