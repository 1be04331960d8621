"""The target's tokenizer: its tokens as text, for the predictor's token classes, its fingerprint,
and its files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hvd.traces.tokenizer_json import texts_of_tokens, vocabulary_fingerprint


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


def save_tokenizer(folder: Path) -> int | None:
    """Writes the tokenizer's files into a folder, and returns the token that ends an output, if
    there is one. Loads the tokenizer."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


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
