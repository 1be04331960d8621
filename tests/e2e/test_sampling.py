"""Sampled output follows the target model's distribution, whatever drafted it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2, ncx2
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import SMALL_TREE, mixing
from tests.e2e.request_kinds import processors
from tests.e2e.test_every_request import PROCESSORS

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

# Outputs in which what a parameter does depends on the tokens of the output itself.
NUM_PENALISED_TOKENS = 6
# The least chance of detecting that the parameter has no effect: the control.
MIN_POWER = 0.999

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
        self, prompt_ids: tuple[int, ...], num_tokens: int, *, at_least: float, **sampling: Any
    ) -> dict[tuple[int, ...], float]:
        """Return all outputs of so many tokens with at least this probability, and the latter."""
        outcomes = {(): 1.0}
        for _ in range(num_tokens):
            texts = [prompt_ids + output_ids for output_ids in outcomes]
            longer: dict[tuple[int, ...], float] = {}
            for output_ids, next_token in zip(outcomes, self._next_tokens(texts), strict=True):
                probs = next_probs(next_token, prompt_ids, output_ids, **sampling)
                probs *= outcomes[output_ids]
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


def next_probs(
    logits: torch.Tensor,
    prompt_ids: tuple[int, ...],
    output_ids: tuple[int, ...],
    *,
    processor: str | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    **filters: float,
) -> torch.Tensor:
    """Return the distribution of the token after an output of that prompt.

    processor: of request_kinds.processors().
    """
    counts = torch.bincount(torch.tensor(output_ids, dtype=torch.long), minlength=len(logits))
    logits = logits - frequency_penalty * counts - presence_penalty * (counts > 0)
    scaled = torch.where(logits < 0, logits * repetition_penalty, logits / repetition_penalty)
    logits = torch.where(counts > 0, scaled, logits)
    if processor is not None:
        request = SimpleNamespace(
            origin_input_ids=array("q", prompt_ids), output_ids=array("q", output_ids)
        )
        params = processors()[processor]
        change = CustomLogitProcessor.from_str(params["custom_logit_processor"])
        [logits] = change(logits[None], [{**params["custom_params"], "__req__": request}])
    return filtered(logits, **filters)


def filtered(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """Return the distribution that one token is drawn from."""
    probs = torch.softmax(logits / temperature, dim=-1)
    order = torch.argsort(probs, descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k:
        keep[order[top_k:]] = False
    if top_p < 1:
        keep[order[(probs[order].cumsum(0) - probs[order]) > top_p]] = False
    keep &= probs >= min_p * probs.max()
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


def power(
    real: dict[tuple[int, ...], float], supposed: dict[tuple[int, ...], float], num_samples: int
) -> float:
    """Return the chance that samples of the real distribution fail a test for the supposed one."""
    pairs = [(real.get(outcome, 0.0), probability) for outcome, probability in supposed.items()]
    rest = 1 - sum(probability for _, probability in pairs)
    if rest * num_samples >= MIN_EXPECTED:
        pairs.append((1 - sum(probability for probability, _ in pairs), rest))
    degrees = len(pairs) - 1
    noncentrality = num_samples * sum((one - other) ** 2 / other for one, other in pairs)
    return float(ncx2.sf(chi2.isf(FALSE_ALARM, degrees), degrees, noncentrality))


def _prompt(target: Target, prompts: Sequence[str], **sampling: float) -> tuple[int, ...]:
    """Cut a prompt where the target is unsure: several outcomes have most of the probability."""
    for token_ids in map(target.token_ids, sorted(prompts, key=len, reverse=True)):
        for share in (0.9, 0.75, 0.5):
            cut = token_ids[: int(share * len(token_ids))]
            likely = _expected(target, cut, **sampling)
            if len(likely) >= MIN_OUTCOMES and sum(likely.values()) >= 0.6:
                return cut
    raise AssertionError(f"the target is sure of every prompt under {sampling}")


def _sample(
    server: Any, prompt_ids: Sequence[int], num_tokens: int = NUM_TOKENS, **sampling: Any
) -> Counter[tuple[int, ...]]:
    observed: Counter[tuple[int, ...]] = Counter()
    for _ in range(NUM_SAMPLES // NUM_AT_ONCE):
        answers = server.generate(
            list(prompt_ids), n=NUM_AT_ONCE, max_new_tokens=num_tokens, ignore_eos=True, **sampling
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


# Parameters whose effect on a token depends on the tokens before it, or that filter.
PENALISING: Mapping[str, Mapping[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence and repetition": {"presence_penalty": 1.0, "repetition_penalty": 1.3},
    "min_p": {"min_p": 0.1},
    "min_p and penalty": {"min_p": 0.05, "frequency_penalty": 0.8, "top_p": 0.95},
    "processor": {"processor": "no repeated n-gram"},
}
DAILY_PENALISING = {
    *(("payoff", name) for name in ("frequency_penalty", "processor")),
    ("allocate", "presence and repetition"),
    ("cache", "min_p and penalty"),
}


PENALISED_CASES = [
    pytest.param(
        *(policy, name),
        id=f"{policy}, {name}",
        marks=() if (policy, name) in DAILY_PENALISING else pytest.mark.slow,
    )
    for policy in ("payoff", "allocate", "cache", "both")
    for name in PENALISING
]


@pytest.mark.parametrize(("policy", "name"), PENALISED_CASES)
def test_samples_with_penalties_min_p_and_processors_follow_the_target_model(
    policy: str,
    name: str,
    start_hvd: Callable[..., Any],
    target: Target,
    prompts: list[str],
    untimed: Callable[[str], tuple[str, ...]],
) -> None:
    """A server that heeds the parameter fails with probability FALSE_ALARM, and one that does not
    passes with 1 - MIN_POWER. The control is the distribution without the parameter."""
    changes = PENALISING[name]
    prompt_ids, expected, control = _telling_prompt(target, prompts, changes)
    server = start_hvd(
        *(policy, *mixing(policy, "1.0"), *MANY, *untimed(policy), *PROCESSORS), drafting=SMALL_TREE
    )
    asked = dict(changes)
    asked |= processors()[asked.pop("processor")] if "processor" in asked else {}
    observed = _sample(server, prompt_ids, NUM_PENALISED_TOKENS, temperature=1.0, **asked)
    assert chi_square_p_value(observed, expected) > FALSE_ALARM
    assert chi_square_p_value(observed, control) < FALSE_ALARM
    assert sum(server.hvd_state()["num_accepted_drafts"].values()) > 0


def _telling_prompt(
    target: Target, prompts: Sequence[str], changes: Mapping[str, Any]
) -> tuple[tuple[int, ...], dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """Cut a prompt where the parameters matter. Return it, with the likely outputs with them and
    without them."""
    for text in sorted(prompts, key=len):
        token_ids = target.token_ids(text)
        for share in (0.9, 0.75, 0.5):
            cut = token_ids[: int(share * len(token_ids))]
            expected, control = (
                target.likely_outcomes(
                    cut, NUM_PENALISED_TOKENS, at_least=MIN_EXPECTED / NUM_SAMPLES, **sampling
                )
                for sampling in ({"temperature": 1.0, **changes}, {"temperature": 1.0})
            )
            if (
                len(expected) >= MIN_OUTCOMES
                and sum(expected.values()) >= 0.45
                and len(control) > 1
                and power(expected, control, NUM_SAMPLES) >= MIN_POWER
            ):
                return cut, expected, control
    raise AssertionError(f"no prompt tells whether {changes} have an effect")
