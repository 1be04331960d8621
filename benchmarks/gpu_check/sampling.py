"""Every policy's sampled output beside plain serving's: both have the same distribution."""

import argparse
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

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
# The chance that correct servers fail at one sampling. With 4,000 samples of 60 outcomes one that
# is drawn too often is found in a third of the runs where .06 of the samples should be others, and
# in all where .12 should.
_FALSE_ALARM = 1e-5
# What has to be told apart from `_SAMPLING`, or the samples tell nothing.
_OTHER_TEMPERATURE = 0.6
# Outcomes seen fewer times than this, in both samples together, are counted as one, as the
# chi-square test needs.
_MIN_SEEN = 16
# A prompt is taken if so many outcomes are frequent, which have this share together.
_MIN_FREQUENT, _MIN_SHARE = 6, 0.5
_NUM_TRIED = 400
# Policies whose cycles may verify few drafts that are right.
_RARELY_RIGHT = ("cache", "frequency")


def sampling_units(options: argparse.Namespace) -> Sequence[Unit]:
    """One for each setup and policy; without --setups one setup of each attention backend."""
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
    """P(a chi-square statistic at least this large) if both samples, of equal size, have the same
    distribution. Raises RuntimeError where all are one outcome, or none is frequent."""
    seen = {outcome: (one[outcome], other[outcome]) for outcome in one | other}
    frequent = [pair for pair in seen.values() if sum(pair) >= _MIN_SEEN]
    rest = (
        one.total() - sum(count for count, _ in frequent),
        other.total() - sum(count for _, count in frequent),
    )
    pairs = [*frequent, rest] if sum(rest) >= _MIN_SEEN else frequent
    if len(pairs) < 2:
        raise RuntimeError(f"{one.total()} samples of {len(seen)} outcomes tell nothing")
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    half_degrees = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, half))


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
    """A prompt cut off where much rests on several outcomes, and on the temperature."""
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
        f"no prompt has several frequent outcomes under {sampling}, and others where colder"
    )


def _other(sampling: Mapping[str, float]) -> Mapping[str, float]:
    """What has to be told apart from it."""
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
