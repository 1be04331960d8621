"""Replies to whole sessions, as traces to replay: greedy ones of the target, and reference ones."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer

from sglang_hvd.demo.corpus.session import Session
from sglang_hvd.demo.gradients import workers
from sglang_hvd.demo.tokenizer import END_ID, START_ID
from sglang_hvd.demo.transformer import KeyValues, TargetModel
from sglang_hvd.traces.trace import Trace

_MAX_DRAFT = 64
_MAX_REPLY = 320


def roll_out(
    target: TargetModel,
    sessions: Sequence[Session],
    tokenizer: Tokenizer,
    *,
    on_session: Callable[[], None],
) -> list[Trace]:
    """One trace per turn; the target's own replies are the history of the later turns."""

    def play(number: int) -> list[Trace]:
        cache = KeyValues(target.a)
        reply = partial(_greedy, target, cache)
        traces = _play(sessions[number], f"{number}", tokenizer, reply)
        on_session()
        return traces

    with workers() as pool:
        return [trace for traces in pool.map(play, range(len(sessions))) for trace in traces]


def references(sessions: Sequence[Session], tokenizer: Tokenizer) -> list[Trace]:
    """One trace per turn with the reply that the target was trained to give: no model runs."""
    return [
        trace
        for number, session in enumerate(sessions)
        for trace in _play(session, f"reference {number}", tokenizer, _reference)
    ]


# The reply to a context, given the reference.
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
    target: TargetModel, cache: KeyValues, context: list[int], reference: list[int]
) -> list[int]:
    """The greedy reply, found by verifying drafts: the reference, then what followed before.

    Trained targets mostly say the reference, so a reply costs a few forward passes.
    """
    reply: list[int] = []
    while len(reply) < _MAX_REPLY and (not reply or reply[-1] != END_ID):
        if reply == reference[: len(reply)]:
            draft = reference[len(reply) : len(reply) + _MAX_DRAFT]
        else:
            draft = _continuation([*context, *reference], reply)
        known = context + reply
        tail = known[cache.num_tokens :]
        fed = torch.tensor([tail + draft])
        hidden = target.model(fed, cache)[-1][0, len(tail) - 1 :]
        greedy: list[int] = target.lm_head(hidden).argmax(-1).tolist()
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == greedy[num_accepted]:
            num_accepted += 1
        cache.truncate(len(known) + num_accepted)
        reply += greedy[: num_accepted + 1]
    reply = reply[: reply.index(END_ID) + 1] if END_ID in reply else reply[:_MAX_REPLY]
    cache.truncate(len(context) + len(reply))
    return reply


def _continuation(earlier: list[int], reply: list[int]) -> list[int]:
    """What followed the last three tokens of `reply` where they occurred last before."""
    known = [*earlier, *reply]
    last = reply[-3:]
    for start in range(len(known) - len(last) - 1, -1, -1):
        if known[start : start + len(last)] == last:
            return known[start + len(last) : start + len(last) + _MAX_DRAFT]
    return []
