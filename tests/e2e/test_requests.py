"""Every feature that clients use answers as plain serving does."""

from __future__ import annotations

import json
import re
import time
import urllib.error
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hvd.demo.modes import MODEL_TREE_FLAGS
from tests.e2e.conftest import CHAIN, SMALL_TREE, mixing

PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.2}


@pytest.fixture
def server(start_hvd: Callable[..., Any]) -> Any:
    """Payoff policy with a threshold at which cache drafts are verified often."""
    return start_hvd("payoff", "--hvd-threshold", "1.5", "--hvd-report-cycles", "true")


@pytest.fixture
def plain(start_server: Callable[..., Any]) -> Any:
    return start_server()


def test_max_new_tokens_inside_a_draft(plain: Any, server: Any, long_prompt: str) -> None:
    limits = range(1, 40)
    expected = _answers(plain, long_prompt, [{"max_new_tokens": limit} for limit in limits])
    for limit, expected_answer in zip(limits, expected, strict=True):
        answer = server.generate(long_prompt, max_new_tokens=limit)
        assert answer["output_ids"] == expected_answer["output_ids"]
        assert answer["meta_info"]["completion_tokens"] == limit


def _answers(plain: Any, prompt: str, variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return plain serving's answers to one prompt, which run at the same time."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda params: plain.generate(prompt, **params), variants))


def test_stop_strings_inside_a_draft(plain: Any, server: Any, long_prompt: str) -> None:
    text = plain.generate(long_prompt)["text"]
    stops = [{"stop": [text[start : start + 3]]} for start in range(10, len(text) - 3, 15)]
    for params, expected in zip(stops, _answers(plain, long_prompt, stops), strict=True):
        answer = server.generate(long_prompt, **params)
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


def test_stop_strings_are_cut_from_the_text(plain: Any, server: Any, long_prompt: str) -> None:
    # SGLang sends text on every 50 tokens. A stop string that crosses such a place stays in the
    # answer up to there, unless one cycle commits all of it. So outputs end before the first one.
    text = plain.generate(long_prompt, max_new_tokens=49)["text"]
    starts = range(10, len(text) - 3, 9)
    stops = [{"stop": [text[start : start + 3]], "max_new_tokens": 49} for start in starts]
    for params, expected in zip(stops, _answers(plain, long_prompt, stops), strict=True):
        answer = server.generate(long_prompt, **params)
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["text"] == expected["text"]
        assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]


def test_stop_token_inside_a_draft(plain: Any, server: Any, long_prompt: str) -> None:
    output_ids = plain.generate(long_prompt)["output_ids"]
    stops = [{"stop_token_ids": [token_id]} for token_id in output_ids[5:60:5]]
    for params, expected in zip(stops, _answers(plain, long_prompt, stops), strict=True):
        answer = server.generate(long_prompt, **params)
        assert answer["output_ids"] == expected["output_ids"]


def test_what_follows_a_stop_never_enters_the_shared_cache(server: Any, long_prompt: str) -> None:
    server.flush_cache()
    first = server.generate(long_prompt)
    stopped = first["output_ids"][20]
    server.flush_cache()
    answer = server.generate(long_prompt, stop_token_ids=[stopped])
    kept = server.hvd_state()["num_shared_tokens"]
    assert kept == answer["meta_info"]["completion_tokens"]


def test_other_salts_and_keys_never_see_an_output(server: Any, prompts: list[str]) -> None:
    tool_call = prompts[6]  # its reply is not a copy of it, as an edit's is
    server.flush_cache()
    salted: dict[str, str] = {"cache_salt": "a"}
    outsiders: list[dict[str, str]] = [{}, {"cache_salt": "b"}, {"extra_key": "a"}]
    num_cycles = []
    for fields in [salted, *outsiders, salted]:
        [figures] = server.generate(tool_call, **fields)["meta_info"]["hvd"]
        num_cycles.append(len(figures["cycles"]))
    first, *outside, inside = num_cycles
    # The earlier output is one long draft for requests that may see it, and nothing for the others.
    # Calibration, which learns in between, may change the number by a cycle.
    assert inside < first
    assert min(outside) > (first + inside) / 2
    assert server.hvd_state()["num_namespaces"] == 1 + len(outsiders)


