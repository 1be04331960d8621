"""Asks a server over any API, and says where its answer differs from plain serving's."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.conftest import HANGS_AFTER_S, Server
from tests.e2e.request_kinds import Kind

# Log-softmax of 2,048 float32 logits: the logits are equal to the last bit (patches/README.md), and
# a logprob down to -100 keeps 7 digits. Plain serving takes the log of a softmax where some request
# of the batch is sampled, which rounds once more.
LOGPROB_TOLERANCE = 5e-5
# The model drafter's KV cache is written from pairs of tokens, so HVD, as EAGLE3, finds one token
# of a cached prefix fewer than plain serving does. An answer may have several replies.
MAX_CACHED_LOSS = 1
_MAX_REPLIES = 6

# What two answers of plain serving to one request differ in, or only a server with HVD says.
_VOLATILE = {"id", "created", "created_at", "e2e_latency", "weight_version", "hvd", "response_id"}
_VOLATILE |= {"total_duration", "load_duration", "eval_duration", "prompt_eval_duration"}
_VOLATILE |= {"completed_at", "item_id", "response_sent_to_client_ts", "cache_read_input_tokens"}
_VOLATILE |= {"metadata", "num_retractions"}
# What does not depend on which tokens are drawn, if the end of a message ends nothing. An answer is
# a status and a body.
_FIXED = ("[0]", "_tokens", ".type", ".object", ".role", ".length")


def ask(server: Server, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the status and the answer, in one form whether it came as a stream or at once."""
    request = urllib.request.Request(
        server.process.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=HANGS_AFTER_S) as response:
            if not body.get("stream"):
                answer = _parsed(response.read())
                is_ollama = path.startswith("/api")
                return response.status, _joined_ollama([answer]) if is_ollama else answer
            return response.status, _JOINED[path](list(_chunks(response)))
    except urllib.error.HTTPError as error:
        return error.code, _parsed(error.read())


def _parsed(content: bytes) -> Any:
    """The JSON value, or its text if it is none, as of an internal error."""
    try:
        return json.loads(content)
    except ValueError:
        return content.decode()


def ask_all(server: Server, kinds: Sequence[Kind], *, at_once: int) -> list[tuple[int, Any]]:
    """Ask all kinds, so many at a time. The answers are in the order of the kinds."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda kind: ask(server, kind.path, kind.body), kinds))


def differences(expected: Any, found: Any, *, is_drawn: bool = False) -> list[str]:
    """Say, for each place in which an answer differs from the expected one, where and how.

    is_drawn: tokens are drawn at random; only the form and the numbers of tokens are compared.
    """
    return list(_differences("", expected, found, is_drawn))


def _differences(place: str, expected: Any, found: Any, is_drawn: bool) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted((expected.keys() | found.keys()) - _VOLATILE):
            if not key.startswith("spec_"):
                yield from _differences(
                    f"{place}.{key}", expected.get(key), found.get(key), is_drawn
                )
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield f"{place}: {len(expected)} expected, {len(found)} found"
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            if is_drawn and isinstance(one, int) and place:
                break  # token ids
            yield from _differences(f"{place}[{number}]", one, other, is_drawn)
    elif is_drawn and not place.endswith(_FIXED):
        return
    elif place.endswith(("cached_tokens", "cached_tokens_details.device")):
        most = MAX_CACHED_LOSS * (_MAX_REPLIES if ".usage" in place else 1)
        if not 0 <= (expected or 0) - (found or 0) <= most:
            yield f"{place}: {expected} expected, {found} found"
    elif isinstance(expected, float) and isinstance(found, float):
        if not math.isclose(expected, found, rel_tol=1e-6, abs_tol=LOGPROB_TOLERANCE):
            yield f"{place}: {expected} expected, {found} found"
    elif expected != found:
        yield f"{place}: {expected!r:.200} expected, {found!r:.200} found"


def _chunks(response: Any) -> Iterator[Any]:
    for line in response:
        text = line.decode().strip().removeprefix("data:").strip()
        if text.startswith("{"):
            yield json.loads(text)


def _joined_generate(chunks: Sequence[Any]) -> Any:
    """The last chunk of each reply, which has all of it. Earlier ones must be beginnings of it."""
    last: dict[int, Any] = {}
    for chunk in chunks:
        index = chunk.get("index", 0)
        if index in last:
            text, ids = last[index]["text"], last[index]["output_ids"]
            # A stop string is cut from the end, and so may be a part of a character.
            held_back = 1 if chunk["meta_info"]["finish_reason"] is None else len(text)
            assert chunk["text"].startswith(text[: len(text) - held_back])
            assert chunk["output_ids"][: len(ids)] == ids
        last[index] = chunk
    return [last[index] for index in sorted(last)]


def _joined_choices(chunks: Sequence[Any]) -> Any:
    """Choices as an answer at once has them, and the usage of the last chunk that says any."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        if "error" in chunk:
            return chunk
        usage = chunk.get("usage") or usage
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": []})
            delta = piece.get("delta") or {"content": piece.get("text")}
            for name in ("content", "reasoning_content"):
                choice["text"] += delta.get(name) or ""
            choice["logprobs"] += _logprobs_of(piece.get("logprobs"))
            for name in ("finish_reason", "matched_stop"):
                choice[name] = piece.get(name) if piece.get(name) is not None else choice.get(name)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _logprobs_of(logprobs: Any) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:  # chat
        # A chunk without text has no logprobs. The token that ends a message has none of its own,
        # and is in the last chunk or alone.
        return [one for one in logprobs["content"] if one["token"] != "<|im_end|>"]
    columns = [logprobs[name] or [] for name in ("tokens", "token_logprobs", "top_logprobs")]
    return [list(row) for row in zip(*columns, strict=False)]


def _joined_responses(chunks: Sequence[Any]) -> Any:
    text = "".join(c["delta"] for c in chunks if c["type"] == "response.output_text.delta")
    return {"text": text, "last": chunks[-1].get("response")}


def _joined_ollama(chunks: Sequence[Any]) -> Any:
    texts = [c.get("response") or c.get("message", {}).get("content") or "" for c in chunks]
    return {"text": "".join(texts), "reason": chunks[-1].get("done_reason")}


def _joined_messages(chunks: Sequence[Any]) -> Any:
    texts = [c["delta"].get("text", "") for c in chunks if c["type"] == "content_block_delta"]
    ends = [c for c in chunks if c["type"] == "message_delta"]
    return {"text": "".join(texts), "ends": ends}


_JOINED = {
    "/generate": _joined_generate,
    "/v1/completions": _joined_choices,
    "/v1/chat/completions": _joined_choices,
    "/v1/responses": _joined_responses,
    "/api/chat": _joined_ollama,
    "/api/generate": _joined_ollama,
    "/v1/messages": _joined_messages,
}
