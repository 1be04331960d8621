"""Which vocabulary token ids belong to."""

import hashlib
from collections.abc import Mapping


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
