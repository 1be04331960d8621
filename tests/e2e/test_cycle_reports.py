"""A request that asks for a report of its cycles gets one, and no other request does."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hvd.cli import main
from sglang_hvd.view.cycles import Cycle, sources_of
from sglang_hvd.view.replies import read_replies
from tests.e2e.conftest import mixing

ASKED = {"custom_params": {"hvd": {"report_cycles": True}}}


@pytest.fixture
def server(start_hvd: Callable[..., Any]) -> Any:
    """Payoff policy with a threshold at which cache drafts are verified often."""
    return start_hvd("payoff", *mixing("payoff"))


def cycles_of(answer: dict[str, Any]) -> list[Cycle]:
    [hvd] = answer["meta_info"]["hvd"]
    return [Cycle.from_report(cycle) for cycle in hvd["cycles"]]


@pytest.mark.parametrize("policy", ["payoff", "allocate", "both", "frequency"])
def test_a_report_says_what_each_cycle_did_and_why(
    policy: str,
    start_hvd: Callable[..., Any],
    untimed: Callable[[str], tuple[str, ...]],
    prompts: list[str],
) -> None:
    server = start_hvd(policy, *mixing(policy), *untimed(policy))
    seen = set()
    for prompt in prompts[::3]:
        expected_ids = server.generate(prompt)["output_ids"]
        answer = server.generate(prompt, **ASKED)
        assert answer["output_ids"] == expected_ids
        cycles, [hvd] = cycles_of(answer), answer["meta_info"]["hvd"]
        at = 1  # the prefill gives the first token
        for cycle in cycles:
            assert cycle.at == at
            at += cycle.accepted + 1
            _check(cycle, policy)
        assert at >= len(expected_ids)
        for source in ("cache", "model", "both", "plain"):
            of_source = [cycle for cycle in cycles if cycle.source == source]
            assert len(of_source) == hvd[f"num_{source}_cycles"]
            if source != "plain":
                accepted = sum(cycle.accepted for cycle in of_source)
                assert accepted == hvd[f"num_{source}_accepted_drafts"]
        seen |= set(sources_of(cycles, len(expected_ids)))
    assert {"target", "model"} <= seen
    assert seen & {"prompt", "output", "shared"}
    assert ("both" in seen) == (policy in ("both", "allocate"))


def _check(cycle: Cycle, policy: str) -> None:
    has_cache, has_model = cycle.source in ("cache", "both"), cycle.source in ("model", "both")
    assert (cycle.cache > 0, cycle.model > 0) == (has_cache, has_model)
    assert (cycle.cache_right is None, cycle.model_right is None) == (not has_cache, not has_model)
    assert max(cycle.cache_right or 0, cycle.model_right or 0) == cycle.accepted
    assert cycle.accepted <= cycle.num_nodes
    assert 1 + max(cycle.cache, cycle.model) <= cycle.width
    assert (cycle.steps > 0) == has_model
    assert (cycle.origin is None, cycle.match is None) == (cycle.found == 0, cycle.found == 0)
    assert cycle.found > 0 or not has_cache
    assert cycle.origin != "shared" or has_cache  # nothing else of other requests
    assert cycle.requests == 1
    assert cycle.ms is not None
    assert cycle.ms > 0
    if policy in ("payoff", "allocate"):
        assert cycle.if_model is not None
        assert (cycle.if_cache is None) == (cycle.found == 0)
        assert cycle.expected is not None
    assert (cycle.if_both is not None) == (policy == "allocate" and cycle.found > 0)
    if policy == "both":
        assert (cycle.expected, cycle.if_cache, cycle.if_model) == (None, None, None)


def test_only_a_request_that_asks_has_cycles(server: Any, prompts: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(server.generate, prompts[0], **ASKED)
        unasked = pool.submit(server.generate, prompts[1])
    assert "cycles" not in unasked.result()["meta_info"]["hvd"][0]
    assert len(cycles_of(asked.result())) > 0
    refused = server.generate(prompts[1], custom_params={"hvd": {"report_cycles": False}})
    assert "cycles" not in refused["meta_info"]["hvd"][0]
    others = server.generate(prompts[1], custom_params={"of_another": {"report_cycles": True}})
    assert "cycles" not in others["meta_info"]["hvd"][0]


@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
def test_the_last_chunk_of_a_stream_has_the_cycles(
    start_hvd: Callable[..., Any], prompts: list[str], incremental: bool
) -> None:
    flags = ("--incremental-streaming-output",) if incremental else ()
    server = start_hvd("payoff", *mixing("payoff"), *flags)
    whole = server.generate(prompts[0], **ASKED)
    body = {
        "text": prompts[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 96, **ASKED},
    }
    server.flush_cache()
    with server.stream(body) as stream:
        lines = [line.decode().removeprefix("data: ").strip() for line in stream if line.strip()]
    *chunks, last = [json.loads(line) for line in lines if line != "[DONE]"]
    streamed = [token for chunk in chunks for token in chunk["output_ids"]] if incremental else []
    assert [*streamed, *last["output_ids"]] == whole["output_ids"]
    assert chunks
    assert not any(chunk["meta_info"]["hvd"] for chunk in chunks)
    cycles = cycles_of(last)
    ends = [cycle.at + cycle.accepted + 1 for cycle in cycles]
    assert [cycle.at for cycle in cycles] == [1, *ends[:-1]]
    assert ends[-1] >= len(whole["output_ids"])


def test_chat_completions_report_too(server: Any) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "1 2 3 1 2 3 1 2"}],
        "max_tokens": 24,
        "temperature": 0,
        "return_meta_info": True,
        "return_token_ids": True,
        **ASKED,
    }
    [choice] = server.process.post("/v1/chat/completions", body)["choices"]
    assert len(choice["response_token_ids"]) > 1
    assert cycles_of(choice)[0].at == 1


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ("on", '"hvd" must be "off" or an object'),
        ([True], '"hvd" must be "off" or an object'),
        ({"report_cycles": "yes"}, "'report_cycles': input should be a valid boolean, got 'yes'"),
        ({"report_cycle": True}, "there is no key 'report_cycle'; the keys are policy, "),
    ],
)
def test_a_wrong_type_is_refused_in_one_line(server: Any, asked: object, fault: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.generate("1 2 3", custom_params={"hvd": asked})
    assert refused.value.code == 400
    message = json.loads(refused.value.read())["error"]["message"]
    assert fault in message
    assert "\n" not in message
    assert server.generate("1 2 3", max_new_tokens=2)["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize("flags", [(), ("--chat",)], ids=["text", "chat"])
def test_view_shows_a_reply_with_the_text_of_its_tokens(
    server: Any, long_prompt: str, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    prompt, page, saved = (tmp_path / name for name in ("prompt.txt", "page.html", "replies.json"))
    prompt.write_text(long_prompt)
    asked = ("--url", server.process.url, "--prompt-file", str(prompt), "--max-tokens", "96")
    assert main(["view", *asked, *flags, "--html", str(page), "--save-json", str(saved)]) == 0
    [reply] = read_replies(saved)
    assert "prompt" in reply.sources
    assert 'class="token prompt' in page.read_text()
    if not flags:
        text = server.generate(long_prompt, max_new_tokens=96)["text"]
        assert "".join(reply.tokens).removesuffix("<|im_end|>") == text


def test_view_of_a_plain_server_is_one_line(
    start_server: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, page = start_server().process.url, tmp_path / "page.html"
    assert main(["view", "--url", url, "--prompt", "1 2 3", "--html", str(page)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (f"error: the server at {url} does not run HVD: give the --url of one that does")
    assert not page.exists()
