"""The target's vocabulary as text, from which the predictor's token classes are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.utils.hf_transformers_utils import get_tokenizer


def token_strings(server_args: Any) -> Iterator[str]:
    """Yield each token id of the vocabulary decoded by itself, in id order.

    Loads the tokenizer when it is first read, also under --skip-tokenizer-init: the predictor
    needs the classes of tokens, whoever turns text into them.
    """
    tokenizer = get_tokenizer(
        server_args.tokenizer_path or server_args.model_path,
        tokenizer_mode=server_args.tokenizer_mode,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    for token_id in range(len(tokenizer)):
        yield tokenizer.decode([token_id])
