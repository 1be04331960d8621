"""Sampled output follows the target model's distribution, whatever drafted it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import SMALL_TREE, mixing

NUM_SAMPLES, NUM_AT_ONCE = 2000, 100
NUM_TOKENS = 4
# All samples of a prompt run at once: a step of many requests takes little longer than one of few,
# as long as each request verifies few nodes.
MANY = ("--max-running-requests", str(NUM_AT_ONCE), "--hvd-verify-width", "12")
# The chance that a correct server fails one of these tests.
FALSE_ALARM = 1e-5
# Outcomes expected fewer times than this are counted as one, as the chi-square test needs.
MIN_EXPECTED = 8
# With fewer likely outcomes than this, the test would detect little.
MIN_OUTCOMES = 6

SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.9},
]


class Target:
    """The target model in plain transformers, as the source of exact probabilities."""

    def __init__(self, path: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self.likely_outcomes = cache(self._likely_outcomes)

    def token_ids(self, prompt: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def _likely_outcomes(
        self, prompt_ids: tuple[int, ...], num_tokens: int, *, at_least: float, **sampling: float
    ) -> dict[tuple[int, ...], float]:
        """Return all outputs of so many tokens with at least this probability, and the latter."""
        outcomes = {(): 1.0}
        for _ in range(num_tokens):
            texts = [prompt_ids + output_ids for output_ids in outcomes]
            longer: dict[tuple[int, ...], float] = {}
            for output_ids, next_token in zip(outcomes, self._next_tokens(texts), strict=True):
                probs = filtered(next_token, **sampling) * outcomes[output_ids]
                for token_id in torch.nonzero(probs >= at_least).flatten().tolist():
                    longer[(*output_ids, token_id)] = float(probs[token_id])
            if not longer:
                return {}
            outcomes = longer
        return outcomes

    def _next_tokens(self, texts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return the logits of the token after each text. The texts are equally long."""
        with torch.no_grad():
            return self._model(torch.tensor(texts), logits_to_keep=1).logits[:, 0]


def filtered(
    logits: torch.Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    """Return the distribution that one token is drawn from."""
    probs = torch.softmax(logits / temperature, dim=-1)
    order = torch.argsort(probs, descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k:
        keep[order[top_k:]] = False
    if top_p < 1:
        keep[order[(probs[order].cumsum(0) - probs[order]) > top_p]] = False
    kept = probs * keep
    return kept / kept.sum()


def chi_square_p_value(
    observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> float:
    """Return P(chi-square statistic at least this large). All unexpected outcomes count as one."""
    total = sum(observed.values())
    rest = total * (1 - sum(expected.values()))
    statistic = sum((observed[o] - total * p) ** 2 / (total * p) for o, p in expected.items())
    degrees = len(expected) - 1
    if rest >= MIN_EXPECTED:
        statistic += (total - sum(observed[o] for o in expected) - rest) ** 2 / rest
        degrees += 1
    return float(chi2.sf(statistic, degrees))


def _prompt(target: Target, prompts: Sequence[str], **sampling: float) -> tuple[int, ...]:
    """Cut a prompt where the target is unsure: several outcomes have most of the probability."""
    for token_ids in map(target.token_ids, sorted(prompts, key=len, reverse=True)):
        for share in (0.9, 0.75, 0.5):
            cut = token_ids[: int(share * len(token_ids))]
            likely = _expected(target, cut, **sampling)
            if len(likely) >= MIN_OUTCOMES and sum(likely.values()) >= 0.6:
                return cut
    raise AssertionError(f"the target is sure of every prompt under {sampling}")


def _sample(server: Any, prompt_ids: Sequence[int], **sampling: float) -> Counter[tuple[int, ...]]:
    observed: Counter[tuple[int, ...]] = Counter()
    for _ in range(NUM_SAMPLES // NUM_AT_ONCE):
        answers = server.generate(
            list(prompt_ids), n=NUM_AT_ONCE, max_new_tokens=NUM_TOKENS, ignore_eos=True, **sampling
        )
        observed.update(tuple(answer["output_ids"]) for answer in answers)
    return observed


def _expected(
    target: Target, prompt_ids: tuple[int, ...], **sampling: float
) -> dict[tuple[int, ...], float]:
    return target.likely_outcomes(
        prompt_ids, NUM_TOKENS, at_least=MIN_EXPECTED / NUM_SAMPLES, **sampling
    )


@pytest.fixture(scope="module")
def target(models: Any) -> Target:
    return Target(models.target)


# Every policy and every way of sampling; the other pairs are slow.
DAILY = {("allocate", 0), ("cache", 1), ("payoff", 2), ("both", 2)}
CASES = [
    pytest.param(
        *(policy, sampling),
        id=f"{policy}, {sampling}",
        marks=() if (policy, place) in DAILY else pytest.mark.slow,
    )
    for policy in ("cache", "payoff", "both", "allocate")
    for place, sampling in enumerate(SAMPLING)
]


@pytest.mark.parametrize(("policy", "sampling"), CASES)
def test_samples_follow_the_target_model(
    policy: str,
    sampling: dict[str, float],
    start_hvd: Callable[..., Any],
    target: Target,
    prompts: list[str],
    untimed: Callable[[str], tuple[str, ...]],
) -> None:
    server = start_hvd(policy, *mixing(policy, "1.0"), *MANY, *untimed(policy), drafting=SMALL_TREE)
    prompt_ids = _prompt(target, prompts, **sampling)
    observed = _sample(server, prompt_ids, **sampling)
    assert chi_square_p_value(observed, _expected(target, prompt_ids, **sampling)) > FALSE_ALARM
    accepted = server.hvd_state()["num_accepted_drafts"]
    sources = {"cache": ["cache"], "payoff": ["cache", "model"], "both": ["both"]}
    assert all(accepted[source] > 0 for source in sources.get(policy, []))
    assert sum(accepted.values()) > 0


@pytest.mark.slow  # the interpreter runs every step
def test_samples_of_steps_that_run_ahead_follow_the_target_model(
    start_hvd: Callable[..., Any],
    target: Target,
    prompts: list[str],
    running_ahead: tuple[str, ...],
) -> None:
    server = start_hvd(
        *("allocate", *MANY, *running_ahead),
        drafting=SMALL_TREE,
        environment={"TRITON_INTERPRET": "1"},
    )
    sampling = SAMPLING[0]
    prompt_ids = _prompt(target, prompts, **sampling)
    observed = _sample(server, prompt_ids, **sampling)
    assert chi_square_p_value(observed, _expected(target, prompt_ids, **sampling)) > FALSE_ALARM
    assert server.hvd_state()["num_steps_ahead"] > 0


def test_the_test_tells_a_slightly_wrong_temperature_apart(
    start_hvd: Callable[..., Any], target: Target, prompts: list[str]
) -> None:
    prompt_ids = _prompt(target, prompts, temperature=1.0)
    observed = _sample(start_hvd("cache", *MANY, drafting=SMALL_TREE), prompt_ids, temperature=1.0)
    for temperature, is_right in ((1.0, True), (0.85, False)):
        expected = _expected(target, prompt_ids, temperature=temperature)
        assert (chi_square_p_value(observed, expected) > FALSE_ALARM) == is_right
