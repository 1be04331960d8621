"""Sampling with a seed draws the tokens that plain serving draws with it, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.answers import ask, ask_all
from tests.e2e.conftest import CHAIN, Server, StartServer, mixing
from tests.e2e.request_kinds import Kind, mixed_requests
from tests.e2e.test_every_parameter import _faults, _kinds
from tests.e2e.test_every_request import IN_TURN, PROCESSORS

# SGLang heeds seeds only with deterministic inference, under which HVD verifies chains.
DETERMINISTIC = ("--enable-deterministic-inference", "--attention-backend", "torch_native")
NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def seeded(start_server: StartServer) -> tuple[list[Kind], list[Any]]:
    """Requests over all parameters, most of them sampled, with plain serving's answers to each."""
    requests = mixed_requests(seed=71, count=NUM_REQUESTS, share_drawn=0.75)
    for params in requests:
        params.pop("min_p", None)  # which ends a plain server that samples with seeds
    kinds = _kinds({f"request {number}": params for number, params in enumerate(requests)})
    assert sum(kind.is_drawn for kind in kinds) > NUM_REQUESTS / 2
    # Seeds settle what is drawn, so that all of an answer is compared.
    kinds = [Kind(kind.name, kind.path, kind.body) for kind in kinds]
    return kinds, ask_all(start_server(*IN_TURN, *DETERMINISTIC), kinds, at_once=1)


@pytest.mark.parametrize(
    "policy",
    [
        "payoff",
        pytest.param("cache", marks=pytest.mark.slow),
        pytest.param("allocate", marks=pytest.mark.slow),
        pytest.param("model", marks=pytest.mark.slow),
        pytest.param("frequency", marks=pytest.mark.slow),
    ],
)
def test_replies_with_seeds_are_those_of_plain_serving(
    policy: str,
    seeded: tuple[list[Kind], list[Any]],
    start_hvd: Callable[..., Server],
    untimed: Callable[[str], tuple[str, ...]],
) -> None:
    kinds, expected = seeded
    server = start_hvd(
        *(policy, *mixing(policy), *untimed(policy), *PROCESSORS, *DETERMINISTIC), drafting=CHAIN
    )
    server.flush_cache()
    # First without drafts of the same replies, then with them.
    for _ in range(2):
        faults = _faults(kinds, expected, ask_all(server, kinds, at_once=16))
        assert not faults, faults
    state = server.hvd_state()
    assert state["num_requests"] == 0
    assert state["num_resyncs"] == 0
    assert sum(state["num_accepted_drafts"].values()) > NUM_REQUESTS


def test_min_p_is_refused(start_hvd: Callable[..., Server]) -> None:
    server = start_hvd("payoff", *mixing("payoff"), *PROCESSORS, *DETERMINISTIC, drafting=CHAIN)
    [kind] = _kinds({"min_p": {"temperature": 1.0, "min_p": 0.2}})
    status, answer = ask(server, kind.path, kind.body)
    assert status == 400
    assert "min_p does not work with --enable-deterministic-inference" in str(answer)


def test_another_seed_gives_another_reply(
    seeded: tuple[list[Kind], list[Any]], start_server: StartServer
) -> None:
    """Otherwise equal replies would prove nothing."""
    kinds, expected = seeded
    drawn = [
        (kind, answer)
        for kind, (_, answer) in zip(kinds, expected, strict=True)
        if kind.body["sampling_params"]["temperature"] >= 0.8
        and kind.body["sampling_params"].get("top_k", -1) == -1
    ]
    others = [_with_seed(kind, 1234567) for kind, _ in drawn]
    assert len(drawn) > 20
    answers = ask_all(start_server(*IN_TURN, *DETERMINISTIC), others, at_once=16)
    changed = sum(
        answer["output_ids"] != other["output_ids"]
        for (_, answer), (_, other) in zip(drawn, answers, strict=True)
    )
    assert changed > len(drawn) / 2


def _with_seed(kind: Kind, seed: int) -> Kind:
    params = {**kind.body["sampling_params"], "sampling_seed": seed}
    return Kind(kind.name, kind.path, {**kind.body, "sampling_params": params})
