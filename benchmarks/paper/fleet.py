"""The servers of a run: they start when they are needed, and their caches are warmed."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.models import CACHE_MODES
from sglang_hvd.commands.running_server import ask, order_cache
from sglang_hvd.demo.server import ServerFailed, SglangServer, flush_cache
from sglang_hvd.suffix_cache.orders import AddOutputs, ListContents
from sglang_hvd.suffix_cache.outputs import SharedOutputs
from sglang_hvd.types import TokenIds

# Tokens and texts of one order to a cache, as those of `sglang-hvd warm`.
_ORDER_TOKENS, _ORDER_TEXTS = 16 * 1024, 1024
_POLL_SECONDS = 0.05
_CORPUS = "warm-up"
_TOKENS_OF_CORPUS_CHUNK = 4096

_ERROR = re.compile(r"(?:\[[^\]]*\] *)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)")


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


def warm(url: str, mode: str, outputs: Sequence[TokenIds], fingerprint: str) -> None:
    """Empties a server's caches, and gives the one that drafts these outputs.

    fingerprint: of the tokenizer.

    Raises ServerFailed, or OSError, if the server has ended.
    """
    flush_cache(url)
    try:
        if mode in CACHE_MODES:
            _warm_suffix_cache(url, outputs, fingerprint)
        elif mode == "ngram":
            _warm_ngram(url, outputs)
    except ValueError as error:
        raise ServerFailed(str(error)) from error


def reason_of(error: Exception) -> str:
    """Why a server did not start or ended, in one line: the last error of its log, if any."""
    lines = str(error).splitlines() or [repr(error)]
    errors = [found[1] for line in lines if (found := _ERROR.fullmatch(line.strip()))]
    return errors[-1] if errors else lines[0].rstrip(":")


def _server_info(server: SglangServer) -> Any:
    return server.get("/server_info")


def _warm_suffix_cache(url: str, outputs: Sequence[TokenIds], fingerprint: str) -> None:
    for some in SharedOutputs.of_texts(outputs).split(_ORDER_TOKENS, _ORDER_TEXTS):
        order_cache(url, AddOutputs.of(some, tokenizer=fingerprint))
    while any(of_group["num_pending_tokens"] for of_group in order_cache(url, ListContents())):
        time.sleep(_POLL_SECONDS)


def _warm_ngram(url: str, outputs: Sequence[TokenIds]) -> None:
    """SGLang's corpus in addition to the texts of earlier requests."""
    for corpus in ask(f"{url}/list_external_corpora", None, None)["corpus_token_counts"]:
        ask(f"{url}/remove_external_corpus", {"corpus_id": corpus}, None)
    chunks = [
        ids.tolist()[start : start + _TOKENS_OF_CORPUS_CHUNK]
        for ids in outputs
        for start in range(0, len(ids), _TOKENS_OF_CORPUS_CHUNK)
    ]
    if chunks:
        ask(f"{url}/add_external_corpus", {"corpus_id": _CORPUS, "token_chunks": chunks}, None)
