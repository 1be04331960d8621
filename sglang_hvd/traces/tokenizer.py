"""A tokenizer.json: reading it, its tokens as text, and which one it is."""

from pathlib import Path

from tokenizers import Tokenizer

from sglang_hvd.traces.vocabulary import texts_of_tokens, vocabulary_fingerprint


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json. Raises ValueError in one line if it cannot be read."""
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot read the tokenizer: {error.strerror}") from None
    except ValueError as error:  # what `tokenizers` raises
        raise ValueError(f"{path}: not a tokenizer.json: {error}") from None


def token_strings(tokenizer: Tokenizer) -> list[str]:
    """What each token adds to a text, in the order of their ids."""
    return texts_of_tokens(
        lambda ids: tokenizer.decode_batch(ids, skip_special_tokens=False),
        tokenizer.get_vocab_size(with_added_tokens=True),
    )


def tokenizer_fingerprint(tokenizer: Tokenizer | Path) -> str:
    """16 hex digits that tell vocabularies apart, the same as a server's recordings carry.

    Raises ValueError in one line if the file cannot be read.
    """
    if isinstance(tokenizer, Path):
        tokenizer = load_tokenizer(tokenizer)
    return vocabulary_fingerprint(tokenizer.get_vocab(with_added_tokens=True))
