"""Replies to whole sessions as traces: the target's greedy replies, and the reference replies."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, PreTrainedModel

from sglang_hvd.demo.corpus.session import Session
from sglang_hvd.demo.training.demo_tokenizer import END_ID, START_ID
from sglang_hvd.demo.training.gradients import workers
from sglang_hvd.traces.trace import Trace

_MAX_DRAFT = 64
_MAX_REPLY = 320


def roll_out(
    target: PreTrainedModel,
    sessions: Sequence[Session],
    tokenizer: Tokenizer,
    *,
    on_session: Callable[[], None],
) -> list[Trace]:
    """One trace per turn. The target's own replies are the history of later turns."""

    def play(number: int) -> list[Trace]:
        cache = DynamicCache()
        reply = partial(_greedy, target, cache)
        traces = _play(sessions[number], f"{number}", tokenizer, reply)
        on_session()
        return traces

    with workers() as pool:
        return [trace for traces in pool.map(play, range(len(sessions))) for trace in traces]


def references(sessions: Sequence[Session], tokenizer: Tokenizer) -> list[Trace]:
    """One trace per turn with the reply that the target was trained to give. No model runs."""
    return [
        trace
        for number, session in enumerate(sessions)
        for trace in _play(session, f"reference {number}", tokenizer, _reference)
    ]


# A function of the context and the reference that returns the reply.
_Reply = Callable[[list[int], list[int]], list[int]]


def _play(session: Session, name: str, tokenizer: Tokenizer, reply_to: _Reply) -> list[Trace]:
    newline = tokenizer.encode("\n").ids
    context: list[int] = []
    traces: list[Trace] = []
    for index, turn in enumerate(session.turns):
        user = tokenizer.encode(f"user\n{turn.user}").ids
        context += [
            START_ID,
            *user,
            END_ID,
            *newline,
            START_ID,
            *tokenizer.encode("assistant\n").ids,
        ]
        reply = reply_to(context, [*tokenizer.encode(turn.assistant).ids, END_ID])
        traces.append(
            Trace(
                prompt_ids=np.array(context, dtype=np.int32),
                output_ids=np.array(reply, dtype=np.int32),
                session=f"{session.family} {name}",
                turn=index,
                family=session.family,
            )
        )
        context += [*reply, *newline]
    return traces


def _reference(context: list[int], reference: list[int]) -> list[int]:
    return reference[:_MAX_REPLY]


@torch.no_grad()
def _greedy(
    target: PreTrainedModel, cache: DynamicCache, context: list[int], reference: list[int]
) -> list[int]:
    """The greedy reply, found by verifying drafts.

    A draft is the reference while the reply follows it, then an earlier continuation of the last
    tokens. A trained target mostly says the reference, so a reply takes a few forward passes.

    cache: keys and values of a prefix of the context. Afterwards it holds a prefix of the context
        and the reply.
    """
    reply: list[int] = []
    while len(reply) < _MAX_REPLY and (not reply or reply[-1] != END_ID):
        if reply == reference[: len(reply)]:
            draft = reference[len(reply) : len(reply) + _MAX_DRAFT]
        else:
            draft = _continuation([*context, *reference], reply)
        known = context + reply
        fed = torch.tensor([known[cache.get_seq_length() :] + draft])
        logits = target(fed, past_key_values=cache, logits_to_keep=len(draft) + 1).logits
        greedy: list[int] = logits[0].argmax(-1).tolist()
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == greedy[num_accepted]:
            num_accepted += 1
        cache.crop(len(known) + num_accepted)
        reply += greedy[: num_accepted + 1]
    reply = reply[: reply.index(END_ID) + 1] if END_ID in reply else reply[:_MAX_REPLY]
    cache.crop(len(context) + len(reply))
    return reply


def _continuation(earlier: list[int], reply: list[int]) -> list[int]:
    """The tokens after the latest earlier occurrence of the last three tokens of `reply`."""
    known = [*earlier, *reply]
    last = reply[-3:]
    for start in range(len(known) - len(last) - 1, -1, -1):
        if known[start : start + len(last)] == last:
            return known[start + len(last) : start + len(last) + _MAX_DRAFT]
    return []
