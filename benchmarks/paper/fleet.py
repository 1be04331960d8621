"""The servers of a run: they start when they are needed, and their caches are warmed."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.models import CACHE_MODES
from sglang_hvd.commands.running_server import ask, order_cache
from sglang_hvd.demo.server import ServerFailed, SglangServer, flush_cache
from sglang_hvd.replay.core.recordings import TraceTokenizer
from sglang_hvd.suffix_cache.orders import AddOutputs, ListContents
from sglang_hvd.suffix_cache.outputs import SharedOutputs
from sglang_hvd.types import TokenIds

# Tokens and texts of one order to a cache, as those of `sglang-hvd warm`.
_ORDER_TOKENS, _ORDER_TEXTS = 16 * 1024, 1024
_POLL_SECONDS = 0.05
_CORPUS = "warm-up"

_ERROR = re.compile(r"(?:\[[^\]]*\] *)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)")
_PLACE = re.compile(r'File ".*?([^/"]+)", line \d+, in (\S+)')


@dataclass(slots=True)
class Fleet:
    """At most `limit` servers at a time. Those used last stay up.

    make: the server of a mode, not yet started.
    """

    make: Callable[[str], SglangServer]
    limit: int
    _running: dict[str, SglangServer] = field(default_factory=dict)

    def url(self, mode: str) -> str:
        """The URL of a mode's server, which is started if it does not run.

        Raises ServerFailed if it does not start.
        """
        if mode not in self._running:
            while len(self._running) >= self.limit:
                self.end(next(iter(self._running)))
            server = self.make(mode)
            server.__enter__()
            self._running[mode] = server
            if mode == "eagle3-adaptive" and not _server_info(server)["speculative_adaptive"]:
                self.end(mode)
                raise ServerFailed("SGLang turned adaptive speculation off here")
        self._running[mode] = self._running.pop(mode)
        return self._running[mode].url

    def is_running(self, mode: str) -> bool:
        return mode in self._running

    def end(self, mode: str) -> None:
        """Ends the server of a mode, if it runs."""
        if mode in self._running:
            self._running.pop(mode).stop()

    def close(self) -> None:
        """Ends all servers."""
        for mode in [*self._running]:
            self.end(mode)


def warm(url: str, mode: str, outputs: Sequence[TokenIds], tokenizer: TraceTokenizer) -> None:
    """Empties a server's caches, and gives the one that drafts these outputs.

    Raises ServerFailed, or OSError, if the server has ended.
    """
    flush_cache(url)
    try:
        if mode in CACHE_MODES:
            _warm_suffix_cache(url, outputs, tokenizer.fingerprint)
        elif mode == "ngram":
            # It reads texts only.
            _warm_ngram(url, [tokenizer.loaded.decode(ids.tolist()) for ids in outputs])
    except ValueError as error:
        raise ServerFailed(str(error)) from error


def reason_of(error: Exception) -> str:
    """Why a server did not start or ended, in one line: the last error of its log, if any.

    If the error has no message, the function that raised it is told.
    """
    reason, place = "", ""
    lines = str(error).splitlines() or [repr(error)]
    for line in lines:
        if found := _PLACE.fullmatch(line.strip()):
            place = f" in {found[2]} ({found[1]})"
        elif found := _ERROR.fullmatch(line.strip()):
            reason = found[1] if ":" in found[1] else found[1] + place
    return reason or lines[0].rstrip(":")


def _server_info(server: SglangServer) -> Any:
    return server.get("/server_info")


def _warm_suffix_cache(url: str, outputs: Sequence[TokenIds], fingerprint: str) -> None:
    for some in SharedOutputs.of_texts(outputs).split(_ORDER_TOKENS, _ORDER_TEXTS):
        order_cache(url, AddOutputs.of(some, tokenizer=fingerprint))
    while any(of_group["num_pending_tokens"] for of_group in order_cache(url, ListContents())):
        time.sleep(_POLL_SECONDS)


def _warm_ngram(url: str, texts: Sequence[str]) -> None:
    """SGLang's corpus in addition to the texts of earlier requests."""
    for corpus in ask(f"{url}/list_external_corpora", None, None)["corpus_token_counts"]:
        ask(f"{url}/remove_external_corpus", {"corpus_id": corpus}, None)
    documents = [text for text in texts if text]
    if documents:
        ask(f"{url}/add_external_corpus", {"corpus_id": _CORPUS, "documents": documents}, None)
