"""Greedy output with every parameter equals plain serving's, under every policy, tree and chain.

The reference has no overlap scheduling: with it, plain serving's penalties come one token late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sglang_hvd.demo.modes import HVD_MODES, MODEL_TREE_FLAGS, PAPER_MODES
from tests.e2e.answers import ask_all, differences
from tests.e2e.conftest import CHAIN, Server, StartServer, mixing, request_body
from tests.e2e.request_kinds import (
    EBNF,
    END_OF_MESSAGE,
    MAX_TOKENS,
    NEW_LINE,
    THE,
    Kind,
    Params,
    alone_and_combined,
    mixed_requests,
    parameters,
    processors,
    prompt_of,
    questions,
)
from tests.e2e.test_every_request import IN_TURN, PROCESSORS
from tests.e2e.test_overlap import INTERPRETED
from tests.e2e.test_retraction import SMALL_POOL

NUM_MIXED = 200
# All of them run at the same time, and none is retracted.
ALL_AT_ONCE = ("--max-running-requests", str(NUM_MIXED), "--max-total-tokens", "60000")

# Half of what the requests need. Metrics would add times to the answers.
RETRACTING = (
    *(flag for flag in SMALL_POOL if flag != "--enable-metrics"),
    *("--max-total-tokens", "1400"),
)


def _kinds(requests: dict[str, Params], **defaults: Any) -> list[Kind]:
    """One request of /generate for each of the parameters."""
    return [
        Kind(
            name,
            "/generate",
            request_body(
                prompt_of(questions()[number % len(questions())]),
                **{"max_new_tokens": MAX_TOKENS, **defaults, **params},
            ),
            is_drawn="temperature" in params and params.get("top_k") != 1,
        )
        for number, (name, params) in enumerate(requests.items())
    ]


def _faults(kinds: Sequence[Kind], expected: Sequence[Any], found: Sequence[Any]) -> str:
    """A line for each answer that is not as expected. What is drawn only has to come.

    Which prefixes are cached depends on the other requests, and is not compared.
    """
    lines = []
    for kind, one, other in zip(kinds, expected, found, strict=True):
        assert one[0] == other[0] == 200, (kind, one, other)
        faults = [] if kind.is_drawn else differences(one, other)
        if faults := [fault for fault in faults if ".cached_tokens" not in fault]:
            lines.append(f"{kind.name}: {'; '.join(faults[:3])}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def alone(start_server: StartServer) -> tuple[list[Kind], list[Any]]:
    """Each parameter alone, and combinations of them, with plain serving's answers."""
    kinds = _kinds(alone_and_combined())
    return kinds, ask_all(start_server(*IN_TURN), kinds, at_once=1)


# What each run asks; the other pairs are slow.
DAILY = {
    *((policy, "tree") for policy in ("allocate", "payoff", "both", "cache")),
    *((policy, "chain") for policy in ("allocate", "payoff")),
}
CASES = [
    pytest.param(
        *(policy, drafting),
        id=f"{policy}, {name}",
        marks=() if (policy, name) in DAILY else pytest.mark.slow,
    )
    for name, drafting in (("tree", MODEL_TREE_FLAGS), ("chain", CHAIN))
    for policy in HVD_MODES
    if policy not in PAPER_MODES
]


@pytest.mark.parametrize(("policy", "drafting"), CASES)
def test_each_parameter_alone_and_in_combinations(
    policy: str,
    drafting: tuple[str, ...],
    alone: tuple[list[Kind], list[Any]],
    start_hvd: Callable[..., Server],
    untimed: Callable[[str], tuple[str, ...]],
) -> None:
    kinds, expected = alone
    server = start_hvd(policy, *mixing(policy), *untimed(policy), *PROCESSORS, drafting=drafting)
    server.flush_cache()
    # First alone and without drafts of the same replies, then together and with them.
    for at_once in (1, 16):
        faults = _faults(kinds, expected, ask_all(server, kinds, at_once=at_once))
        assert not faults, faults
    state = server.hvd_state()
    assert state["num_requests"] == 0
    assert state["num_resyncs"] == 0
    assert sum(state["num_accepted_drafts"].values()) > 0


def test_two_hundred_requests_over_all_parameters_in_one_batch(
    start_server: StartServer,
    start_hvd: Callable[..., Server],
    untimed: Callable[[str], tuple[str, ...]],
) -> None:
    requests = mixed_requests(seed=31, count=NUM_MIXED, share_drawn=0.2)
    kinds = _kinds({f"request {number}": params for number, params in enumerate(requests)})
    assert 20 < sum(kind.is_drawn for kind in kinds) < 60
    expected = ask_all(start_server(*IN_TURN), kinds, at_once=1)
    server = start_hvd("allocate", *untimed("allocate"), *PROCESSORS, *ALL_AT_ONCE)
    # The second time, the replies of the first are drafts.
    for _ in range(2):
        faults = _faults(kinds, expected, ask_all(server, kinds, at_once=NUM_MIXED))
        assert not faults, faults
    state = server.hvd_state()
    assert state["num_accepted_drafts"]["cache"] > 0
    assert state["num_requests"] == 0


