"""The pieces of every streaming API join to the reply's text, also where tokens are parts of
characters."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang_hvd.demo.models import DemoModels
from sglang_hvd.demo.training.demo_tokenizer import SPECIAL_TOKENS
from tests.e2e.conftest import HANGS_AFTER_S, Server

TEXT = "👩🏽‍🚀中文字é ñ e\u0301 ok \n日本語한국어🇩🇪 STOP x"


@pytest.fixture(scope="module")
def tokenizer(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for the demo's target by which nearly every token is a part of a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    size = Tokenizer.from_file(str(models.target / "tokenizer.json")).get_vocab_size()
    [(spelled, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(TEXT)
    rng = random.Random(0)
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(pieces) < size:
        start = rng.randrange(len(spelled))
        piece = "".join(rng.choices(spelled, k=2)) if rng.random() < 0.2 else ""
        pieces[piece + spelled[start : start + rng.randint(1, 7)]] = None
    byte_level = Tokenizer(models_of(pieces))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(list(SPECIAL_TOKENS))
    byte_level.save(str(folder / "tokenizer.json"))
    shutil.copy(models.target / "tokenizer_config.json", folder)
    return folder


def models_of(pieces: dict[str, None]) -> models.BPE:
    """Byte-level BPE without merges: prompts are single bytes, replies any tokens."""
    return models.BPE({piece: number for number, piece in enumerate(pieces)}, [])


@pytest.fixture(params=["whole text", "new text"])
def server(
    request: pytest.FixtureRequest, start_hvd: Callable[..., Server], tokenizer: Path
) -> Server:
    """Streams of /generate have the whole text so far in each chunk, or the new text."""
    flags = ("--incremental-streaming-output",) if request.param == "new text" else ()
    return start_hvd("payoff", "--hvd-threshold", "0.5", "--tokenizer-path", str(tokenizer), *flags)


def _lines(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of each line or event of a streamed answer."""
    request = urllib.request.Request(
        server.process.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HANGS_AFTER_S) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]" and not data.startswith("event:"):
                yield json.loads(data)


PROMPTS = [f"{TEXT[start:]}{TEXT[:start]}" for start in range(0, len(TEXT), 6)]


def _is_incremental(server: Server) -> bool:
    return bool(server.process.get("/server_info")["incremental_streaming_output"])


@pytest.mark.parametrize("interval", [1, 3])
def test_chunks_of_generate_join_to_the_reply(server: Server, interval: int) -> None:
    is_incremental = _is_incremental(server)
    num_broken = 0
    for prompt in PROMPTS:
        params = {
            "temperature": 0,
            "max_new_tokens": 120,
            "ignore_eos": True,
            "stream_interval": interval,
        }
        body = {"text": prompt, "sampling_params": params}
        reply = server.process.post("/generate", body)
        chunks = list(_lines(server, "/generate", {**body, "stream": True}))
        texts = [chunk["text"] for chunk in chunks]
        if not is_incremental:
            assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert ("".join(texts) if is_incremental else texts[-1]) == reply["text"]
        num_broken += reply["text"].count("\ufffd")
    assert num_broken > len(PROMPTS)  # or few chunks end inside a character


def _question(
    path: str, model: str, prompt: str
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], str]]:
    """The body of a request, and what gives the new text of a chunk."""
    limits = {"model": model, "temperature": 0, "ignore_eos": True}
    if path == "/v1/completions":
        body = {**limits, "prompt": prompt, "max_tokens": 120}
        return body, lambda chunk: str(chunk["choices"][0]["text"])
    if path == "/v1/messages":
        body = {"model": model, "temperature": 0, "max_tokens": 120}
        body["messages"] = [{"role": "user", "content": prompt}]
        return (
            body,
            lambda event: (
                str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""
            ),
        )
    if path == "/v1/responses":
        body = {**limits, "input": prompt, "max_output_tokens": 120}
        return (
            body,
            lambda event: (
                str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
            ),
        )
    body = {**limits, "messages": [{"role": "user", "content": prompt}], "max_tokens": 120}
    return body, lambda chunk: str(chunk["choices"][0]["delta"].get("content") or "")


def _whole(path: str, reply: dict[str, Any]) -> str:
    if path == "/v1/completions":
        return str(reply["choices"][0]["text"])
    if path == "/v1/messages":
        return str(reply["content"][0]["text"])
    if path == "/v1/responses":
        return str(reply["output"][-1]["content"][0]["text"])
    return str(reply["choices"][0]["message"]["content"])


_RESPONSES = pytest.param(
    "/v1/responses",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("openai_harmony") is None,
        reason="SGLang has /v1/responses with openai-harmony only",
    ),
)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", _RESPONSES, "/v1/messages"]
)
def test_chunks_of_openai_and_anthropic_join_to_the_reply(server: Server, path: str) -> None:
    model = server.process.get("/v1/models")["data"][0]["id"]
    for prompt in PROMPTS:
        body, text_of = _question(path, model, prompt)
        expected = _whole(path, server.process.post(path, body))
        pieces = [text_of(chunk) for chunk in _lines(server, path, {**body, "stream": True})]
        assert "".join(pieces) == expected != ""


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_lines_of_ollama_join_to_the_reply(server: Server, path: str) -> None:
    is_chat = path == "/api/chat"
    for prompt in PROMPTS:
        question = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {}
        body = {
            **{"model": "default", "prompt": prompt, **question},
            "options": {"temperature": 0, "num_predict": 60},
        }

        def text_of(line: dict[str, Any]) -> str:
            return str(line["message"]["content"] if is_chat else line["response"])

        whole = server.process.post(path, {**body, "stream": False})
        lines = list(_lines(server, path, {**body, "stream": True}))
        assert "".join(map(text_of, lines)) == text_of(whole) != ""
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_no_reply_shows_the_beginning_of_the_stop_string_that_ends_it(server: Server) -> None:
    is_incremental = _is_incremental(server)
    num_cut = 0
    for prompt in PROMPTS[:4]:
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
        body: dict[str, Any] = {"text": prompt, "sampling_params": params}
        text = server.process.post("/generate", body)["text"]
        for start in range(5, len(text) - 4, 17):
            stop = text[start : start + 4]
            params["stop"] = [stop]
            reply = server.process.post("/generate", body)
            reason = reply["meta_info"]["finish_reason"]
            if reason.get("matched") == stop and "\ufffd" not in stop:
                assert reply["text"] == text[: text.index(stop)]
                num_cut += 1
            texts = [
                chunk["text"] for chunk in _lines(server, "/generate", {**body, "stream": True})
            ]
            assert ("".join(texts) if is_incremental else texts[-1]) == reply["text"]
    assert num_cut > 10


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize(
    ("limit", "fault"),
    [
        (-5, "max_new_tokens must be at least 0"),
        ("x", "a value of the request is wrong: TypeError"),
    ],
)
def test_ollama_answers_a_bad_request_with_400(
    server: Server, path: str, streams: bool, limit: object, fault: str
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "default", "prompt": "hello", "messages": messages, "stream": streams}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.process.post(path, {**body, "options": {"num_predict": limit}})
    assert refusal.value.code == 400
    assert fault in refusal.value.read().decode()
