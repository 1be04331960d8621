import torch

from sglang_hvd.demo.induction import init_as_copier
from sglang_hvd.demo.tokenizer import Spelling
from sglang_hvd.demo.transformer import Architecture, KeyValues, TargetModel


@torch.no_grad()
def test_chunks_through_a_cache_give_the_states_of_one_pass(
    architecture: Architecture, spellings: list[Spelling]
) -> None:
    target = TargetModel(architecture)
    init_as_copier(target, spellings, generator=torch.Generator().manual_seed(0))
    token_ids = torch.randint(
        0, architecture.vocab_size, (1, 50), generator=torch.Generator().manual_seed(1)
    )
    expected = target(token_ids)[-1]
    cache = KeyValues(architecture)
    first = target.model(token_ids[:, :20], cache)[-1]
    target.model(torch.zeros(1, 5, dtype=torch.int64), cache)  # a rejected draft
    cache.truncate(20)
    rest = target.model(token_ids[:, 20:], cache)[-1]
    torch.testing.assert_close(torch.cat((first, rest), dim=1), expected)
