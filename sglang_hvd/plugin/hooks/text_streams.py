"""Makes the pieces of a stream join to the text of the reply, wherever the pieces end.

SGLang's detokenizer sends characters twice if a piece ends inside a character, and the beginning of
a stop string if a piece ends there. Ollama's streams leave out the text of their last piece. Long
pieces, such as those of accepted drafts, make all of it frequent.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle

from sglang_hvd.plugin.requests.bad_requests import errors_of_clients
from sglang_hvd.plugin.startup.launch import launch_of, served_launch

if TYPE_CHECKING:
    from sglang.srt.entrypoints.ollama.serving import OllamaServing
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager
    from sglang.srt.managers.io_struct import BatchTokenIDOutput, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# Under this key the scheduler tells the detokenizer each request's stop strings and patterns.
STOPS_KEY = "hvd_stops"

_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class _ReplyText:
    """What the detokenizer knows of one request.

    Attributes:
        token_ids: the last tokens of the prompt and the output so far.
        context, read: decoding starts at token `context`; the text of the tokens before `read` is
            final.
        pieces: the final text.
        recent: the end of the final text, as far back as it is unsent or a stop string may begin.
        num_final, num_sent: characters of the final text, and of the text that was sent.
    """

    token_ids: list[int]
    read: int
    context: int = 0
    pieces: list[str] = field(default_factory=list)
    recent: str = ""
    num_final: int = 0
    num_sent: int = 0

    def add(self, text: str, *, is_final: bool, end: int) -> None:
        """Makes the text of the tokens up to `end` final, unless it may still change."""
        if text and is_final:
            self.pieces.append(text)
            self.recent += text
            self.num_final += len(text)
            self.context, self.read = self.read, end

    def unsent(self, more: str, stops: Sequence[str], keeps_stop: bool) -> str:
        """Returns the text that can be sent, and counts it as sent.

        more: text after the final one that will not change either.
        """
        visible = self.recent + more
        start = self.num_final - len(self.recent)
        end = min((_shown_end(visible, stop, keeps_stop) for stop in stops), default=len(visible))
        text = visible[self.num_sent - start : end]
        self.num_sent += len(text)
        longest = max(map(len, stops), default=0)
        self.recent = self.recent[max(0, self.num_sent - start - longest) :]
        return text


def send_stable_text(
    decode: Callable[..., list[str]], manager: DetokenizerManager, output: BatchTokenIDOutput
) -> list[str]:
    """AROUND hook of DetokenizerManager._decode_batch_token_id_output: each request's new text."""
    if served_launch() is None:
        return decode(manager, output)
    return new_texts(manager, output)


def new_texts(manager: DetokenizerManager, output: BatchTokenIDOutput) -> list[str]:
    """The text that each request of the batch can send now.

    All pieces of a request join to what SGLang decodes and trims if it gets all tokens at once.
    """
    replies: list[_ReplyText] = []
    windows: list[list[int]] = []
    ends: list[int] = []
    for rid, token_ids, read, reason, keeps_stop in zip(
        *(output.rids, output.decode_ids, output.read_offsets),
        *(output.finished_reasons, output.no_stop_trim),
        strict=True,
    ):
        if rid not in manager.decode_status:
            manager.decode_status[rid] = _ReplyText([], read)
        reply: _ReplyText = manager.decode_status[rid]
        reply.token_ids.extend(manager._clamp_decode_ids(token_ids, manager.vocab_size))
        end = len(reply.token_ids)
        if reason is None:
            end = _stable_end(reply, _byte_ids(manager.tokenizer))
        window = reply.token_ids[reply.context : end]
        replies.append(reply)
        windows.append(manager.trim_matched_stop(window, reason, keeps_stop))
        ends.append(end)
    known = _decoded(manager, [r.token_ids[r.context : r.read] for r in replies], output)
    texts = [
        text[len(before) :]
        for text, before in zip(_decoded(manager, windows, output), known, strict=True)
    ]
    stops_of = _take_stops(output)
    sent: list[str] = []
    for reply, rid, text, end, reason, keeps_stop, stops in zip(
        *(replies, output.rids, texts, ends),
        *(output.finished_reasons, output.no_stop_trim, stops_of),
        strict=True,
    ):
        if reason is None:
            # A character that is incomplete shows as a broken one at the end.
            stable = text.rstrip(_BROKEN)
            is_final = stable == text
            reply.add(text, is_final=is_final, end=end)
            sent.append(reply.unsent("" if is_final else stable, stops, keeps_stop))
        else:
            manager.decode_status.pop(rid, None)  # it holds a limited number of requests
            whole = "".join([*reply.pieces, text])
            sent.append(manager.trim_matched_stop(whole, reason, keeps_stop)[reply.num_sent :])
    return sent


