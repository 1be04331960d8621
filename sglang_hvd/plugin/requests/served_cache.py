"""The shared cache of a server, as its administrator handles it: snapshots, warm-up, erasing."""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.startup.token_strings import save_tokenizer, served_fingerprint
from sglang_hvd.plugin.warming.warm_up import WarmUp
from sglang_hvd.suffix_cache import SharedOutputs
from sglang_hvd.suffix_cache.orders import (
    AddOutputs,
    Erase,
    ListContents,
    Order,
    Resize,
    SaveSnapshot,
)
from sglang_hvd.suffix_cache.snapshot import read_snapshot
from sglang_hvd.suffix_cache.snapshot_saver import SnapshotSaver
from sglang_hvd.whole_file import remove_leftovers

logger = logging.getLogger(__name__)


class ServedCache:
    """The shared cache of one scheduler process.

    All ranks call `answer` with the same orders between the same steps, so that they hold the same
    texts. The first rank alone writes snapshots, in a thread of its own.

    group: number of the data-parallel group. Each has a cache and a snapshot of its own.
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        config: HvdConfig,
        *,
        ranks: RankGroup,
        group: int,
        vocab_size: int,
    ) -> None:
        self._drafter, self._cache = drafter, drafter.suffix_cache
        self._ranks, self._group, self._vocab_size = ranks, group, vocab_size
        self._config = config
        self._budgets = config.shared_cache_tokens, config.namespace_cache_tokens
        self._path = None if config.snapshot is None else self._of_group(config.snapshot)
        self._saver: SnapshotSaver | None = None
        self._warm_up: WarmUp | None = None

    def fill(self) -> None:
        """Before the server serves: reads the snapshot of the settings, and starts to read what
        warm_from names.

        The first rank reads for all. Without a snapshot that fits, the cache stays cold and the log
        says so.
        """
        if self._config.predicts:
            _ = self._fingerprint  # the tokenizer is loaded by now, and never again while it serves
        if self._path is not None:
            self._load(self._path)
        self._cache.drain()  # the first request already drafts from all of it
        # Not before: a server that ends while it starts must leave its snapshot alone.
        if self._path is not None and self._ranks.is_first:
            self._start_saver(self._config.snapshot_minutes)
            self._close_at_signals()
        if self._config.warm_from is not None:
            self._warm_up = WarmUp(
                self._config.warm_from,
                self._cache,
                ranks=self._ranks,
                save_tokenizer=save_tokenizer,
                vocab_size=self._vocab_size,
            )

    def warm(self, *, is_idle: bool) -> None:
        """Goes on with the warm-up of the settings, between two steps. See WarmUp.go_on."""
        if self._warm_up is not None:
            self._warm_up.go_on(is_idle=is_idle)

    def answer(self, order: Order) -> dict[str, Any]:
        """Carries out an order, and returns what to say about it, as JSON values.

        Raises ValueError, in one line, for an order that cannot be carried out.
        """
        match order:
            case AddOutputs():
                if order.tokenizer not in ("", self._fingerprint):
                    raise ValueError(
                        f"the texts are of tokenizer {order.tokenizer}, the one that is served is "
                        f"{self._fingerprint}"
                    )
                self._add(order.outputs())
            case Erase(namespace=None):
                self._drafter.flush()
            case Erase():
                self._cache.flush(order.namespace)
            case Resize():
                self._budgets = order.shared_cache_tokens, order.namespace_cache_tokens
                self._cache.resize(*self._budgets)
            case SaveSnapshot():
                self._save(Path(order.path))
            case ListContents():
                return self._contents()
        return {"num_pending_tokens": self._cache.stats().num_pending_tokens}

    def describe(self) -> dict[str, Any]:
        """The latest snapshot and the warm-up, for /server_info; None for one that was never asked
        for."""
        return {
            "snapshot": None if self._saver is None else self._saver.describe(),
            "warm_up": None if self._warm_up is None else self._warm_up.describe(),
        }

    def close(self) -> None:
        """Writes the snapshot of the settings, if they name one. The server ends."""
        if self._saver is not None:
            self._cache.drain()
            self._saver.close()

    def _close_at_signals(self) -> None:
        """SGLang's launcher ends the schedulers by a request. A supervisor that sends SIGTERM to
        all processes of the server, or a terminal that sends SIGINT, ends them by the signal."""

        def end(signum: int, _frame: FrameType | None) -> None:
            self.close()
            signal.signal(signum, before[signum])
            signal.raise_signal(signum)

        if threading.current_thread() is not threading.main_thread():
            return
        before: dict[int, Any] = {
            signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)
        }
        for signum, handler in before.items():
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(signum, end)

    def _contents(self) -> dict[str, Any]:
        shared, of_namespace = self._budgets
        return {
            "shared_cache_tokens": shared,
            "namespace_cache_tokens": of_namespace,
            "tokenizer": self._fingerprint,
            "now": int(time.time()),
            "num_pending_tokens": self._cache.stats().num_pending_tokens,
            "namespaces": [asdict(of_space) for of_space in self._cache.contents()],
            **self.describe(),
        }

    def _save(self, path: Path) -> None:
        if not path.is_absolute():
            raise ValueError(f"{path}: give the absolute path of a file on the server's machine")
        if self._ranks.is_first:
            self._start_saver(None).ask(self._of_group(path))

    def _start_saver(self, every_minutes: float | None) -> SnapshotSaver:
        if self._saver is None:
            self._saver = SnapshotSaver(
                self._cache, self._fingerprint, self._path, every_minutes=every_minutes
            )
        return self._saver

    @cached_property
    def _fingerprint(self) -> str:
        try:
            return served_fingerprint()
        except (OSError, ValueError) as error:  # as transformers says that there is none
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the model's tokenizer cannot be loaded: {reason}") from None

    def _of_group(self, path: Path) -> Path:
        return path if self._group == 0 else path.with_name(f"{path.name}.{self._group}")

    def _add(self, outputs: SharedOutputs) -> None:
        if outputs.token_ids.max(initial=0) >= self._vocab_size:
            raise ValueError(
                f"token {outputs.token_ids.max()} is not in the model's vocabulary of "
                f"{self._vocab_size}"
            )
        self._cache.add(outputs)

    def _load(self, path: Path) -> None:
        start = time.monotonic()
        found: tuple[list[SharedOutputs], str | None] = [], None
        if self._ranks.is_first:
            remove_leftovers(path)
            found = self._read(path)
        pieces, fault = self._ranks.of_first(found)
        if fault is not None:
            logger.warning("HVD: %s: the shared cache starts cold", fault)
            return
        for piece in pieces:
            self._cache.add(piece)
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        logger.info(
            "HVD: %d tokens of snapshot %s in %.2f s", num_tokens, path, time.monotonic() - start
        )

    def _read(self, path: Path) -> tuple[list[SharedOutputs], str | None]:
        """The outputs of a snapshot, or why it is not used."""
        if not path.exists():
            return [], f"there is no snapshot {path} yet"
        try:
            pieces = read_snapshot(path, fingerprint=self._fingerprint)
        except ValueError as error:
            return [], str(error)
        if any(piece.token_ids.max(initial=0) >= self._vocab_size for piece in pieces):
            return [], f"snapshot {path} has tokens that the model does not know"
        return pieces, None
