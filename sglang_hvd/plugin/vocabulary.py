"""The target's vocabulary: its tokens as text, for the predictor's token classes, and its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_hvd.traces.vocabulary import texts_of_tokens, vocabulary_fingerprint


def token_strings(server_args: Any) -> Iterator[str]:
    """What each token adds to a text, in the order of their ids.

    Loads the tokenizer when it is first read, also under --skip-tokenizer-init: the predictor
    needs the classes of tokens, whoever turns text into them.
    """
    tokenizer = _tokenizer(server_args)
    yield from texts_of_tokens(tokenizer.batch_decode, len(tokenizer))


def served_fingerprint(server_args: Any) -> str:
    """What recordings carry to be read with the same tokenizer; loads the tokenizer."""
    return vocabulary_fingerprint(_tokenizer(server_args).get_vocab())


def _tokenizer(server_args: Any) -> Any:
    return get_tokenizer(
        server_args.tokenizer_path or server_args.model_path,
        tokenizer_mode=server_args.tokenizer_mode,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
