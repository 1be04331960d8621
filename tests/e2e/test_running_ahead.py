"""Steps that run ahead give plain serving's output with every parameter, however a server runs.

Only policy `allocate` runs ahead. Graphs, masks and long runs are in test_overlap.py. What a GPU
could break is in docs/experiments/allocation.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.answers import ask_all
from tests.e2e.conftest import CHAIN, SMALL_TREE, Server, StartServer, request_body
from tests.e2e.request_kinds import Kind, Params, alone_and_combined, mixed_requests
from tests.e2e.test_every_parameter import RETRACTING, _faults, _kinds
from tests.e2e.test_every_request import IN_TURN, PROCESSORS
from tests.e2e.test_overlap import INTERPRETED
from tests.e2e.test_seeded import DETERMINISTIC
from tests.e2e.test_tensor_parallel import TWO_RANKS

AT_ONCE = 16
# A batch with one of these is planned from the tokens of the last step.
NEEDS_TOKENS = {
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_new_tokens"),
    *("regex", "json_schema", "ebnf", "custom_logit_processor"),
}
OF_HVD: dict[str, Params] = {
    str(asked): {"custom_params": {"hvd": asked}}
    for asked in (
        *("off", {"policy": "cache"}, {"policy": "model"}, {"max_draft_tokens": 3}),
        *({"learn": False, "share": False}, {"report_cycles": True}),
    )
}
PAGES = ("--page-size", "16", "--disable-radix-cache", "--chunked-prefill-size", "32")


def _needs_tokens(params: Params) -> bool:
    return bool(params.keys() & NEEDS_TOKENS) or params in OF_HVD.values()


@pytest.mark.parametrize(
    ("flags", "drafting", "of_both", "more"),
    [
        (("--hvd-set", "postpone_extend=plain"), SMALL_TREE, (), {}),
        (PAGES, CHAIN, (), {}),
        pytest.param(
            *(("--hvd-set", "postpone_extend=never"), SMALL_TREE, (), {"shape": "qwen3"}),
            marks=pytest.mark.slow,
        ),
        (RETRACTING, CHAIN, (), {}),
        ((), CHAIN, DETERMINISTIC, {}),
        ((), SMALL_TREE, ("--tp-size", "2"), {"environment": TWO_RANKS}),
    ],
    ids=["tree", "pages", "another shape", "retraction", "seeds", "two ranks"],
)
def test_every_parameter_while_steps_run_ahead(
    flags: tuple[str, ...],
    drafting: tuple[str, ...],
    of_both: tuple[str, ...],
    more: dict[str, Any],
    start_server: StartServer,
    start_hvd: Callable[..., Server],
    running_ahead: tuple[str, ...],
    prompts: list[str],
) -> None:
    requests: dict[str, Params] = {**alone_and_combined(), **OF_HVD}
    if of_both == DETERMINISTIC:
        drawn = mixed_requests(seed=71, count=60, share_drawn=0.75)
        requests = {str(params): params for params in drawn if "min_p" not in params}
    kinds = _kinds(requests)
    if of_both == DETERMINISTIC:  # seeds settle what is drawn
        kinds = [Kind(kind.name, kind.path, kind.body) for kind in kinds]
    needs_tokens = [_needs_tokens(params) for params in requests.values()]
    copying = [Kind("copying", "/generate", request_body(prompt)) for prompt in prompts[::4]]
    kinds, needs_tokens = kinds + copying, needs_tokens + [False] * len(copying)
    expected = ask_all(start_server(*IN_TURN, *of_both, **more), kinds, at_once=1)
    environment = {**INTERPRETED, **more.get("environment", {})}
    server = start_hvd(
        *("allocate", *running_ahead, *PROCESSORS, *flags, *of_both),
        drafting=drafting,
        **{**more, "environment": environment},
    )
    before = server.hvd_state()
    for leaves_out in (True, False):
        rows = [row for row, needs in enumerate(needs_tokens) if not (leaves_out and needs)]
        asked = [kinds[row] for row in rows]
        with ThreadPoolExecutor(1) as pool:
            aborted = pool.submit(_abort, server, prompts[1::4])
            found = ask_all(server, asked, at_once=AT_ONCE)
            aborted.result()
        faults = _faults(asked, [expected[row] for row in rows], found)
        assert not faults, faults
        state = server.hvd_state()
        assert state["num_steps_ahead"] > before["num_steps_ahead"]
        before = state
        server.flush_cache()
    assert state["num_resyncs"] == state["num_requests"] == 0
    single = [answer for _, answer in found if isinstance(answer, dict)]  # n is 1
    num_retracted = sum(answer["meta_info"]["num_retractions"] for answer in single)
    assert (num_retracted > 0) == (flags == RETRACTING)


def _abort(server: Server, prompts: Sequence[str]) -> None:
    """Each client disconnects after the first token."""
    for prompt in prompts:
        with contextlib.closing(server.stream(request_body(prompt))) as response:
            response.readline()
