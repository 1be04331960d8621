"""Reads a tokenizer.json, and tells the text of its tokens and which vocabulary it has."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer


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


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """16 hex digits: SHA-256 of the tokens in the order of their ids.

    vocabulary: token as the tokenizer spells it -> id, added tokens included.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
        spelling = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (token_id, len(spelling)))
        digest.update(spelling)
    return digest.hexdigest()[:16]


def texts_of_tokens(
    decode: Callable[[Sequence[Sequence[int]]], Sequence[str]], num_tokens: int
) -> list[str]:
    """What each token adds to a text, in the order of their ids.

    Each token is decoded after another one. The decoders of SentencePiece vocabularies drop the
    space that a text begins with, so a token that is decoded alone would lose its space.

    decode: texts of several sequences of token ids.
    """
    alone = decode([[token_id] for token_id in range(num_tokens)])
    letter = next((i for i, text in enumerate(alone) if text.isascii() and text.isalpha()), None)
    if letter is None:  # no words, so none that begin with a space
        return list(alone)
    after = decode([[letter, token_id] for token_id in range(num_tokens)])
    return [text.removeprefix(alone[letter]) for text in after]
