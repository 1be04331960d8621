"""The paper's own configuration, served."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hvd.demo.models import demo_models
from sglang_hvd.demo.modes import PAPER_MODES, Mode, server_flags
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.payoff.predictor import PAPER_PREDICTORS
from tests.e2e.conftest import Server, StartServer, assert_same_alone_and_together

CONFIG = Path(__file__).parents[2] / "configs" / "paper-qwen3-8b.yaml"
PlainIds = Callable[..., list[list[int]]]


@pytest.fixture
def start_paper(start_server: StartServer) -> Callable[..., Server]:
    """Start the demo models with the file's tree, its settings, and more flags."""
    tree = re.findall(r"(--speculative-(?:num|eagle)-\S+) (\d+)", CONFIG.read_text())
    assert len(tree) == 3

    def start(*flags: str) -> Server:
        return start_server(
            *("--speculative-algorithm", "HVD"),
            *("--speculative-draft-model-path", str(demo_models().drafter)),
            *(part for flag in tree for part in flag),
            *("--hvd-config", str(CONFIG), *flags),
        )

    return start


@pytest.mark.parametrize(
    ("policy", "sources"),
    [("payoff", {"cache", "model"}), ("frequency", {"cache", "model"}), ("cache", {"cache"})],
)
def test_the_paper_and_its_baselines_are_exact(
    policy: str,
    sources: set[str],
    start_paper: Callable[..., Server],
    plain_ids: PlainIds,
    prompts: list[str],
) -> None:
    expected = plain_ids(prompts)
    server = start_paper("--hvd-policy", policy)
    assert_same_alone_and_together(server, expected, prompts)
    state = server.hvd_state()
    used = {source for source, count in state["num_cycles"].items() if count}
    assert used >= sources
    # At 65 nodes a whole draft fits; the model drafter's tree is verified at 32.
    assert {"32", "65"} <= state["num_steps_by_width"].keys()
    if policy == "payoff":
        shipped = AcceptancePredictor.load(PAPER_PREDICTORS["paper"])
        assert state["predictor"]["fingerprint"] == shipped.fingerprint


@pytest.mark.parametrize("mode", [*PAPER_MODES])
def test_the_papers_modes_are_served_and_exact(
    mode: Mode, start_server: StartServer, plain_ids: PlainIds, prompts: list[str]
) -> None:
    _, _, *flags = server_flags(mode, demo_models())  # the fixture names the target
    server = start_server(*flags)
    answers = server.generate_all(prompts[::4], concurrency=3)
    assert [answer["output_ids"] for answer in answers] == plain_ids(prompts)[::4]
