"""Replies that no server wrote."""

from __future__ import annotations

from sglang_hvd.demo.corpus.session import Family
from sglang_hvd.demo.play import Reply
from sglang_hvd.demo.reply_cycles import ReplyCycles
from sglang_hvd.view.cycles import Cycle
from sglang_hvd.view.replies import ViewedReply
from tests.view.made_up import cycle

TOKENS = ("a[b]", " c", "d", "\ne", " f", "g", " h")
CYCLES = (
    cycle(1, "cache", 1, ms=1.0),
    cycle(3, "both", 1, cache_right=1, model_right=1, ms=1.0),
    cycle(5, "model", 1, ms=1.0),
)


def reply(
    family: Family = "chat",
    *,
    num_tokens: int = len(TOKENS),
    num_accepted: int = 0,
    seconds: float = 1.0,
    text: str = "".join(TOKENS),
    cycles: tuple[Cycle, ...] = (),
) -> Reply:
    """A reply whose cycles accepted so many tokens in all, the prefill's not counted."""
    counts = ReplyCycles(num_tokens - 1 - num_accepted, num_accepted, 0)
    question = "Say this:\na b"
    tokens = tuple(range(num_tokens))
    return Reply(family, question, question, text, tokens, seconds, counts, cycles)


VIEWED = ViewedReply("chat: say this", "policy allocate", "Say this", TOKENS, CYCLES, 0.1)
