"""A program of SGLang's frontend language runs against the server unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sglang as sgl

from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions


def _turn(question: str) -> str:
    return f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@sgl.function
def answer_and_more(s: Any, question: str) -> None:
    """Generate an answer, choose its kind, continue it in two ways, and append both."""
    s += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    s += sgl.gen("answer", max_tokens=60, temperature=0)
    s += _turn("What kind of answer was this?")
    s += sgl.select("kind", choices=["a file", "some code", "a sentence"])
    forks = s.fork(2)
    for fork, follow_up in zip(
        forks, ("Write getters for it.", "How do I stay calm?"), strict=True
    ):
        fork += _turn(follow_up)
        fork += sgl.gen("more", max_tokens=40, temperature=0, stop="\n\n")
    forks.join()
    for fork in forks:
        s += f"\n{fork['more']}"


@pytest.fixture(scope="module")
def questions() -> list[dict[str, str]]:
    """The first question of a session of every family."""
    return [
        {"question": session.turns[0].user}
        for family in FAMILIES
        for session in demo_sessions(family, count=1, seed=21)
    ]


def _outcome(state: Any) -> tuple[str, str, str]:
    return state["answer"], state["kind"], state.text()


def test_gen_select_and_fork_give_what_plain_serving_gives(
    start_server: Callable[..., Any],
    start_hvd: Callable[..., Any],
    questions: list[dict[str, str]],
) -> None:
    plain = sgl.RuntimeEndpoint(start_server().process.url)
    expected = [_outcome(answer_and_more.run(**q, backend=plain)) for q in questions]
    server = start_hvd("payoff", "--hvd-threshold", "1.5")
    hvd = sgl.RuntimeEndpoint(server.process.url)
    assert [_outcome(answer_and_more.run(**q, backend=hvd)) for q in questions] == expected
    batch = answer_and_more.run_batch(questions, backend=hvd, num_threads=4)
    assert [_outcome(state) for state in batch] == expected
    state = server.hvd_state()
    assert state["num_accepted_drafts"]["cache"] > 0
    assert state["num_accepted_drafts"]["model"] > 0
    assert state["num_requests"] == 0