def test_streaming_pieces_join_to_the_plain_text(plain: Any, server: Any, long_prompt: str) -> None:
    expected = plain.generate(long_prompt)["text"]
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.process.url}/v1", api_key="none")
    pieces = client.completions.create(
        model="default", prompt=long_prompt, max_tokens=96, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_logprobs_equal_plain_serving_to_four_decimals(
    plain: Any, server: Any, prompts: list[str]
) -> None:
    params = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    for prompt in prompts[::5]:
        expected = plain.generate(prompt, **params)["meta_info"]
        meta = server.generate(prompt, **params)["meta_info"]
        for key in ("input_token_logprobs", "output_token_logprobs"):
            assert _rounded(meta[key]) == _rounded(expected[key])
        for position, expected_position in zip(
            meta["output_top_logprobs"], expected["output_top_logprobs"], strict=True
        ):
            assert _rounded(position) == _rounded(expected_position)


def _rounded(entries: list[tuple[float | None, int, str | None]]) -> list[Any]:
    return [
        (None if logprob is None else pytest.approx(logprob, abs=5e-5), token)
        for logprob, token, _ in entries
    ]


def test_json_schema_output(plain: Any, server: Any, prompts: list[str]) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "verdict": {"enum": ["accepted", "rejected", "undecided"]},
                "comment": {"type": "string", "maxLength": 24},
            },
            "required": ["verdict", "comment"],
            "additionalProperties": False,
        }
    )
    _assert_same(plain, server, prompts[:8], json_schema=schema)


def test_a_grammar_that_ends_inside_a_draft(plain: Any, server: Any, prompts: list[str]) -> None:
    pattern = r'\{"verdict": "(accepted|rejected)", "marks": \[(1|2|3)(, (1|2|3)){0,9}\]\}'
    for answer in _assert_same(plain, server, prompts[:8], regex=pattern):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert set(json.loads(answer["text"])) == {"verdict", "marks"}


def _assert_same(plain: Any, server: Any, prompts: list[str], **params: Any) -> list[Any]:
    """Check prompts one at a time and all at once against plain serving; return the answers."""
    expected = [a["output_ids"] for a in plain.generate_all(prompts, concurrency=1, **params)]
    for concurrency in (1, len(prompts)):
        answers = server.generate_all(prompts, concurrency=concurrency, **params)
        assert [a["output_ids"] for a in answers] == expected
    return answers


def test_several_samples_of_one_prompt(plain: Any, server: Any, long_prompt: str) -> None:
    expected = [a["output_ids"] for a in plain.generate(long_prompt, n=3)]
    assert [a["output_ids"] for a in server.generate(long_prompt, n=3)] == expected


def test_a_one_token_prompt_and_an_empty_one(plain: Any, server: Any) -> None:
    assert server.generate([5])["output_ids"] == plain.generate([5])["output_ids"]
    assert _is_accepted(server, []) == _is_accepted(plain, [])
    assert server.generate([5])["output_ids"] == plain.generate([5])["output_ids"]


@pytest.mark.parametrize("policy", ["cache", "allocate"])
def test_prompts_up_to_the_end_of_the_context(
    policy: str,
    start_server: Callable[..., Any],
    start_hvd: Callable[..., Any],
    varying_costs: Path,
) -> None:
    context = ("--context-length", "512")
    wide = ("--hvd-costs", str(varying_costs), "--hvd-set", "wide_width=80")
    flags = wide if policy == "allocate" else ()
    plain, server = start_server(*context), start_hvd(policy, *flags, *context)
    for length in range(480, 515):
        prompt = [20 + i % 7 for i in range(length)]
        for max_new_tokens in (1, 4, 512 - length, 513 - length):
            asked = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
            expected, found = (_answer_of(each, prompt, **asked) for each in (plain, server))
            assert found == expected, (length, max_new_tokens)
    state = server.hvd_state()
    assert state["num_accepted_drafts"]["cache"] + state["num_accepted_drafts"]["both"] > 0


