"""A client can ask for hidden states, and gets those of plain serving."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import CHAIN

FLAGS = ("--enable-return-hidden-states",)


def hidden_states(server: Any, prompt: str) -> list[np.ndarray]:
    """float[num_tokens, size] of the prompt, then of each output token except the last."""
    server.flush_cache()  # cached tokens of a prompt have no hidden states
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 48},
        "return_hidden_states": True,
    }
    answer = server.process.post("/generate", body)
    return [np.atleast_2d(part) for part in answer["meta_info"]["hidden_states"]]


@pytest.mark.parametrize(
    ("policy", "tree"), [("cache", ()), ("payoff", ()), ("both", ()), ("payoff", CHAIN)]
)
def test_hidden_states_are_those_of_plain_serving(
    start_server: Any, start_hvd: Any, long_prompt: str, policy: str, tree: tuple[str, ...]
) -> None:
    plain = start_server(*FLAGS)
    drafting = {"drafting": tree} if tree else {}
    server = start_hvd(policy, "--hvd-report-cycles", "true", *FLAGS, **drafting)
    expected, found = (hidden_states(each, long_prompt) for each in (plain, server))
    assert len(found) == 48
    assert [part.shape for part in found] == [part.shape for part in expected]
    for of_found, of_expected in zip(found, expected, strict=True):
        np.testing.assert_allclose(of_found, of_expected, rtol=1e-3, atol=1e-3)
    # Some steps verified chains only.
    if policy != "both":
        assert server.hvd_state()["num_cycles"]["cache"] > 0
