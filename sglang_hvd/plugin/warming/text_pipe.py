"""The process that reads texts for a warm-up, and the pipe from it to the server.

    python -m sglang_hvd.plugin.warming.text_pipe SOURCE TOKENIZER_FOLDER [EOS_TOKEN_ID]

A thread of the server would hold the interpreter while it parses and tokenizes, and the steps would
wait for it.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.reader import read_texts, text_files
from sglang_hvd.traces.tokenizer_json import load_tokenizer
from sglang_hvd.types import TokenIds

# So few that the cache indexes them while a step runs.
PIECE_TOKENS = 4096
_PIECE_TEXTS = 256
_HEAD = struct.Struct("<IIII")  # files, files that were read, texts, tokens


@dataclass(frozen=True, slots=True, eq=False)
class TextPiece:
    """Some texts on their way to the cache.

    num_files, num_files_read: of the whole warm-up, so far.
    lengths: int32[num_texts], tokens of each text. token_ids: int32[num_tokens], of all of them.
    """

    num_files: int
    num_files_read: int
    lengths: npt.NDArray[np.int32]
    token_ids: TokenIds


def write_piece(pipe: BinaryIO, piece: TextPiece) -> None:
    lengths, token_ids = piece.lengths.astype("<i4"), piece.token_ids.astype("<i4")
    head = _HEAD.pack(piece.num_files, piece.num_files_read, len(lengths), len(token_ids))
    pipe.write(head + lengths.tobytes() + token_ids.tobytes())
    pipe.flush()


def read_piece(pipe: BinaryIO) -> TextPiece | None:
    """The next piece; None if the process wrote no further one completely."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    num_files, num_files_read, num_texts, num_tokens = _HEAD.unpack(head)
    body = pipe.read(4 * (num_texts + num_tokens))
    if len(body) < 4 * (num_texts + num_tokens):
        return None
    numbers = np.frombuffer(body, "<i4").astype(np.int32, copy=False)
    return TextPiece(num_files, num_files_read, numbers[:num_texts], numbers[num_texts:])


def pieces_of(source: Path, tokenizer_file: Path, eos_token_id: int | None) -> Iterator[TextPiece]:
    """The texts of a file, or of the files of a folder: see read_texts. The last piece may be
    empty.

    tokenizer_file: tokenizer.json of the model. If there is none, only files of token ids can be
        read.

    Raises ValueError, in one line, for a file that cannot be read. The error may come after some
    pieces.
    """
    tokenizer = load_tokenizer(tokenizer_file) if tokenizer_file.exists() else None
    template = ChatTemplate(tokenizer_file)
    files = text_files(source)
    texts: list[TokenIds] = []
    num_tokens = num_read = 0
    try:
        for file in files:
            for text, _ in read_texts(file, tokenizer, eos_token_id, template=template):
                texts.append(text)
                num_tokens += len(text)
                if num_tokens >= PIECE_TOKENS or len(texts) == _PIECE_TEXTS:
                    yield _piece(len(files), num_read, texts)
                    texts, num_tokens = [], 0
            num_read += 1
    except ValueError:
        yield _piece(len(files), num_read, texts)
        raise
    yield _piece(len(files), num_read, texts)


def main(arguments: Sequence[str]) -> None:
    source, folder, *eos = arguments
    os.nice(19)  # the server goes first
    pieces = pieces_of(Path(source), Path(folder) / "tokenizer.json", int(eos[0]) if eos else None)
    try:
        with os.fdopen(os.dup(1), "wb") as pipe:
            os.dup2(2, 1)  # what libraries print does not get between the pieces
            for piece in pieces:
                write_piece(pipe, piece)
    except ValueError as error:
        sys.exit(str(error))
    except BrokenPipeError:  # the server has ended
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a server that is killed leaves it


def _piece(num_files: int, num_files_read: int, texts: Sequence[TokenIds]) -> TextPiece:
    lengths = np.fromiter(map(len, texts), np.int32, len(texts))
    token_ids = np.concatenate([np.empty(0, np.int32), *texts])
    return TextPiece(num_files, num_files_read, lengths, token_ids)


if __name__ == "__main__":
    main(sys.argv[1:])