def _decoded(
    manager: DetokenizerManager, windows: list[list[int]], output: BatchTokenIDOutput
) -> list[str]:
    """The text of each request's tokens, as SGLang decodes them."""
    flags = output.skip_special_tokens, output.spaces_between_special_tokens
    if not manager.disable_tokenizer_batch_decode:
        return manager._grouped_batch_decode(windows, *flags)
    return [
        manager.tokenizer.decode(
            window, skip_special_tokens=skips, spaces_between_special_tokens=has_spaces
        )
        for window, skips, has_spaces in zip(windows, *flags, strict=True)
    ]


def _take_stops(output: BatchTokenIDOutput) -> list[Sequence[str]]:
    """Each request's stop strings. They do not go on to the clients."""
    info = unwrap_from_pickle(output.customized_info) or {}
    stops: list[Sequence[str]] | None = info.pop(STOPS_KEY, None)
    if stops is None:
        return [()] * len(output.rids)
    output.customized_info = wrap_as_pickle(info)
    return stops


def _shown_end(text: str, stop: str, keeps_stop: bool) -> int:
    """Characters of the text that stay, should the request end by this stop string."""
    start = text.find(stop)
    if start >= 0:
        return start + len(stop) if keeps_stop else start
    if keeps_stop:
        return len(text)
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    begun = next((length for length in lengths if text.endswith(stop[:length])), 0)
    return len(text) - begun


def _stable_end(reply: _ReplyText, byte_ids: frozenset[int]) -> int:
    """Tokens whose text does not depend on what follows, except for an incomplete character."""
    token_ids, end = reply.token_ids, len(reply.token_ids)
    while end > reply.read and token_ids[end - 1] in byte_ids:
        end -= 1
    return end


@lru_cache(maxsize=1)
def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens of single bytes, with the special tokens that may stand between them. Empty
    without such bytes.

    The decoder of byte fallback decodes a run of them as a whole: if the run is no valid UTF-8,
    each of its bytes becomes a broken character, those of earlier characters too.
    """
    if not getattr(tokenizer, "is_fast", False):  # as SGLang asks; others decode each character
        return frozenset()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    token_ids = tokenizer.convert_tokens_to_ids(names)
    found = tokenizer.convert_ids_to_tokens([0 if each is None else each for each in token_ids])
    byte_ids = {i for i, name, token in zip(token_ids, names, found, strict=True) if token == name}
    return frozenset(byte_ids | set(tokenizer.all_special_ids)) if byte_ids else frozenset()


async def stream_all_text(
    stream: Callable[..., Awaitable[Any]],
    serving: OllamaServing,
    gen_request: GenerateReqInput,
    raw_request: Any,
    model_name: str,
) -> Any:
    """AROUND hook of OllamaServing._stream_chat_response and ._stream_generate_response."""
    manager = serving.tokenizer_manager
    if launch_of(manager.server_args) is None:
        return await stream(serving, gen_request, raw_request, model_name)
    chunks = manager.generate_request(gen_request, raw_request)
    serving = copy.copy(serving)
    with _errors_for_clients():  # while the status of the response is open
        serving.tokenizer_manager = _TextThenEnd(manager, await anext(chunks), chunks)
    return await stream(serving, gen_request, raw_request, model_name)


async def answer_errors(
    generate: Callable[..., Awaitable[Any]], serving: OllamaServing, *args: Any
) -> Any:
    """AROUND hook of OllamaServing._generate_chat_response and ._generate_generate_response."""
    if launch_of(serving.tokenizer_manager.server_args) is None:
        return await generate(serving, *args)
    with _errors_for_clients():
        return await generate(serving, *args)


@contextmanager
def _errors_for_clients() -> Iterator[None]:
    """SGLang's other APIs answer the error of a request with 400. Ollama's answer with 500."""
    try:
        with errors_of_clients():
            yield
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error


class _TextThenEnd:
    """SGLang's manager for one of Ollama's streams, which take the text from all chunks but the
    last, and expect each to have the whole text so far."""

    def __init__(
        self, manager: TokenizerManager, first: dict[str, Any], others: AsyncIterator[Any]
    ) -> None:
        self._is_incremental: bool = manager.incremental_streaming_output
        self._first, self._others = first, others

    async def generate_request(self, *_args: Any) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks. The last one comes twice, at first as if the reply went on."""
        text = ""
        async for chunk in self._chunks():
            text = text + chunk["text"] if self._is_incremental else chunk["text"]
            whole = {**chunk, "text": text}
            if whole["meta_info"]["finish_reason"] is not None:
                yield {**whole, "meta_info": {**whole["meta_info"], "finish_reason": None}}
            yield whole

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        yield self._first
        async for chunk in self._others:
            yield chunk
