"""Every kind of request is answered as plain serving answers it, on empty caches and on full ones.

The reference has no overlap scheduling: with it, plain serving's penalties come one token late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.answers import ask_all, differences
from tests.e2e.conftest import CHAIN, Server, StartServer, mixing
from tests.e2e.request_kinds import Kind, all_kinds

PROCESSORS = ("--enable-custom-logit-processor",)
IN_TURN = ("--disable-overlap-schedule", *PROCESSORS)
# Kinds that are asked before the caches are emptied: all their texts fit into the KV pool.
PER_FLUSH = 60
AT_ONCE = 8

Answers = list[tuple[int, Any]]


def _cold_and_warm(server: Server, kinds: Sequence[Kind]) -> tuple[Answers, Answers]:
    """Answers to all kinds of requests, asked twice in a row."""
    cold: Answers = []
    warm: Answers = []
    for start in range(0, len(kinds), PER_FLUSH):
        server.flush_cache()
        for answers in (cold, warm):
            answers += ask_all(server, kinds[start : start + PER_FLUSH], at_once=AT_ONCE)
    return cold, warm


@pytest.fixture(scope="module")
def answered(
    start_server: StartServer, start_hvd: Callable[..., Server]
) -> dict[str, tuple[Answers, Answers]]:
    """The answers, cold and warm, of plain serving and of two HVD servers."""
    servers = {
        "plain": start_server(*IN_TURN),
        "tree": start_hvd("payoff", *mixing("payoff"), *PROCESSORS),
        "chain": start_hvd("cache", *PROCESSORS, drafting=CHAIN),
    }
    kinds = all_kinds()
    of_each = [[kind.as_plain_serving_tells() for kind in kinds], kinds, kinds]
    with ThreadPoolExecutor(2) as pool:  # as many as there are cores
        found = pool.map(_cold_and_warm, servers.values(), of_each)
        answers = dict(zip(servers, found, strict=True))
    for server in (servers["tree"], servers["chain"]):
        state = server.hvd_state()
        assert state["num_requests"] == 0
        assert state["num_accepted_drafts"]["cache"] > 1000
    return answers


@pytest.mark.parametrize("drafts", ["tree", "chain"])
@pytest.mark.parametrize("place", [0, 1], ids=["cold", "warm"])
def test_every_kind_of_request_is_answered_as_in_plain_serving(
    answered: dict[str, tuple[Answers, Answers]], drafts: str, place: int
) -> None:
    wrong = {}
    for kind, expected, found in zip(
        all_kinds(), answered["plain"][place], answered[drafts][place], strict=True
    ):
        if faults := differences(expected, found, is_drawn=kind.is_drawn):
            wrong[kind.name] = faults[:3]
    assert not wrong, "\n".join(f"{name}: {'; '.join(faults)}" for name, faults in wrong.items())
