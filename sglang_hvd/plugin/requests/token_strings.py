"""The target's vocabulary: its tokens as text, for the predictor's token classes, and its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.runtime_context import get_model, get_serving
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hvd.traces.vocabulary import texts_of_tokens, vocabulary_fingerprint


def token_strings() -> Iterator[str]:
    """What each token adds to a text, in the order of their ids.

    Loads the tokenizer when it is first read, also under --skip-tokenizer-init: the predictor
    needs the classes of tokens, whoever turns text into them.
    """
    tokenizer = _tokenizer()
    yield from texts_of_tokens(tokenizer.batch_decode, len(tokenizer))


def served_fingerprint() -> str:
    """What recordings carry to be read with the same tokenizer; loads the tokenizer."""
    return vocabulary_fingerprint(_tokenizer().get_vocab())


def _tokenizer() -> Any:
    # As SGLang's scheduler does: where it downloaded the model, the path is not the one given.
    serving, model = get_serving(), get_model()
    return get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        tokenizer_backend=serving.tokenizer_backend,
    )
