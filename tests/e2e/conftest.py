"""Real SGLang servers on the demo models, and what the tests ask of them."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.demo.models import DemoModels, Shape, demo_models
from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from sglang_hvd.demo.server import CPU_FLAGS, SglangServer, demo_environment, flush_cache
from tests.e2e.forked_server import PROJECT_FIRST, Nursery

# Nothing waits this long unless it hangs, however busy the machine is.
HANGS_AFTER_S = 600.0
# Servers that stay up for later tests, in each process of tests.
MAX_RUNNING = 4

CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
# A small tree of the model drafter, for tests where each node costs time and its size is no matter.
SMALL_TREE = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "2"),
    *("--speculative-num-draft-tokens", "8"),
)


@dataclass(frozen=True)
class Server:
    """A running server, with short names for what tests do with it."""

    process: SglangServer

    def generate(self, prompt: str | list[int], **params: Any) -> dict[str, Any]:
        """POST /generate, greedy unless told otherwise."""
        return self.process.post("/generate", request_body(prompt, **params))

    def generate_all(
        self, prompts: Sequence[str | list[int]], *, concurrency: int, **params: Any
    ) -> list[dict[str, Any]]:
        """Return the answers in the order of the prompts, with `concurrency` requests at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **params), prompts))

    def stream(self, body: dict[str, Any]) -> Any:
        """Return the streamed response of POST /generate. Closing it disconnects the client."""
        request = urllib.request.Request(
            self.process.url + "/generate",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=HANGS_AFTER_S)

    def hvd_state(self) -> dict[str, Any]:
        """Return the HVD part of /server_info, once the suffix cache has indexed all tokens."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while True:
            state = self.process.get("/server_info")["internal_states"][0]["hvd"]
            if not state["num_pending_tokens"]:
                return state
            assert time.monotonic() < deadline, "tokens are not indexed"
            time.sleep(0.01)

    def flush_cache(self) -> None:
        """POST /flush_cache."""
        flush_cache(self.process.url, timeout_s=HANGS_AFTER_S)

    def wait_until_idle(self) -> None:
        """Wait until the gauge in /metrics says that nothing is held for any request.

        /server_info is asked last, because describing the worker releases ended requests.
        """
        deadline = time.monotonic() + HANGS_AFTER_S
        # The gauge may still be from before the request. The state decides, and is asked only then.
        while self._num_requests_gauge() != 0 or self.hvd_state()["num_requests"] != 0:
            assert time.monotonic() < deadline, "requests are held"
            time.sleep(0.2)

    def _num_requests_gauge(self) -> float:
        lines = [
            line
            for line in self.process.get("/metrics").splitlines()
            if line.startswith("sglang:hvd_num_requests")
        ]
        assert lines, "the gauge is missing from /metrics"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def request_body(prompt: str | list[int], **params: Any) -> dict[str, Any]:
    """Return a body of /generate. Keys that are not sampling parameters go to its top level."""
    top_level = {"return_logprob", "logprob_start_len", "top_logprobs_num", "stream", "rid"}
    top_level |= {"cache_salt", "extra_key", "custom_logit_processor"}
    top_level |= {"token_ids_logprob", "return_text_in_logprobs"}
    body: dict[str, Any] = {key: params.pop(key) for key in top_level & set(params)}
    body["text" if isinstance(prompt, str) else "input_ids"] = prompt
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 96, **params}
    return body


@pytest.fixture(scope="session")
def models() -> DemoModels:
    """The Llama-shaped demo models."""
    return demo_models()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """The first two turns of two sessions of every family, as the chat template renders them."""
    rendered = []
    for family in FAMILIES:
        for session in demo_sessions(family, count=2, seed=11):
            text = ""
            for turn in session.turns[:2]:
                text += f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n"
                rendered.append(text)
                text += f"{turn.assistant}<|im_end|>\n"
    return rendered


@pytest.fixture(scope="session")
def long_prompt(prompts: list[str]) -> str:
    """The longest prompt, a file to edit."""
    return max(prompts, key=len)


def assert_same_alone_and_together(
    server: Server, expected: list[list[int]], prompts: list[str]
) -> None:
    """Check all prompts, sixteen at a time, and then a later turn of each family by itself."""
    server.flush_cache()
    answers = server.generate_all(prompts, concurrency=16)
    assert [answer["output_ids"] for answer in answers] == expected
    server.flush_cache()  # or each answer would be one long cache draft
    answers = server.generate_all(prompts[1::4], concurrency=1)
    assert [answer["output_ids"] for answer in answers] == expected[1::4]


StartServer = Callable[..., Server]


def mixing(policy: str, threshold: str = "1.5") -> tuple[str, ...]:
    """Return flags with which cache and model drafts mix within one batch. Only policy payoff needs
    any, a low threshold."""
    return ("--hvd-threshold", threshold) if policy == "payoff" else ()


@pytest.fixture(scope="session")
def varying_costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cost table in which each node costs a little, so that steps verify different widths."""
    path = tmp_path_factory.mktemp("costs") / "costs.yaml"
    path.write_text(
        "{about: made up, batch_sizes: [1, 16], widths: [1, 32], verify: [[5, 8], [6, 40]], "
        "draft_round: [1.5, 1.7], draft_extend: [[0.2, 0.3], [0.3, 1]]}"
    )
    return path