def _answer_of(server: Any, prompt_ids: list[int], **params: Any) -> Any:
    """What the server answers: the tokens and why they end, or the status and the text."""
    try:
        answer = server.generate(prompt_ids, **params)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]
    return answer["output_ids"], answer["meta_info"]["finish_reason"]


def _is_accepted(server: Any, prompt_ids: list[int]) -> bool:
    try:
        server.generate(prompt_ids, max_new_tokens=1)
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return False
    return True


def test_penalties_beside_wide_verifications(
    start_server: Callable[..., Any],
    start_hvd: Callable[..., Any],
    tmp_path: Path,
    prompts: list[str],
) -> None:
    # A step is as wide as the longest draft in it. Nodes cost next to nothing here, so that
    # neighbours verify the longest drafts that there are.
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "{about: made up, batch_sizes: [1, 2], widths: [1, 96], verify: [[5, 5.1], [5, 5.1]], "
        "draft_round: [1, 1], draft_extend: [[0.1, 0.1], [0.1, 0.1]]}"
    )
    long = {"max_new_tokens": 96, "ignore_eos": True}
    patterns = [[20 + i % period for i in range(300)] for period in (5, 6, 7)]
    # With overlap SGLang's own penalties come one token late.
    plain = start_server("--disable-overlap-schedule")
    expected = plain.generate_all(prompts[:3], concurrency=1, **long, **PENALTIES)
    expected_beside = plain.generate_all(patterns, concurrency=1, **long)
    server = start_hvd("allocate", "--hvd-costs", str(costs), "--hvd-set", "wide_width=80")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.generate_all, patterns, concurrency=1, **long)
        answers = server.generate_all(prompts[:3], concurrency=1, **long, **PENALTIES)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    assert [a["output_ids"] for a in beside.result()] == [e["output_ids"] for e in expected_beside]
    assert server.hvd_state()["num_steps_by_width"]["80"] > 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_answer(plain: Any, server: Any, long_prompt: str, mode: str) -> None:
    params: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, long_prompt, **params)
        while server.hvd_state()["num_requests"] == 0:
            assert not answer.done(), "it ended before it was paused"
        server.process.post("/pause_generation", {"mode": mode})
        num_steps = _num_steps_once_paused(server)
        assert not answer.done(), "it was not paused"
        server.process.post("/continue_generation", {})
        output_ids = answer.result()["output_ids"]
    assert output_ids == plain.generate(long_prompt, **params)["output_ids"]
    assert server.hvd_state()["steps"]["num_steps"] > num_steps


def _num_steps_once_paused(server: Any) -> int:
    """Return the number of steps once the step that was running has ended."""
    num_steps = -1
    while num_steps != (now := server.hvd_state()["steps"]["num_steps"]):
        num_steps = now
        time.sleep(0.2)
    return num_steps


def test_a_failing_request_takes_no_other_down(server: Any, prompts: list[str]) -> None:
    expected = [a["output_ids"] for a in server.generate_all(prompts[:4], concurrency=1)]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(server.generate, prompt) for prompt in prompts[:4]]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.generate(prompts[0], max_new_tokens=-3)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.generate([1] * 100_000)
        assert [other.result()["output_ids"] for other in others] == expected


def test_meta_info_accounts_for_every_token(server: Any, prompts: list[str]) -> None:
    for prompt in prompts[::4]:
        meta = server.generate(prompt)["meta_info"]
        [hvd] = meta["hvd"]
        accepted = hvd["num_cache_accepted_drafts"] + hvd["num_model_accepted_drafts"]
        assert accepted == meta["spec_num_correct_drafts"]
        cycles = hvd["num_cache_cycles"] + hvd["num_model_cycles"] + hvd["num_plain_cycles"]
        assert cycles == meta["spec_verify_ct"] == len(hvd["cycles"])
        # A draft may run past the end of the output, never short of it.
        assert 1 + accepted + cycles >= meta["completion_tokens"]
        assert sum(cycle["accepted"] for cycle in hvd["cycles"]) == accepted


