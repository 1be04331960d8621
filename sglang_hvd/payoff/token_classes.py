"""Token classes: the kinds of text a token is, so that features do not depend on the tokenizer."""

import enum
import unicodedata
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_BRACKETS = frozenset("()[]{}<>")
_DELIMITERS = frozenset(",;:|=/\\\"'`")


class TokenClass(enum.IntFlag):
    """The kinds of text a token is. A token may be in several classes or in none. The paper has the
    first five."""

    WHITESPACE = 1  # whitespace only
    PUNCTUATION = 2  # punctuation and symbols only, ignoring whitespace at its ends
    LINE_BREAK = 4  # contains a line break
    BRACKET = 8  # contains one of ( ) [ ] { } < >
    DELIMITER = 16  # contains one of , ; : | = / \ " ' `
    WORD_START = 32  # letters only, after a space
    WORD = 64  # letters only, without a space before them
    DIGIT = 128  # contains a digit


# The draft-structure classes of the paper (table 9).
PAPER_CLASSES = tuple(TokenClass)[:5]


class TokenClasses:
    """The classes of every token of a vocabulary, as bit flags of TokenClass.

    flags: uint8[vocab_size], read-only. Larger ids, which pad a model's vocabulary, are in no
        class.
    """

    def __init__(self, flags: npt.NDArray[np.uint8]) -> None:
        if flags.dtype != np.uint8 or flags.ndim != 1 or not len(flags):
            raise ValueError(
                f"token classes are uint8[vocab_size], got {flags.dtype}{list(flags.shape)}"
            )
        self.flags = flags.copy()
        self.flags.flags.writeable = False

    @classmethod
    def from_strings(cls, token_strings: Iterable[str]) -> "TokenClasses":
        """Classifies a vocabulary.

        token_strings: the text that each token adds, in the order of their ids.
        """
        flags = [int(_classify(text)) for text in token_strings]
        if not flags:
            raise ValueError("token classes need the text of every token, got no token")
        return cls(np.array(flags, dtype=np.uint8))


def _classify(text: str) -> TokenClass:
    classes = TokenClass(0)
    visible = text.strip()
    if text and not visible:
        classes |= TokenClass.WHITESPACE
    if visible and all(unicodedata.category(c)[0] in "PS" for c in visible):
        classes |= TokenClass.PUNCTUATION
    if "\n" in text or "\r" in text:
        classes |= TokenClass.LINE_BREAK
    if not _BRACKETS.isdisjoint(text):
        classes |= TokenClass.BRACKET
    if not _DELIMITERS.isdisjoint(text):
        classes |= TokenClass.DELIMITER
    if visible.isalpha():
        classes |= TokenClass.WORD_START if text[0].isspace() else TokenClass.WORD
    if any(c.isdigit() for c in text):
        classes |= TokenClass.DIGIT
    return classes
