"""Turns sessions into rows of tokens and batches of rows of similar length."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglang_hvd.demo.corpus.session import Family, Session
from sglang_hvd.demo.corpus.sessions import train_sessions
from sglang_hvd.demo.training.demo_tokenizer import END_ID, PAD_ID, START_ID

_NUM_TOKENS_AT_ONCE = 500_000  # of which batches are made; each such part draws from its own seed

_SESSION_TOKENS: Mapping[Family, int] = MappingProxyType(  # on average
    {"editing": 633, "tool_calls": 339, "sql": 220, "code": 289, "qa": 240, "chat": 140}
)

# Shares of all tokens.
EVEN: Mapping[Family, float] = MappingProxyType(
    {"editing": 0.46, "tool_calls": 0.17, "sql": 0.1, "code": 0.16, "qa": 0.05, "chat": 0.06}
)
MOSTLY_HARD: Mapping[Family, float] = MappingProxyType(
    {"editing": 0.45, "tool_calls": 0.1, "sql": 0.1, "code": 0.18, "qa": 0.05, "chat": 0.12}
)


@dataclass(frozen=True, slots=True)
class Example:
    """One session as the chat template writes it.

    turns: for each token, the number of the reply that it belongs to, or -1 for tokens of prompts.
        The token that ends a reply belongs to it.
    """

    token_ids: list[int]
    turns: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """int64 token_ids and bool is_reply, both [batch, length]. Shorter rows are padded."""

    token_ids: Tensor
    is_reply: Tensor


def encode(sessions: Iterable[Session], tokenizer: Tokenizer) -> list[Example]:
    """The token ids that `tokenizer.apply_chat_template` gives for every session."""
    newline = tokenizer.encode("\n").ids
    sessions = list(sessions)
    texts = [
        text
        for session in sessions
        for turn in session.turns
        for text in (f"user\n{turn.user}", "assistant\n", turn.assistant)
    ]
    encoded = iter(encoding.ids for encoding in tokenizer.encode_batch(texts))
    examples: list[Example] = []
    for session in sessions:
        token_ids: list[int] = []
        turns: list[int] = []
        for index in range(len(session.turns)):
            prompt = [START_ID, *next(encoded), END_ID, *newline, START_ID, *next(encoded)]
            reply = [*next(encoded), END_ID]
            token_ids += prompt + reply + newline
            turns += [-1] * len(prompt) + [index] * len(reply) + [-1] * len(newline)
        examples.append(Example(token_ids, turns))
    return examples


def sessions_of(num_tokens: int, seed: int, shares: Mapping[Family, float] = EVEN) -> list[Session]:
    """Sessions of all families, in random order, with about `num_tokens` tokens together."""
    sessions = [
        session
        for family, share in shares.items()
        for session in train_sessions(
            family, count=max(1, round(num_tokens * share / _SESSION_TOKENS[family])), seed=seed
        )
    ]
    Random(seed).shuffle(sessions)
    return sessions


def batches_of(
    num_tokens: int,
    seed: int,
    tokenizer: Tokenizer,
    *,
    tokens_per_batch: int,
    shares: Mapping[Family, float] = EVEN,
) -> list[Batch]:
    """Batches of sessions that are drawn from `seed` and the seeds after it."""
    batches: list[Batch] = []
    for first in range(0, num_tokens, _NUM_TOKENS_AT_ONCE):
        part_seed = seed + first // _NUM_TOKENS_AT_ONCE
        sessions = sessions_of(min(_NUM_TOKENS_AT_ONCE, num_tokens - first), part_seed, shares)
        examples = encode(sessions, tokenizer)
        batches += make_batches(examples, num_tokens=tokens_per_batch, seed=part_seed)
    return batches


def make_batches(examples: Sequence[Example], *, num_tokens: int, seed: int) -> list[Batch]:
    """Batches of at most `num_tokens` tokens, padding included, in random order."""
    rows = sorted(examples, key=lambda example: len(example.token_ids))
    groups: list[list[Example]] = []
    for example in rows:
        if not groups or (len(groups[-1]) + 1) * len(example.token_ids) > num_tokens:
            groups.append([])
        groups[-1].append(example)
    Random(seed).shuffle(groups)
    return [_pad(group) for group in groups]


def _pad(group: Sequence[Example]) -> Batch:
    length = max(len(example.token_ids) for example in group)
    token_ids = torch.full((len(group), length), PAD_ID)
    is_reply = torch.zeros((len(group), length), dtype=torch.bool)
    for row, example in enumerate(group):
        token_ids[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        is_reply[row, : len(example.turns)] = torch.tensor(example.turns) >= 0
    return Batch(token_ids, is_reply)
