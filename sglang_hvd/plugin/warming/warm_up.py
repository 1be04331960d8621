"""Texts enter the shared cache in small pieces, between the steps of a server that serves."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.warming.text_pipe import TextPiece, read_piece
from sglang_hvd.suffix_cache import SharedOutputs, SuffixCache

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
# Pieces between two steps, and while nothing runs. They wait in the queue while SGLang sleeps, and
# enter just as a request wakes it: few may, where the request waits until they are indexed.
_STEP_PIECES, _INLINE_IDLE_PIECES, _IDLE_PIECES = 1, 2, 64
# Ranks exchange pieces so many steps apart, because each exchange costs a message.
_STEPS_APART = 4
# Until so many tokens are indexed, no more are handed over: prompts of requests wait for them.
_MAX_PENDING_TOKENS = 64 * 1024

# What the reading process ends with: nothing, or why it did not read everything.
_End = tuple[str | None]


class WarmUp:
    """Warms a cache with the texts of a file or folder. All ranks call `go_on` in the same order,
    between the same steps.

    A failure ends the warm-up and never the server: the texts before it stay in the cache.
    """

    def __init__(
        self,
        source: Path,
        cache: SuffixCache,
        *,
        ranks: RankGroup,
        save_tokenizer: Callable[[Path], int | None],
        vocab_size: int,
    ) -> None:
        """save_tokenizer: writes the tokenizer's files into a folder, and returns the token that
        ends an output, if there is one. Only the first rank needs it, because it reads for all."""
        self._source, self._cache, self._ranks = source, cache, ranks
        self._vocab_size = vocab_size
        self._reader = _Reader(source, save_tokenizer) if ranks.is_first else None
        self._num_steps = 0
        self._num_files = self._num_files_read = self._num_tokens = 0
        self._is_done = False
        self._fault: str | None = None
        self._began_at = self._told_at = time.monotonic()
        self._seconds: float | None = None
        logger.info("HVD: the shared cache is warmed from %s while the server serves", source)

    def go_on(self, *, is_idle: bool) -> None:
        """Hands over the next texts, if some were read.

        is_idle: nothing runs, so that more texts may enter at once.
        """
        if self._is_done:
            return
        if not is_idle:
            self._num_steps += 1
            if self._ranks.process_group is not None and self._num_steps % _STEPS_APART:
                return
        found: tuple[list[TextPiece], _End | None] = [], None
        if self._reader is not None:
            idle_pieces = _INLINE_IDLE_PIECES if self._cache.indexes_inline else _IDLE_PIECES
            found = self._reader.take(
                idle_pieces if is_idle else _STEP_PIECES,
                _MAX_PENDING_TOKENS - self._cache.stats().num_pending_tokens,
            )
        pieces, end = self._ranks.of_first(found)
        for piece in pieces:
            fault = self._add(piece)
            if fault is not None:
                end = (fault,)
                break
        if end is not None:
            self._finish(end[0])
        elif time.monotonic() >= self._told_at + _LOG_SECONDS:
            self._told_at = time.monotonic()
            logger.info("HVD: warm-up: %s", self._progress())

    def describe(self) -> dict[str, Any]:
        """How far it is, for /server_info, as JSON values."""
        return {
            "path": str(self._source),
            "num_files": self._num_files,
            "num_files_read": self._num_files_read,
            "num_tokens": self._num_tokens,
            "is_done": self._is_done,
            "seconds": self._seconds,
            "error": self._fault,
        }

    def _add(self, piece: TextPiece) -> str | None:
        """Shares the texts of a piece, or says why they cannot be shared."""
        self._num_files, self._num_files_read = piece.num_files, piece.num_files_read
        if piece.token_ids.max(initial=0) >= self._vocab_size:
            return (
                f"token {piece.token_ids.max()} is not in the model's vocabulary of "
                f"{self._vocab_size}"
            )
        self._cache.add(SharedOutputs.of_arrays(piece.lengths, piece.token_ids))
        self._num_tokens += len(piece.token_ids)
        return None

    def _finish(self, fault: str | None) -> None:
        self._is_done, self._fault = True, fault
        self._seconds = round(time.monotonic() - self._began_at, 3)
        if self._reader is not None:
            self._reader.close()
        if fault is None:
            logger.info("HVD: warm-up is done: %s", self._progress())
        else:
            logger.warning("HVD: warm-up ended early: %s: %s", self._progress(), fault)

    def _progress(self) -> str:
        return (
            f"{self._source}: {self._num_files_read} of {self._num_files} files, "
            f"{self._num_tokens} tokens, {time.monotonic() - self._began_at:.1f} s"
        )


class _Reader:
    """The process that reads the texts, and the thread that receives its pieces.

    If the server ends, the process finds its pipe closed and ends, too.
    """

    def __init__(self, source: Path, save_tokenizer: Callable[[Path], int | None]) -> None:
        self._received: queue.Queue[TextPiece | _End] = queue.Queue(maxsize=_IDLE_PIECES)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # What the process says when it fails; _receive closes it.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._folder = tempfile.TemporaryDirectory(
                prefix="hvd-warm-up-", ignore_cleanup_errors=True
            )
            self._process = self._start(source, save_tokenizer)
            assert self._process.stdout is not None
            given = self._process, self._process.stdout
            thread = threading.Thread(
                target=self._receive, args=given, name="hvd-warm-up", daemon=True
            )
            thread.start()
        # Also how transformers says that there is no tokenizer, or that it cannot be saved.
        except (OSError, ValueError, RuntimeError) as error:
            self._received.put((" ".join(str(error).split()) or repr(error),))

    def _start(
        self, source: Path, save_tokenizer: Callable[[Path], int | None]
    ) -> subprocess.Popen[bytes]:
        folder = Path(self._folder.name)
        eos_token_id = save_tokenizer(folder)
        module = "sglang_hvd.plugin.warming.text_pipe"
        command = [sys.executable, "-m", module, str(source.absolute()), str(folder)]
        return subprocess.Popen(
            command if eos_token_id is None else [*command, str(eos_token_id)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # the cores serve
        )

    def take(self, max_pieces: int, num_tokens: int) -> tuple[list[TextPiece], _End | None]:
        """What was read by now, and its end. num_tokens: no piece follows so many tokens."""
        pieces: list[TextPiece] = []
        while len(pieces) < max_pieces and num_tokens > 0:
            try:
                found = self._received.get_nowait()
            except queue.Empty:
                break
            if isinstance(found, tuple):
                return pieces, found
            pieces.append(found)
            num_tokens -= len(found.token_ids)
        return pieces, None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.take(_IDLE_PIECES, sys.maxsize)  # the thread may wait for room

    def _receive(self, process: subprocess.Popen[bytes], pipe: BinaryIO) -> None:
        fault: str | None = "the texts cannot be received: the server's log has the exception"
        try:
            while (piece := read_piece(pipe)) is not None:
                self._received.put(piece)
            code = process.wait()
            self._folder.cleanup()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
            self._errors.close()
            fault = None
            if code != 0:
                ended = f"the process that reads texts ended with code {code}"
                fault = lines[-1] if lines else ended
        finally:  # a warm-up without an end would go on forever
            self._received.put((fault,))
