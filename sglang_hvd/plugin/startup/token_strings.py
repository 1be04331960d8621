"""The target's tokenizer: its tokens as text, for the predictor's token classes, its fingerprint,
and texts that it reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.reader import read_texts, text_files
from sglang_hvd.traces.tokenizer_json import (
    load_tokenizer,
    texts_of_tokens,
    vocabulary_fingerprint,
)
from sglang_hvd.types import TokenIds


def token_strings() -> Iterator[str]:
    """What each token adds to a text, in the order of their ids.

    Loads the tokenizer when the first one is read, also under --skip-tokenizer-init: the predictor
    needs the classes of tokens, also where a client tokenizes the text.
    """
    tokenizer = _tokenizer()
    yield from texts_of_tokens(tokenizer.batch_decode, len(tokenizer))


def served_fingerprint() -> str:
    """Fingerprint of the tokenizer, by which a reader of a recording finds the same one. Loads the
    tokenizer."""
    return vocabulary_fingerprint(_tokenizer().get_vocab())


def texts_to_warm(path: Path) -> Iterator[TokenIds]:
    """The texts of a file, or of the files of a folder, with which to warm the shared cache: see
    read_texts. Text is tokenized as the server does. Loads the tokenizer.

    Raises ValueError, in one line, for a file that cannot be read.
    """
    served = _tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        served.save_pretrained(folder)
        file = Path(folder) / "tokenizer.json"
        tokenizer = load_tokenizer(file) if file.exists() else None
        template = ChatTemplate(file)
        for source in text_files(path):
            for text, _ in read_texts(source, tokenizer, served.eos_token_id, template=template):
                yield text


def forget_tokenizer() -> None:
    """Frees the tokenizer's memory. It is loaded again if it is needed again."""
    _loaded.cache_clear()


def _tokenizer() -> Any:
    # As SGLang's scheduler loads it. If SGLang downloaded the model, the path is not the given one.
    serving, model = get_serving(), get_model()
    return _loaded(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        tokenizer_backend=serving.tokenizer_backend,
    )


# Loading takes seconds, and a start needs the tokenizer for several things.
_loaded = lru_cache(maxsize=1)(get_tokenizer)