@pytest.mark.parametrize("drafting", [MODEL_TREE_FLAGS, CHAIN], ids=["tree", "chain"])
def test_a_thinking_budget_ends_the_thinking_at_the_same_token(
    drafting: tuple[str, ...], start_server: StartServer, start_hvd: Callable[..., Server]
) -> None:
    processor = processors()["thinking budget"]["custom_logit_processor"]
    budgets = {
        f"budget {budget}": {
            "custom_logit_processor": processor,
            "custom_params": {"thinking_budget": budget},
        }
        for budget in range(24)
    }
    kinds = _kinds(budgets, ignore_eos=True)
    expected = ask_all(start_server(*IN_TURN), kinds, at_once=1)
    server = start_hvd("payoff", *mixing("payoff"), *PROCESSORS, drafting=drafting)
    for at_once in (1, 16):
        faults = _faults(kinds, expected, ask_all(server, kinds, at_once=at_once))
        assert not faults, faults
    # The budget was what ended the thinking of nearly all of them: a line ends, and then " the".
    ended = [answer["output_ids"] for _, answer in expected]
    bound = [ids for ids in ended if THE in ids and ids[ids.index(THE) - 1] == NEW_LINE]
    assert len(bound) > len(budgets) * 3 / 4


@pytest.mark.parametrize(
    "drafting",
    [MODEL_TREE_FLAGS, pytest.param(CHAIN, marks=pytest.mark.slow)],
    ids=["tree", "chain"],
)
def test_an_n_gram_that_may_not_repeat_is_the_same_one(
    drafting: tuple[str, ...], start_server: StartServer, start_hvd: Callable[..., Server]
) -> None:
    processor = processors()["no repeated n-gram"]["custom_logit_processor"]
    long = {"ignore_eos": True, "max_new_tokens": 80}
    rules = {
        f"{size} of {window}": {
            "custom_logit_processor": processor,
            "custom_params": {"ngram_size": size, "window_size": window},
        }
        for size in (1, 2, 3, 5)
        for window in (20, 90)
    }
    kinds, free = _kinds(rules, **long), _kinds({rule: {} for rule in rules}, **long)
    plain = start_server(*IN_TURN)
    expected = ask_all(plain, kinds, at_once=1)
    changed = [
        one[1]["output_ids"] != other[1]["output_ids"]
        for one, other in zip(expected, ask_all(plain, free, at_once=1), strict=True)
    ]
    assert sum(changed) > len(rules) / 2
    server = start_hvd("payoff", *mixing("payoff"), *PROCESSORS, drafting=drafting)
    for at_once in (1, 16):
        faults = _faults(kinds, expected, ask_all(server, kinds, at_once=at_once))
        assert not faults, faults


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        ((), INTERPRETED),
        (RETRACTING, {}),
        pytest.param(("--chunked-prefill-size", "32"), {}, marks=pytest.mark.slow),
    ],
    ids=["overlap", "retraction", "chunked prefill"],
)
def test_what_changes_logits_does_so_however_requests_are_scheduled(
    flags: tuple[str, ...],
    environment: dict[str, str],
    start_server: StartServer,
    start_hvd: Callable[..., Server],
) -> None:
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    changes = [params for name in names for params in parameters()[name]]
    changes += list(processors().values())
    long = {"min_new_tokens": 160, "max_new_tokens": 170}
    kinds = _kinds({str(params): params for params in changes}, **long)
    expected = ask_all(start_server(*IN_TURN), kinds, at_once=1)
    server = start_hvd(
        "payoff", *mixing("payoff"), *PROCESSORS, *flags, environment=environment or None
    )
    found = ask_all(server, kinds, at_once=len(kinds))
    faults = _faults(kinds, expected, found)
    assert not faults, faults
    num_retracted = sum(answer["meta_info"]["num_retractions"] for _, answer in found)
    assert (num_retracted > 0) == (flags == RETRACTING)
    is_overlapped = not server.process.get("/server_info")["disable_overlap_schedule"]
    assert is_overlapped == bool(environment)
    assert server.hvd_state()["num_resyncs"] == 0


def test_a_grammar_ends_a_reply_that_ignores_the_end_of_the_message(
    start_server: StartServer, start_hvd: Callable[..., Server]
) -> None:
    """Plain serving adds a token that the grammar does not know: docs/support.md says so."""
    kinds = _kinds({"ebnf": {"ebnf": EBNF}, "regex": {"regex": "yes|no"}}, ignore_eos=True)
    expected = ask_all(start_server(*IN_TURN), kinds, at_once=1)
    server = start_hvd("payoff", *mixing("payoff"), *PROCESSORS)
    for (_, one), (_, other) in zip(expected, ask_all(server, kinds, at_once=1), strict=True):
        assert other["output_ids"] == one["output_ids"][:-1]
        assert other["output_ids"][-1] == END_OF_MESSAGE
