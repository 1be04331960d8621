"""The commands on the shared cache of a running server: warm, snapshot, cache."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sglang_hvd.commands.arguments import count
from sglang_hvd.commands.running_server import hvd_states, order_cache
from sglang_hvd.commands.servers import add_administered
from sglang_hvd.suffix_cache.orders import (
    AddOutputs,
    Erase,
    ListContents,
    Order,
    Resize,
    SaveSnapshot,
)
from sglang_hvd.suffix_cache.outputs import SharedOutputs, namespace_name
from sglang_hvd.suffix_cache.snapshot import read_snapshot
from sglang_hvd.types import TokenIds

# Tokens and texts of one order. The server indexes them in some 2 ms, piece by piece.
_ORDER_TOKENS, _ORDER_TEXTS = 16 * 1024, 1024
_PROGRESS_SECONDS = 1.0
_POLL_SECONDS = 0.1
# Digits of a namespace's name that a table shows.
_SHOWN_DIGITS = 12
_NO_NAME = "(none)"  # of requests without namespace, salt, key and adapter


def add_warm(parser: argparse.ArgumentParser) -> None:
    add_administered(parser)
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="recordings (.hvdt), text traces or chat logs (.jsonl), token ids (JSON lines), plain "
        "text, or folders of these",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json of the model, for files of text",
    )
    parser.add_argument(
        "--eos-token",
        default="<|im_end|>",
        metavar="TOKEN",
        help="token that ends every output of text traces and chat logs; empty: no such token "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--with-prompts",
        action="store_true",
        help="put prompts with their outputs into the cache (default: outputs alone)",
    )
    _add_namespace(parser)


def run_warm(options: argparse.Namespace) -> int:
    # Imported here: it needs the tokenizers library.
    from sglang_hvd.replay.core.recordings import TraceTokenizer
    from sglang_hvd.traces.reader import read_texts, text_files

    name = _namespace_of(options)
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    files = [file for source in options.sources for file in text_files(source)]
    hvd_states(options.url.rstrip("/"), options.api_key)
    progress = _Progress(len(files))
    for file in files:
        texts = read_texts(
            file,
            None if tokenizer is None else tokenizer.loaded,
            None if tokenizer is None else tokenizer.eos_token_id,
            template=None if tokenizer is None else tokenizer.chat_template,
            with_prompts=options.with_prompts,
        )
        for fingerprint, some in _orders_of(texts):
            outputs = SharedOutputs.of_texts(some, name)
            _give(options, AddOutputs.of(outputs, tokenizer=fingerprint))
            progress.add(len(outputs.token_ids))
        progress.end_file()
    _tell_sizes(options, progress)
    return 0


def add_snapshot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["save", "load"],
        help="save: the server writes the file, on its machine. load: this command reads the file "
        "and adds what it holds to the cache",
    )
    add_administered(parser)
    parser.add_argument("path", type=Path, metavar="PATH", help="the file")


def run_snapshot(options: argparse.Namespace) -> int:
    if options.what == "load" and not options.path.is_file():
        raise ValueError(f"{options.path} is no file")
    hvd_states(options.url.rstrip("/"), options.api_key)
    if options.what == "save":
        return _save(options)
    served = _give(options, ListContents())[0]["tokenizer"]
    progress = _Progress(1)
    for piece in read_snapshot(options.path, fingerprint=served):
        for outputs in piece.split(_ORDER_TOKENS, _ORDER_TEXTS):
            _give(options, AddOutputs.of(outputs, tokenizer=served))
            progress.add(len(outputs.token_ids))
    progress.end_file()
    _tell_sizes(options, progress)
    return 0


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["list", "erase", "resize"],
        help="list: tokens, bytes, ages and drafts of each namespace. erase: one namespace, or "
        "everything. resize: until the server ends",
    )
    add_administered(parser)
    erase = parser.add_argument_group("erase")
    _add_namespace(erase)
    erase.add_argument("--listed", metavar="NAME", help="a namespace by its name in cache list")
    erase.add_argument("--all", action="store_true", help="erase all namespaces")
    resize = parser.add_argument_group("resize")
    resize.add_argument(
        "--tokens", type=count, metavar="N", help="size of the shared cache, in tokens"
    )
    resize.add_argument(
        "--namespace-tokens",
        type=count,
        metavar="N",
        help="maximum size of each namespace, in tokens (default: no limit)",
    )


def run_cache(options: argparse.Namespace) -> int:
    if options.what == "resize" and options.tokens is None:
        raise ValueError("cache resize needs --tokens")
    erased = _erased(options) if options.what == "erase" else None
    hvd_states(options.url.rstrip("/"), options.api_key)
    if options.what == "erase":
        _give(options, Erase(namespace=erased))
    elif options.what == "resize":
        _give(
            options,
            Resize(
                shared_cache_tokens=options.tokens,
                namespace_cache_tokens=options.namespace_tokens,
            ),
        )
    for contents in _give(options, ListContents()):
        print(_table(contents))
    return 0


def _save(options: argparse.Namespace) -> int:
    _give(options, SaveSnapshot(path=str(options.path.absolute())))
    asked = [contents["snapshot"]["num_asked"] for contents in _give(options, ListContents())]
    while True:
        saved = [contents["snapshot"] for contents in _give(options, ListContents())]
        if all(of["num_done"] >= num for of, num in zip(saved, asked, strict=True)):
            break
        time.sleep(_POLL_SECONDS)
    for of_group in saved:
        if of_group["last_error"] is not None:
            raise ValueError(of_group["last_error"])
        print(f"{of_group['num_tokens']:,} tokens in {of_group['path']}")
    return 0


def _add_namespace(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--cache-salt", default="", metavar="SALT", help="cache_salt of requests")
    parser.add_argument("--extra-key", default="", metavar="KEY", help="extra_key of requests")
    parser.add_argument(
        "--namespace", default="", metavar="NAME", help="namespace in custom_params of requests"
    )


def _namespace_of(options: argparse.Namespace) -> str:
    return namespace_name(options.cache_salt, options.extra_key, options.namespace)


def _erased(options: argparse.Namespace) -> str | None:
    """The namespace to erase; None: all."""
    named = [options.cache_salt, options.extra_key, options.namespace]
    if options.all + (options.listed is not None) + any(named) != 1:
        raise ValueError(
            "cache erase needs one of --namespace (with --cache-salt and --extra-key), --listed, "
            "and --all: cache list tells the names"
        )
    if options.all:
        return None
    if options.listed is None:
        return _namespace_of(options)
    if options.listed == _NO_NAME:
        return ""
    found = {
        of_space["name"]
        for contents in _give(options, ListContents())
        for of_space in contents["namespaces"]
        if of_space["name"].startswith(options.listed) and of_space["name"]
    }

    if len(found) != 1:
        raise ValueError(f"{len(found)} namespaces are called {options.listed}: see cache list")
    return str(found.pop())


def _give(options: argparse.Namespace, order: Order) -> list[dict[str, Any]]:
    return order_cache(
        options.url, order, api_key=options.api_key, admin_api_key=options.admin_api_key
    )


def _orders_of(texts: Iterable[tuple[TokenIds, str]]) -> Iterator[tuple[str, list[TokenIds]]]:
    """Texts of one tokenizer for each order, with its fingerprint."""
    some: list[TokenIds] = []
    num_tokens, of_some = 0, ""
    for text, fingerprint in texts:
        is_full = num_tokens >= _ORDER_TOKENS or len(some) == _ORDER_TEXTS
        if some and (fingerprint != of_some or is_full):
            yield of_some, some
            some, num_tokens = [], 0
        some.append(text)
        num_tokens, of_some = num_tokens + len(text), fingerprint
    if some:
        yield of_some, some


class _Progress:
    """Says on stderr how far the command is."""

    def __init__(self, num_files: int) -> None:
        self._num_files, self._num_read, self.num_tokens = num_files, 0, 0
        self._start = self._told_at = time.monotonic()

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if time.monotonic() >= self._told_at + _PROGRESS_SECONDS:
            self._tell()

    def end_file(self) -> None:
        self._num_read += 1
        if self._num_read == self._num_files:
            self._tell()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        seconds = self._told_at - self._start
        print(
            f"{self._num_read} of {self._num_files} files, {self.num_tokens:,} tokens, "
            f"{seconds:.1f} s",
            file=sys.stderr,
        )


def _tell_sizes(options: argparse.Namespace, progress: _Progress) -> None:
    """Says what the cache holds once all is indexed."""
    while any(contents["num_pending_tokens"] for contents in _give(options, ListContents())):
        time.sleep(_POLL_SECONDS)
    for contents in _give(options, ListContents()):
        held = sum(of_space["num_tokens"] for of_space in contents["namespaces"])
        budget = contents["shared_cache_tokens"]
        print(f"the shared cache holds {held:,} of at most {budget:,} tokens")
        if progress.num_tokens > budget:
            print(
                f"{progress.num_tokens:,} tokens were more than it may hold: the first ones left "
                "(see cache resize)",
                file=sys.stderr,
            )


def _table(contents: dict[str, Any]) -> str:
    """What one data-parallel group holds."""
    budget, of_namespace = contents["shared_cache_tokens"], contents["namespace_cache_tokens"]
    limit = "" if of_namespace is None else f", {of_namespace:,} in each namespace"
    lines = [
        f"at most {budget:,} tokens{limit}",
        f"{'namespace':<{_SHOWN_DIGITS}}  {'outputs':>9}  {'tokens':>11}  {'MB':>7}  "
        f"{'oldest':>8}  {'newest':>8}  {'drafts':>9}",
    ]
    for of_space in sorted(contents["namespaces"], key=lambda found: -found["num_tokens"]):
        ages = [_age(contents["now"] - of_space[name]) for name in ("oldest", "newest")]
        lines.append(
            f"{of_space['name'][:_SHOWN_DIGITS] or _NO_NAME:<{_SHOWN_DIGITS}}  "
            f"{of_space['num_outputs']:>9,}  {of_space['num_tokens']:>11,}  "
            f"{of_space['num_bytes'] / 1e6:>7.1f}  {ages[0]:>8}  {ages[1]:>8}  "
            f"{of_space['num_drafts']:>9,}"
        )
    snapshot = contents["snapshot"]
    if snapshot is not None and snapshot["saved_at"] is not None:
        age = _age(contents["now"] - snapshot["saved_at"])
        lines.append(f"snapshot {snapshot['path']}: {snapshot['num_tokens']:,} tokens, {age} ago")
    if snapshot is not None and snapshot["last_error"] is not None:
        lines.append(f"no snapshot: {snapshot['last_error']}")
    warm_up = contents["warm_up"]
    if warm_up is not None:
        end = "done" if warm_up["is_done"] else "not done yet"
        lines.append(
            f"warm-up from {warm_up['path']}: {warm_up['num_files_read']} of "
            f"{warm_up['num_files']} files, {warm_up['num_tokens']:,} tokens, "
            f"{warm_up['error'] or end}"
        )
    return "\n".join(lines)


def _age(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{max(seconds, 0)} s"
