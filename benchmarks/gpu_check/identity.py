"""Compares every policy's greedy output with plain serving, on the demo models, in many setups."""

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from benchmarks.gpu_check.parts import PROBLEMS, Row, Unit, hvd_state
from benchmarks.gpu_check.setup import POLICIES, Setup, prompts_of, server_of, setups_of
from sglang_hvd.demo.modes import Mode
from sglang_hvd.demo.server import ServerFailed, SglangServer, flush_cache

_MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Difference:
    """A reply that differs from plain serving.

    position: position of the first token that differs.
    gap: plain serving's log probability of its own token there minus that of the other token; None
        if the other token is not among its twenty most probable.
    """

    prompt: int
    position: int
    gap: float | None


class Identity:
    """Context manager that keeps the plain server of the current setup running."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._prompts = prompts_of(options.prompts)
        self._of_setup: Setup | None = None
        self._plain: SglangServer | ServerFailed | None = None
        self._expected: list[list[int]] = []
        self._running = contextlib.ExitStack()

    def __enter__(self) -> "Identity":
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def units(self) -> Sequence[Unit]:
        """A unit for each setup and policy."""

        def unit(setup: Setup, policy: Mode) -> Unit:
            return Unit(f"{setup.name}-{policy}", lambda done: self._rows(setup, policy, done))

        return [
            unit(setup, policy)
            for setup in self._options.setups or setups_of(self._options.device)
            for policy in POLICIES
            if policy in self._options.policies and not setup.refuses(policy)
        ]

    def _rows(self, setup: Setup, policy: Mode, done: Sequence[Row]) -> Iterator[Row]:
        known = {row["concurrency"] for row in done}
        missing = [number for number in self._options.concurrency if number not in known]
        if not missing:
            return
        plain = self._plain_of(setup)
        with server_of(setup, policy, "identity", self._options) as server:
            num_before = 0
            for concurrency in missing:
                flush_cache(server.url)  # otherwise drafts would be copies of earlier replies
                got = _generate_all(server, self._prompts, concurrency)
                differences = _differences(plain, self._prompts, self._expected, got)
                num_so_far = hvd_state(server)["num_steps_ahead"]
                num_ahead, num_before = num_so_far - num_before, num_so_far
                as_asked = num_ahead > 0 or not (setup.runs_ahead and policy == "allocate")
                yield {
                    "setup": asdict(setup),
                    "policy": policy,
                    "concurrency": concurrency,
                    "num_prompts": len(self._prompts),  # no more can be served at once
                    "num_steps_ahead": num_ahead,
                    "differences": [asdict(difference) for difference in differences],
                    "ran_ahead_as_asked": as_asked,
                    "passed": not differences and as_asked,
                }

    def _plain_of(self, setup: Setup) -> SglangServer:
        if self._of_setup != setup:
            self._running.close()
            self._of_setup = setup
            try:
                server = self._running.enter_context(
                    server_of(setup, "plain", "identity", self._options)
                )
                self._expected = [_generate(server, prompt) for prompt in self._prompts]
                self._plain = server
            except PROBLEMS as error:
                # Each policy's unit reports this, without another start.
                self._plain = ServerFailed(f"plain serving: {error}")
        assert self._plain is not None
        if isinstance(self._plain, ServerFailed):
            raise self._plain
        return self._plain


def _generate(server: SglangServer, prompt: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": _MAX_TOKENS}
    answer = server.post("/generate", {"text": prompt, "sampling_params": sampling})
    return list(answer["output_ids"])


def _generate_all(
    server: SglangServer, prompts: Sequence[str], concurrency: int
) -> list[list[int]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: _generate(server, prompt), prompts))


def _differences(
    plain: SglangServer,
    prompts: Sequence[str],
    expected: Sequence[list[int]],
    got: Sequence[list[int]],
) -> list[Difference]:
    found = []
    for number, (prompt, wanted, other) in enumerate(zip(prompts, expected, got, strict=True)):
        if wanted != other:
            pairs = itertools.zip_longest(wanted, other)
            position = next(place for place, (a, b) in enumerate(pairs) if a != b)
            found.append(Difference(number, position, _gap(plain, prompt, position, other)))
    return found


def _gap(plain: SglangServer, prompt: str, position: int, other: list[int]) -> float | None:
    answer = plain.post(
        "/generate",
        {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": position + 1},
            "return_logprob": True,
            "top_logprobs_num": 20,
        },
    )
    top = answer["meta_info"]["output_top_logprobs"]
    if position >= len(top) or position >= len(other):
        return None
    by_token = {token: logprob for logprob, token, _ in top[position]}
    logprob = by_token.get(other[position])
    return None if logprob is None else max(by_token.values()) - logprob
