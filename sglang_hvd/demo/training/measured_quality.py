"""How good the demo models are on sessions that training never sees."""

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.demo.corpus.session import FAMILIES, Family
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.training.dataset import Example, encode
from sglang_hvd.demo.training.demo_predictor import cycle_rows
from sglang_hvd.demo.training.distillation import target_states
from sglang_hvd.demo.training.eagle3 import LlamaForCausalLMEagle3
from sglang_hvd.demo.training.rollout import references
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.replay.training.evaluate import judged_by
from sglang_hvd.replay.training.quality import payoff_quality

# No session of `sglang-hvd demo` and none that trains anything.
_SEED = 12345


@torch.no_grad()
def exact_replies(
    target: PreTrainedModel, tokenizer: Tokenizer, *, num_sessions: int
) -> dict[Family, float]:
    """Share of replies that are the reference, token for token, in `num_sessions` of each family.

    Every reply has the reference replies of earlier turns before it.
    """
    shares: dict[Family, float] = {}
    for family, examples in _unseen(tokenizer, num_sessions):
        is_exact = [
            torch.equal(said[of_turn], wanted[of_turn])
            for example in examples
            for said, wanted, turns in [_said(target, example)]
            for of_turn in (turns == turn for turn in range(int(turns.max()) + 1))
        ]
        shares[family] = sum(is_exact) / len(is_exact)
    return shares


def _said(target: PreTrainedModel, example: Example) -> tuple[Tensor, Tensor, Tensor]:
    """For every token but the first: the target's choice, the token, and its turn."""
    token_ids = torch.tensor([example.token_ids])
    said = target(token_ids).logits[0, :-1].argmax(-1)
    return said, token_ids[0, 1:], torch.tensor(example.turns)[1:]


@torch.no_grad()
def accepted_drafts(
    drafter: LlamaForCausalLMEagle3,
    target: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    num_steps: int,
    num_sessions: int,
) -> dict[Family, float]:
    """Mean number of accepted tokens of a greedy chain of `num_steps` tokens, by family.

    A chain begins after every token of a reference reply that has so many more tokens after it.
    """
    means: dict[Family, float] = {}
    layers = drafter.config.eagle_config["eagle_aux_hidden_state_layer_ids"]
    to_target = torch.arange(drafter.config.draft_vocab_size) + drafter.d2t
    for family, examples in _unseen(tokenizer, num_sessions):
        num_accepted = num_chains = 0
        for example in examples:
            turns = torch.tensor(example.turns)
            embeds, aux, normed = target_states(
                target, torch.tensor([example.token_ids]), aux_layer_ids=layers
            )
            said = target.lm_head(normed[0]).argmax(-1)  # row j: its choice of token j + 2
            # Row j is the first of a chain if tokens j + 1 to j + 1 + num_steps are of one reply.
            begins = (turns[1:-num_steps] == turns[1 + num_steps :]) & (turns[1:-num_steps] >= 0)
            is_accepted = begins
            for step, hidden in enumerate(drafter.unroll(embeds, aux, num_steps)):
                drafted = to_target[drafter.lm_head(drafter.norm(hidden[0])).argmax(-1)]
                is_right = drafted == said
                is_accepted = is_accepted & is_right[step : step + len(begins)]
                num_accepted += int(is_accepted.sum())
            num_chains += int(begins.sum())
        means[family] = num_accepted / num_chains
    return means


def average_precision(
    predictor: AcceptancePredictor, tokenizer: Tokenizer, *, num_sessions: int
) -> float:
    """How well the predictor tells drafts that are worth their verification from the others.

    The drafts are those of decoding the reference replies of `num_sessions` of each family.
    """
    sessions = [
        session
        for family in FAMILIES
        for session in demo_sessions(family, count=num_sessions, seed=_SEED)
    ]
    rows = cycle_rows(references(sessions, tokenizer), tokenizer)
    quality = payoff_quality(judged_by(rows, predictor), threshold=WORTH_LEN)
    assert quality.average_precision is not None, "no draft is worth its verification"
    return quality.average_precision


def _unseen(tokenizer: Tokenizer, num_sessions: int) -> list[tuple[Family, list[Example]]]:
    return [
        (family, encode(demo_sessions(family, count=num_sessions, seed=_SEED), tokenizer))
        for family in FAMILIES
    ]