@pytest.fixture(scope="session")
def running_ahead() -> tuple[str, ...]:
    """Flags with which steps run ahead under overlap scheduling.

    In this cost table, made for the check on a GPU, only a sure cache draft is worth the wait.
    """
    path = Path(__file__).parents[2] / "benchmarks" / "gpu_check" / "few_drafts.yaml"
    return ("--hvd-costs", str(path), "--hvd-set", "run_ahead=true")


@pytest.fixture(scope="session")
def untimed(varying_costs: Path) -> Callable[[str], tuple[str, ...]]:
    """Flags with which a policy times no steps before it serves. Only `allocate` needs any."""
    return lambda policy: ("--hvd-costs", str(varying_costs)) if policy == "allocate" else ()


@pytest.fixture(scope="session")
def start_server(
    tmp_path_factory: pytest.TempPathFactory,
    nursery: Nursery,
) -> Iterator[StartServer]:
    """Start a server by its flags, or return the one that already runs with the same flags.

    Only the few servers used last stay up, so each test asks for its server again. With is_spawned
    a server starts as a user's does, which takes several times as long.
    """
    running: dict[tuple[Any, ...], SglangServer] = {}
    logs, home = tmp_path_factory.mktemp("servers"), tmp_path_factory.mktemp("home")

    def start(
        *flags: str,
        shape: Shape = "llama",
        environment: dict[str, str] | None = None,
        is_spawned: bool = False,
    ) -> Server:
        key = (shape, flags, tuple(sorted((environment or {}).items())), is_spawned)
        if key in running:
            running[key] = running.pop(key)  # the server used last stays longest
            return Server(running[key])
        while len(running) >= MAX_RUNNING:
            running.pop(next(iter(running))).stop()
        server = SglangServer(
            ["--model-path", str(demo_models(shape).target), *CPU_FLAGS, *flags],
            log_file=logs / f"{len(list(logs.iterdir()))}.log",
            timeout_s=HANGS_AFTER_S,
            # The costs that servers time are kept for this session only.
            environment={
                **demo_environment(),
                "XDG_CACHE_HOME": str(home),
                **PROJECT_FIRST,
                **(environment or {}),
            },
            grace_s=0,
            launch=None if is_spawned else nursery.launch,
        )
        server.__enter__()
        running[key] = server
        return Server(server)

    yield start
    for server in running.values():
        server.stop()
    shutil.rmtree(logs, ignore_errors=True)


@pytest.fixture(scope="session")
def start_hvd(start_server: StartServer) -> StartServer:
    """Start an HVD server with a policy, the model drafter's tree, and more flags."""

    def start(
        policy: str,
        *flags: str,
        drafting: Sequence[str] = MODEL_TREE_FLAGS,
        shape: Shape = "llama",
        environment: dict[str, str] | None = None,
        is_spawned: bool = False,
    ) -> Server:
        models = demo_models(shape)
        return start_server(
            *("--speculative-algorithm", "HVD"),
            *("--speculative-draft-model-path", str(models.drafter), *drafting),
            *("--hvd-policy", policy, "--hvd-predictor", str(models.predictor)),
            *flags,
            shape=shape,
            environment=environment,
            is_spawned=is_spawned,
        )

    return start


@pytest.fixture(scope="session")
def plain_ids(
    start_server: StartServer,
) -> Callable[..., list[list[int]]]:
    """Output token ids of plain serving, one request at a time, computed once per question."""
    known: dict[str, list[list[int]]] = {}

    def ids(
        prompts: Sequence[str | list[int]], *, shape: Shape = "llama", **params: Any
    ) -> list[list[int]]:
        question = repr((prompts, shape, sorted(params.items())))
        if question not in known:
            answers = start_server(shape=shape).generate_all(prompts, concurrency=1, **params)
            known[question] = [answer["output_ids"] for answer in answers]
        return known[question]

    return ids
