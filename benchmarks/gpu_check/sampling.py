"""Checks that every policy's sampled output has the distribution of plain serving."""

import argparse
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from scipy.stats import chi2

from benchmarks.gpu_check.parts import Row, Unit, hvd_state
from benchmarks.gpu_check.setup import POLICIES, Setup, prompts_of, server_of, setups_of
from sglang_hvd.demo.modes import Mode
from sglang_hvd.demo.server import SglangServer

Outcomes = Counter[tuple[int, ...]]

_SAMPLING: Sequence[Mapping[str, float]] = (
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.9},
)
_NUM_TOKENS = 4
_NUM_AT_ONCE = 50
# Probability that a correct server fails at one sampling. With 4,000 samples of 60 outcomes, an
# outcome that wrongly replaces others in .06 of the samples is found in a third of the runs, and
# in .12 of the samples in all runs.
_FALSE_ALARM = 1e-5
# The test must tell this temperature, as a factor, from those of _SAMPLING.
_OTHER_TEMPERATURE = 0.6
# Outcomes seen fewer times than this, in both samples together, are counted as one outcome. The
# chi-square test needs frequent outcomes.
_MIN_SEEN = 16
# A prompt is used if so many outcomes are frequent, and have this share of the samples together.
_MIN_FREQUENT, _MIN_SHARE = 6, 0.5
_NUM_TRIED = 400
# Policies that may rarely verify a right draft.
_RARELY_RIGHT = ("cache", "frequency")


def sampling_units(options: argparse.Namespace) -> Sequence[Unit]:
    """A unit for each setup and policy. Without --setups: one setup of each attention backend."""
    setups: Sequence[Setup] | None = options.setups
    if setups is None:
        of_backend: dict[str, Setup] = {}
        for setup in setups_of(options.device):
            of_backend.setdefault(setup.backend, setup)
        setups = list(of_backend.values())

    def unit(setup: Setup, policy: Mode) -> Unit:
        return Unit(f"{setup.name}-{policy}", lambda done: _rows(setup, policy, options, done))

    return [
        unit(setup, policy)
        for setup, policy in itertools.product(setups, POLICIES)
        if policy in options.policies and not setup.refuses(policy)
    ]


def p_value(one: Outcomes, other: Outcomes) -> float:
    """p-value of a chi-square test that both samples, of equal size, have the same distribution.

    Raises RuntimeError if all samples are one outcome, or if no outcome is frequent.
    """
    seen = {outcome: (one[outcome], other[outcome]) for outcome in one | other}
    frequent = [pair for pair in seen.values() if sum(pair) >= _MIN_SEEN]
    rest = (
        one.total() - sum(count for count, _ in frequent),
        other.total() - sum(count for _, count in frequent),
    )
    pairs = [*frequent, rest] if sum(rest) >= _MIN_SEEN else frequent
    if len(pairs) < 2:
        raise RuntimeError(f"{one.total()} samples of {len(seen)} outcomes are too few to compare")
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    return float(chi2.sf(statistic, df=len(pairs) - 1))


def _rows(
    setup: Setup, policy: Mode, options: argparse.Namespace, done: Sequence[Row]
) -> Iterator[Row]:
    known = [row["sampling"] for row in done]
    wanted = _SAMPLING[:1] if options.device == "cpu" else _SAMPLING  # there tests have the others
    missing = [sampling for sampling in wanted if sampling not in known]
    if not missing:
        return
    with contextlib.ExitStack() as stack:
        plain, server = (
            stack.enter_context(server_of(setup, mode, "sampling", options))
            for mode in ("plain", policy)
        )
        for sampling in missing:
            prompt = _unsure_prompt(plain, sampling)
            num = options.samples
            expected = _sample(plain, prompt, sampling, num)
            control = _sample(plain, prompt, _other(sampling), num)
            before = _num_accepted(server)
            got = _sample(server, prompt, sampling, num)
            row = {
                "setup": asdict(setup),
                "policy": policy,
                "sampling": sampling,
                "num_samples": num,
                "num_outcomes": len(expected),
                "num_accepted": _num_accepted(server) - before,
                "p_value": p_value(expected, got),
                "p_value_of_control": p_value(expected, control),
            }
            row["passed"] = (
                row["num_accepted"] >= (1 if policy in _RARELY_RIGHT else num)
                and row["p_value"] > _FALSE_ALARM > row["p_value_of_control"]
            )
            yield row


def _unsure_prompt(plain: SglangServer, sampling: Mapping[str, float]) -> str:
    """A prompt, cut off where several outcomes are frequent and the temperature matters."""
    for prompt in sorted(prompts_of(36), key=len, reverse=True):
        for share in (0.9, 0.75, 0.5):
            cut = prompt[: int(share * len(prompt))]
            tried = _sample(plain, cut, sampling, _NUM_TRIED)
            frequent = [seen for _, seen in tried.most_common(_MIN_FREQUENT)]
            if (
                len(frequent) == _MIN_FREQUENT
                and frequent[-1] >= 0.02 * _NUM_TRIED
                and sum(frequent) >= _MIN_SHARE * _NUM_TRIED
                and p_value(tried, _sample(plain, cut, _other(sampling), _NUM_TRIED))
                < _FALSE_ALARM**2
            ):
                return cut
    raise RuntimeError(
        f"no prompt has several frequent outcomes with {sampling} that a lower temperature changes"
    )


def _other(sampling: Mapping[str, float]) -> Mapping[str, float]:
    """Sampling parameters that the test must tell from the given ones."""
    return {**sampling, "temperature": _OTHER_TEMPERATURE * sampling["temperature"]}


def _sample(server: SglangServer, prompt: str, sampling: Mapping[str, float], num: int) -> Outcomes:
    params = {**sampling, "n": _NUM_AT_ONCE, "max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
    outcomes = Outcomes()
    while outcomes.total() < num:
        answers = server.post("/generate", {"text": prompt, "sampling_params": params})
        outcomes.update(tuple(answer["output_ids"]) for answer in answers)
    return outcomes


def _num_accepted(server: SglangServer) -> int:
    return sum(hvd_state(server)["num_accepted_drafts"].values())
