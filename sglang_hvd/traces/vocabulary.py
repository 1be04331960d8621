"""Which vocabulary token ids belong to, and its tokens as text."""

import hashlib
from collections.abc import Callable, Mapping, Sequence


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

    Tokens are decoded behind another one: the decoders of SentencePiece vocabularies drop the space
    that a text begins with, and so that of every token decoded alone.

    decode: texts of several sequences of token ids.
    """
    alone = decode([[token_id] for token_id in range(num_tokens)])
    letter = next((i for i, text in enumerate(alone) if text.isascii() and text.isalpha()), None)
    if letter is None:  # no words, so none that begin with a space
        return list(alone)
    behind = decode([[letter, token_id] for token_id in range(num_tokens)])
    return [text.removeprefix(alone[letter]) for text in behind]