@pytest.mark.parametrize("asked", [{}, {"logprob_start_len": 0}, {"top_logprobs_num": 2}])
def test_few_tokens_have_the_logprobs_of_plain_serving(
    plain: Any, server: Any, prompts: list[str], asked: dict[str, int]
) -> None:
    for max_new_tokens in (0, 1, 2):
        found = []
        for each in (plain, server):
            each.flush_cache()
            params = {"max_new_tokens": max_new_tokens, "return_logprob": True, **asked}
            meta_info = each.generate(prompts[0], **params)["meta_info"]
            logprobs = {k: v for k, v in meta_info.items() if k.endswith("_logprobs")}
            found.append({k: v for k, v in logprobs.items() if isinstance(v, list)})
        assert found[0].keys() == found[1].keys()
        for key, expected in found[0].items():
            assert len(found[1][key]) == len(expected), (key, max_new_tokens)
        values = [np.array(of["output_token_logprobs"], float).reshape(-1, 3) for of in found]
        assert len(values[0]) == max_new_tokens
        np.testing.assert_allclose(values[1][:, :2], values[0][:, :2], rtol=1e-4)


KINDS = ("correct", "proposed")
RATES = {
    "spec_accept_rate",
    "spec_accept_length",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_verify_ct",
    "spec_correct_drafts_histogram",
}


@pytest.mark.parametrize(
    ("policy", "drafting"),
    [("allocate", MODEL_TREE_FLAGS), ("cache", CHAIN), ("payoff", CHAIN), ("both", SMALL_TREE)],
)
def test_acceptance_rates_are_those_of_what_was_proposed(
    policy: str,
    drafting: tuple[str, ...],
    start_hvd: Callable[..., Any],
    varying_costs: Path,
    prompts: list[str],
) -> None:
    wide = ("--hvd-costs", str(varying_costs), "--hvd-set", "wide_width=80")
    server = start_hvd(
        policy,
        *(*mixing(policy), "--hvd-report-cycles", "true"),
        *("--enable-metrics", "--decode-log-interval", "1"),
        *(wide if policy == "allocate" else ()),
        drafting=drafting,
    )
    server.flush_cache()
    patterns: list[str | list[int]] = [[20 + i % period for i in range(300)] for period in (5, 7)]
    params = {"max_new_tokens": 96, "ignore_eos": True}
    answers = [server.generate(pattern, **params) for pattern in patterns]
    answers += server.generate_all(prompts[::3], concurrency=4, **params)
    answers.append(server.generate(prompts[1], max_new_tokens=1))
    all_cycles = []
    for answer in answers:
        meta = answer["meta_info"]
        cycles = meta["hvd"][0]["cycles"] if meta["hvd"] else []
        all_cycles += cycles
        assert {key for key in meta if key.startswith("spec_")} == (RATES if cycles else set())
        if not cycles:
            continue
        num_proposed, num_correct = (
            meta["spec_num_proposed_drafts"],
            meta["spec_num_correct_drafts"],
        )
        # Two drafts may share nodes, or one may be the beginning of the other.
        assert num_proposed <= sum(cycle["cache"] + cycle["model"] for cycle in cycles)
        assert num_proposed >= sum(max(cycle["cache"], cycle["model"]) for cycle in cycles)
        assert num_correct == sum(cycle["accepted"] for cycle in cycles) <= num_proposed
        assert meta["spec_accept_rate"] == (num_correct / num_proposed if num_proposed else 0.0)
        assert meta["spec_verify_ct"] == len(cycles)
        assert meta["spec_accept_length"] == meta["completion_tokens"] / len(cycles)
    lines = server.process.log.splitlines()
    rates = [float(found[1]) for line in lines if (found := ACCEPT_RATE.search(line))]
    assert len(rates) > len(patterns)
    assert all(0 <= rate <= 1 for rate in rates)
    assert max(rates) > 0.5
    assert not any("cap len" in line for line in lines)
    metrics = server.process.get("/metrics").splitlines()
    [gauge] = [line for line in metrics if line.startswith("sglang:spec_accept_rate{")]
    assert 0 <= float(gauge.rsplit(" ", 1)[1]) <= 1
    widths = {cycle["width"] for cycle in all_cycles}
    assert policy != "allocate" or {80} < widths


