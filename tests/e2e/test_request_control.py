"""What requests ask of HVD in custom_params is done for them alone, in batches with others."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.view.cycles import Cycle
from tests.e2e.conftest import CHAIN, HANGS_AFTER_S, mixing, request_body

_HAS_RESPONSES = find_spec("openai_harmony") is not None
SERVERS = ["allocate", "payoff", "both", "model", "cache", "chain"]


@pytest.fixture(params=SERVERS)
def policy(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def server(
    policy: str, start_hvd: Callable[..., Any], untimed: Callable[[str], tuple[str, ...]]
) -> Any:
    if policy == "chain":
        return start_hvd("payoff", *mixing("payoff"), drafting=CHAIN)
    return start_hvd(policy, *mixing(policy), *untimed(policy))


@pytest.fixture
def allocating(start_hvd: Callable[..., Any], untimed: Callable[[str], tuple[str, ...]]) -> Any:
    return start_hvd("allocate", *untimed("allocate"))


def asking(asked: object) -> dict[str, Any]:
    return {"custom_params": {"hvd": asked}}


def figures_of(answer: dict[str, Any]) -> dict[str, Any]:
    [figures] = answer["meta_info"]["hvd"]
    found: dict[str, Any] = figures
    return found


def cycles_of(answer: dict[str, Any]) -> list[Cycle]:
    return [Cycle.from_report(cycle) for cycle in figures_of(answer)["cycles"]]


def drafted(answer: dict[str, Any]) -> set[str]:
    """The sources of the drafts that a request verified."""
    figures = figures_of(answer)
    return {name for name in ("cache", "model", "both") if figures[f"num_{name}_cycles"]}


def ask_together(server: Any, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = pool.map(lambda body: server.process.post("/generate", body), bodies)
        return list(answers)


def test_each_request_of_a_mixed_batch_has_the_drafts_that_it_asks_for(
    server: Any,
    policy: str,
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
) -> None:
    has_cache, has_model = policy != "model", policy != "cache"
    anything = {"cache", "model", "both"}
    # What is asked, which sources may be verified, and how many draft tokens of a cycle.
    wishes: list[tuple[dict[str, Any], set[str], int]] = [
        ({}, anything, 64),
        ({"policy": "off"}, set(), 0),
        ({"max_draft_tokens": 0}, set(), 0),
        ({"max_draft_tokens": 2}, anything, 2),
        ({"max_draft_tokens": 5, "learn": False}, anything, 5),
        ({"share": False}, anything, 64),
    ]
    if has_cache:
        wishes += [({"policy": "cache"}, {"cache"}, 64)]
        wishes += [({"policy": "cache", "max_draft_tokens": 4}, {"cache"}, 4)]
    if has_model:
        wishes += [({"policy": "model"}, {"model"}, 64)]
        wishes += [({"policy": "model", "max_draft_tokens": 3}, {"model"}, 3)]
    some = [prompts[place % len(prompts)] for place in range(len(wishes))]
    expected = plain_ids(some)
    server.flush_cache()
    bodies = [
        request_body(prompt, **asking({**wish, "report_cycles": True}))
        for prompt, (wish, *_) in zip(some, wishes, strict=True)
    ]
    for _ in range(2):  # cold and warm
        answers = ask_together(server, bodies)
        assert [answer["output_ids"] for answer in answers] == expected
        for answer, (wish, sources, most) in zip(answers, wishes, strict=True):
            assert drafted(answer) <= sources, wish
            nodes = [cycle.cache + cycle.model for cycle in cycles_of(answer)]
            assert max(nodes) <= most, wish
            if wish.get("policy") == "model":
                assert min(nodes) > 0, wish
    assert drafted(answers[0])


@pytest.mark.parametrize("policy", ["allocate", "payoff"], indirect=True)
def test_off_among_others_leaves_the_others_their_drafts(
    server: Any, prompts: list[str], long_prompt: str
) -> None:
    server.flush_cache()
    others = [request_body(long_prompt, **asking({"learn": False})) for _ in range(3)]
    silent = request_body(prompts[0], **asking("off"))
    *answers, off = ask_together(server, [*others, silent])
    assert not drafted(off)
    assert figures_of(off)["num_plain_cycles"] == figures_of(off)["num_target_tokens"] - 1
    for answer in answers:
        assert drafted(answer)


def test_a_request_that_is_not_learned_from_leaves_no_text(
    allocating: Any, long_prompt: str
) -> None:
    server = allocating
    server.flush_cache()
    before = server.hvd_state()
    for _ in range(3):
        answer = server.generate(long_prompt, **asking({"learn": False}))
    after = server.hvd_state()
    assert after["num_shared_tokens"] == after["num_session_tokens"] == 0
    assert after["predictor"] == before["predictor"]
    assert drafted(answer)
    server.generate(long_prompt)
    assert server.hvd_state()["num_shared_tokens"] > 0
    assert server.hvd_state()["predictor"] != before["predictor"]


def test_nothing_of_a_request_that_is_not_learned_from_is_recorded(
    start_hvd: Callable[..., Any], prompts: list[str], tmp_path: Path
) -> None:
    server = start_hvd("cache", "--hvd-record", str(tmp_path))
    before = server.hvd_state()["recorder"]["num_recorded"]  # SGLang's request at start
    server.generate_all(prompts[:3], concurrency=3, max_new_tokens=8, **asking({"learn": False}))
    server.generate_all(prompts[3:5], concurrency=2, max_new_tokens=8)
    assert server.hvd_state()["recorder"]["num_recorded"] == before + 2


def _origins(answer: dict[str, Any]) -> set[str | None]:
    return {cycle.origin for cycle in cycles_of(answer) if cycle.cache}


def test_a_request_that_does_not_share_drafts_from_its_own_text_only(
    start_hvd: Callable[..., Any], prompts: list[str], plain_ids: Callable[..., list[list[int]]]
) -> None:
    server = start_hvd("cache")
    expected = plain_ids(prompts[:1])
    report = {"report_cycles": True}
    server.flush_cache()
    server.generate(prompts[0], **asking({"share": False}))
    assert server.hvd_state()["num_shared_tokens"] == 0
    server.generate(prompts[0])
    sharing = server.generate(prompts[0], **asking(report))
    alone = server.generate(prompts[0], **asking({"share": False, **report}))
    assert "shared" in _origins(sharing)
    assert "shared" not in _origins(alone)
    assert [sharing["output_ids"], alone["output_ids"]] == expected * 2


def test_a_name_divides_a_namespace_and_leads_to_no_other(
    start_hvd: Callable[..., Any], prompts: list[str]
) -> None:
    server = start_hvd("cache")

    def found(asked: dict[str, Any], **salts: str) -> bool:
        answer = server.generate(prompts[0], **asking({**asked, "report_cycles": True}), **salts)
        return "shared" in _origins(answer)

    server.flush_cache()
    mine: tuple[dict[str, Any], dict[str, str]] = {"namespace": "mine"}, {"cache_salt": "tenant"}
    assert not found(mine[0], **mine[1])
    keep = {"learn": False}  # these look, and leave nothing
    assert found({**mine[0], **keep}, **mine[1])
    for asked, salts in (
        ({}, {}),
        ({}, {"cache_salt": "tenant"}),
        (mine[0], {}),
        (mine[0], {"cache_salt": "other"}),
        (mine[0], {"extra_key": "tenant"}),
        ({"namespace": "other"}, {"cache_salt": "tenant"}),
        ({"namespace": "6:tenantmine"}, {}),
        ({}, {"cache_salt": "tenantmine"}),
        ({}, {"cache_salt": "tenant", "extra_key": "mine"}),
    ):
        assert not found({**asked, **keep}, **salts), (asked, salts)


@pytest.mark.parametrize("policy", ["allocate"], indirect=True)
def test_a_wrong_wish_is_answered_with_one_line_by_every_api(server: Any) -> None:
    wrong = {"custom_params": {"hvd": {"polciy": "off"}}}
    text, chat = {"prompt": "1 2 3"}, {"messages": [{"role": "user", "content": "1 2 3"}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "1 2 3", "sampling_params": wrong}),
        ("/v1/completions", {"model": "demo", **text, **wrong}),
        ("/v1/chat/completions", {"model": "demo", **chat, **wrong}),
    ]
    if _HAS_RESPONSES:
        metadata = wrong["custom_params"]
        bodies.append(("/v1/responses", {**_model(server), "input": "1 2 3", "metadata": metadata}))
    for path, body in bodies:
        for stream in (False, True):
            code, answer = _post(server, path, {**body, "stream": stream})
            if path == "/generate" and stream:  # as SGLang answers every wrong stream there
                assert "there is no key 'polciy'" in answer
                continue
            assert code == 400, path
            message = json.loads(answer)
            message = message.get("error", message)["message"]
            assert "there is no key 'polciy'; the keys are policy, " in message
            assert "\n" not in message


def _model(server: Any) -> dict[str, str]:
    return {"model": server.process.get("/v1/models")["data"][0]["id"]}


def _post(server: Any, path: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
    request = urllib.request.Request(
        server.process.url + path,
        body if isinstance(body, bytes) else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=HANGS_AFTER_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    code, text = _post(server, path, {**body, "stream": True})
    assert code == 200
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("policy", ["payoff"], indirect=True)
def test_every_api_reports_figures_where_it_has_a_place(server: Any, long_prompt: str) -> None:
    ask = {"custom_params": {"hvd": {"report_cycles": True}}, "temperature": 0}
    text = {"model": "demo", "prompt": long_prompt, "max_tokens": 24, **ask}
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": "1 2 3 1 2 3"}],
        "max_tokens": 24,
        **ask,
    }
    for path, body in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        for n in (1, 2):
            answer = json.loads(_post(server, path, {**body, "n": n})[1])
            assert [Cycle.from_report(of["cycles"][0]).at for of in answer["metadata"]["hvd"]] == [
                1
            ] * n
        assert "sglext" not in str(_events(server, path, body))
        *_, last = _events(server, path, {**body, "return_spec_tokens_details": True})
        [figures] = last["sglext"]["hvd"]
        assert figures["cycles"]
        assert last["sglext"]["spec_tokens_details"]


@pytest.mark.skipif(not _HAS_RESPONSES, reason="SGLang has /v1/responses with openai-harmony only")
@pytest.mark.parametrize("policy", ["payoff"], indirect=True)
def test_responses_ask_and_report_in_their_metadata(server: Any, long_prompt: str) -> None:
    body = {**_model(server), "input": long_prompt, "max_output_tokens": 40, "temperature": 0}
    plain = json.loads(_post(server, "/v1/responses", body)[1])
    assert plain["metadata"]["hvd"][0]["num_target_tokens"] > 0
    for asked in ("off", {"policy": "off"}, '{"policy": "off"}'):
        asking_off = {**body, "metadata": {"hvd": asked, "mine": "1"}}
        answer = json.loads(_post(server, "/v1/responses", asking_off)[1])
        [figures] = answer["metadata"]["hvd"]
        assert figures["num_target_tokens"] == 1 + figures["num_plain_cycles"]
        assert answer["metadata"]["mine"] == "1"
        assert answer["output"][0]["content"] == plain["output"][0]["content"]
        *_, last = _events(server, "/v1/responses", asking_off)
        assert last["type"] in ("response.completed", "response.incomplete")
        [streamed] = last["response"]["metadata"]["hvd"]
        assert streamed == figures


def test_a_server_can_forbid_overrides_and_hide_figures(
    start_hvd: Callable[..., Any], long_prompt: str, plain_ids: Callable[..., list[list[int]]]
) -> None:
    server = start_hvd(
        *("cache", "--hvd-set", "allow_request_overrides=false"),
        *("--hvd-set", "report_figures=false", "--hvd-set", "share=false"),
    )
    [expected] = plain_ids([long_prompt])
    answer = server.generate(long_prompt)
    assert answer["output_ids"] == expected
    assert "hvd" not in answer["meta_info"]
    assert server.hvd_state()["num_shared_tokens"] == 0
    for asked, fault in (
        ("off", "lets no request choose"),
        ({"learn": False}, "lets no request choose"),
        ({"report_cycles": True}, "reports no figures"),
    ):
        body = request_body(long_prompt, max_new_tokens=2, **asking(asked))
        code, text = _post(server, "/generate", body)
        assert code == 400
        assert fault in json.loads(text)["error"]["message"]


# Values that a client may send for anything.
_SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *(2**31, 2**63, 2**64, 10**30, -(10**30), "", "off", "cache", "model", "allocate", "both"),
    *("payoff", "\x00", "\n", "ü" * 50, "\ud800", "x" * 5000, "__req__", "{}", "[]", "null"),
]
_KEYS = ["policy", "max_draft_tokens", "learn", "share", "namespace", "report_cycles", "hvd"]
_STRANGE_KEYS = ["", "Policy", "policy ", "__class__", "__proto__", "\ud800", "thinking_budget"]
_OTHERS = [
    *("thinking_budget", "of_another", "__req__", "ngram_size", ""),
    *("__sglang_reasoning_in_grammar", "__sglang_reasoning_end_token_ids"),
]


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.6:
        return rng.choice(_SCALARS)
    if kind < 0.7:
        value: Any = rng.choice(_SCALARS)
        for _ in range(rng.choice([5, 63, 100, 500, 900, 1500, 20_000])):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    if kind < 0.85:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice([*_KEYS, *_STRANGE_KEYS]): _value(rng, depth + 1)
        for _ in range(rng.randrange(4))
    }


def _hostile(rng: random.Random) -> Any:
    """custom_params of a request: often nearly right, so that much of it is read."""
    kind = rng.random()
    if kind < 0.1:
        return _value(rng)
    params = {rng.choice(_OTHERS): _value(rng) for _ in range(rng.randrange(3))}
    if kind < 0.3:
        return {**params, "hvd": _value(rng)}
    asked: dict[str, Any] = {}
    if rng.random() < 0.5:
        asked["policy"] = rng.choice(["off", "cache", "model", "allocate"])
    if rng.random() < 0.5:
        asked["max_draft_tokens"] = rng.choice([0, 1, 2, 7, 63, 64, 10**9, 2**62])
    for name in ("learn", "share", "report_cycles"):
        if rng.random() < 0.3:
            asked[name] = rng.random() < 0.5
    if rng.random() < 0.5:
        asked["namespace"] = rng.choice(["", "a", "\ud800", "ü" * 1000, "own:1"])
    if rng.random() < 0.3:
        asked[rng.choice([*_KEYS, *_STRANGE_KEYS])] = _value(rng)
    return {**params, "hvd": asked}


def _json(value: Any) -> str:
    """JSON of any depth: the standard encoder has a limit."""
    if not isinstance(value, dict | list):
        return json.dumps(value)
    parts: list[str] = []
    todo: list[Any] = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, _Raw):
            parts.append(part)
        elif isinstance(part, dict):
            todo.append(_Raw("}"))
            for place, (key, of_key) in enumerate(reversed(part.items())):
                todo += [of_key, _Raw(json.dumps(key) + ":")]
                if place < len(part) - 1:
                    todo.append(_Raw(","))
            todo.append(_Raw("{"))
        elif isinstance(part, list):
            todo.append(_Raw("]"))
            for place, each in enumerate(reversed(part)):
                todo.append(each)
                if place < len(part) - 1:
                    todo.append(_Raw(","))
            todo.append(_Raw("["))
        else:
            parts.append(json.dumps(part))
    return "".join(parts)


class _Raw(str):
    """Text of JSON that is complete."""


@pytest.fixture
def stop_on_failure() -> Iterator[list[str]]:
    faults: list[str] = []
    yield faults
    assert not faults, "\n".join(faults[:20])


def test_a_thousand_hostile_wishes_are_answered_and_leave_the_others_alone(
    allocating: Any,
    plain_ids: Callable[..., list[list[int]]],
    prompts: list[str],
    stop_on_failure: list[str],
) -> None:
    server, rng = allocating, random.Random(53)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    [expected] = plain_ids([prompt], max_new_tokens=8)
    apis = {
        "/generate": '{{"input_ids":[5,6,7,5,6,7,5,6],"sampling_params":{{"temperature":0,'
        '"max_new_tokens":8,"custom_params":{}}}}}',
        "/v1/completions": '{{"model":"demo","prompt":[5,6,7,5,6,7,5,6],"temperature":0,'
        '"max_tokens":8,"return_token_ids":true,"custom_params":{}}}',
    }
    bodies = [
        (path, apis[path].format(_json(_hostile(rng))).encode())
        for path in rng.choices(list(apis), [4, 1], k=1000)
    ]
    witnesses = prompts[:4]
    expected_of_others = plain_ids(witnesses)
    codes: dict[int, int] = {}
    with ThreadPoolExecutor(16) as pool, ThreadPoolExecutor(4) as others:
        asked = [pool.submit(_post, server, path, body) for path, body in bodies]
        rounds = [[others.submit(server.generate, each) for each in witnesses] for _ in range(8)]
        for (path, body), future in zip(bodies, asked, strict=True):
            code, text = future.result()
            codes[code] = codes.get(code, 0) + 1
            answer = json.loads(text)
            if code == 200:
                ids = answer.get("output_ids") or answer["choices"][0]["token_ids"]
                if ids != expected:
                    stop_on_failure.append(f"{path} {body[:300]!r}: {ids}")
            else:
                message = answer.get("error", answer)["message"]
                # SGLang's own answer to what is no JSON (NaN, lone surrogates, a depth of a
                # thousand), or no object where it wants one, has several lines.
                is_sglangs = "validation error" in message
                if code != 400 or ("\n" in message and not is_sglangs) or len(message) > 1000:
                    stop_on_failure.append(f"{path} {body[:300]!r}: {code} {message[:300]}")
        for round_ in rounds:
            assert [future.result()["output_ids"] for future in round_] == expected_of_others
    assert min(codes.get(200, 0), codes.get(400, 0)) > 200, codes
    assert server.generate(prompt, max_new_tokens=8)["output_ids"] == expected
    assert server.hvd_state()["num_requests"] == 0
