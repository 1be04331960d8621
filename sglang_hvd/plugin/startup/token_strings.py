"""The target's vocabulary: its tokens as text, for the predictor's token classes, and its
fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hvd.traces.tokenizer_json import texts_of_tokens, vocabulary_fingerprint


def token_strings() -> Iterator[str]:
    """What each token adds to a text, in the order of their ids.

    Loads the tokenizer when the first one is read, also under --skip-tokenizer-init: the predictor
    needs the classes of tokens, whoever tokenizes the text.
    """
    tokenizer = _tokenizer()
    yield from texts_of_tokens(tokenizer.batch_decode, len(tokenizer))


def served_fingerprint() -> str:
    """Fingerprint of the tokenizer, by which a reader of a recording finds the same one. Loads the
    tokenizer."""
    return vocabulary_fingerprint(_tokenizer().get_vocab())


def _tokenizer() -> Any:
    # As SGLang's scheduler loads it. If SGLang downloaded the model, the path is not the given one.
    serving, model = get_serving(), get_model()
    return get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        tokenizer_backend=serving.tokenizer_backend,
    )