ACCEPT_RATE = re.compile(r"accept rate: ([\d.]+)")

# The model drafter's candidates take more slots than the verification.
BUSHY = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "8"),
    *("--speculative-num-draft-tokens", "9"),
)


@pytest.mark.parametrize(
    ("policy", "drafting", "width", "num_reserved"),
    [
        ("allocate", MODEL_TREE_FLAGS, ("--hvd-set", "wide_width=80"), 16),
        ("payoff", BUSHY, ("--hvd-verify-width", "12"), None),
        ("cache", CHAIN, ("--page-size", "16"), 4),
    ],
    ids=["wide verification", "many candidates", "pages"],
)
def test_requests_without_a_limit_end_where_those_of_plain_serving_end(
    policy: str,
    drafting: tuple[str, ...],
    width: tuple[str, ...],
    num_reserved: int | None,
    start_server: Callable[..., Any],
    start_hvd: Callable[..., Any],
    models: Any,
) -> None:
    context = ("--context-length", "512")
    plain = start_server(*context)
    server = start_hvd(policy, *width, *context, drafting=drafting)
    params: dict[str, Any] = {"max_new_tokens": None, "ignore_eos": True}
    # Some outputs end with a step of one token, which takes slots the furthest ahead.
    inputs = [[20 + i % 7 for i in range(length)] for length in range(468, 482)]
    expected = plain.generate_all(inputs, concurrency=2, **params)
    for concurrency in (1, 4):
        answers = server.generate_all(inputs, concurrency=concurrency, **params)
        for prompt, answer, of_plain in zip(inputs, answers, expected, strict=True):
            assert len(prompt) + len(answer["output_ids"]) == 510
            assert answer["output_ids"] == of_plain["output_ids"]
            assert answer["meta_info"]["finish_reason"] == of_plain["meta_info"]["finish_reason"]
    assert server.hvd_state()["num_requests"] == 0
    # Only the scheduler knows how long the prompt of a session is.
    outcomes = [_session_of(each, (400, 104, 2)) for each in (plain, server)]
    assert outcomes[0] == outcomes[1]
    assert server.hvd_state()["num_requests"] == 0
    if num_reserved is None:
        return  # EAGLE3 ends with an error: the candidates run past the end of its row of slots
    eagle3 = start_server(
        *("--speculative-algorithm", "EAGLE3", *context),
        *("--speculative-draft-model-path", str(models.drafter), *drafting),
    )
    # It accepts limits up to the room that it reserves. Without one it fails, too.
    for prompt in inputs:
        longest = 512 - num_reserved - len(prompt)
        asked = {"max_new_tokens": longest, "ignore_eos": True}
        answers = [_answer_of(each, prompt, **asked) for each in (plain, eagle3, server)]
        assert answers[0] == answers[1] == answers[2]
        assert len(answers[0][0]) == longest


def _session_of(server: Any, turns: Sequence[int]) -> list[Any]:
    """Ask for a token after each turn of so many tokens. Return the answers: text, or the status
    and the error's text."""
    session = {"id": server.process.post("/open_session", {"capacity_of_str_len": 1000})}
    answers: list[Any] = []
    for num_tokens in turns:
        try:
            answer = _next_turn(server, session, num_tokens)
        except urllib.error.HTTPError as error:
            answers.append((error.code, json.loads(error.read())["error"]["message"]))
        else:
            session["rid"] = answer["meta_info"]["id"]
            answers.append(answer["text"])
    return answers


def _next_turn(server: Any, session: dict[str, str], num_tokens: int) -> Any:
    """Continue the session by so many tokens, and return an answer of one token."""
    body = {"session_params": session, "input_ids": [20 + i % 7 for i in range(num_tokens)]}
    params = {"max_new_tokens": 1, "temperature": 0.0}
    return server.process.post("/generate", {**body, "sampling_params": params})
