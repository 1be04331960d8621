import torch

from sglang_hvd.demo.induction import init_as_copier
from sglang_hvd.demo.transformer import Architecture, TargetModel


def repeated_tokens(vocab_size: int) -> torch.Tensor:
    """[1, 400]: 200 random tokens, twice."""
    once = torch.randint(0, vocab_size, (1, 200), generator=torch.Generator().manual_seed(1))
    return torch.cat((once, once), dim=1)


@torch.no_grad()
def test_an_untrained_target_copies_a_repeated_text(architecture: Architecture) -> None:
    target = TargetModel(architecture)
    init_as_copier(target, generator=torch.Generator().manual_seed(0))
    token_ids = repeated_tokens(architecture.vocab_size)
    greedy = target.lm_head(target(token_ids)[-1]).argmax(-1)
    copied = greedy[0, 205:-1] == token_ids[0, 206:]
    assert copied.float().mean() > 0.5
