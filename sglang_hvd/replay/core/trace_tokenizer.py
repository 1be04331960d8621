"""The tokenizer that recordings are read with, loaded once."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from sglang_hvd.payoff import TokenClasses
from sglang_hvd.traces.tokenizer import load_tokenizer, token_strings, tokenizer_fingerprint


@dataclass(frozen=True)
class TraceTokenizer:
    """The tokenizer that traces are read with.

    path: its tokenizer.json.
    eos_token: token that ends every output of a text trace. None or empty: nothing follows the
        text.
    """

    path: Path
    eos_token: str | None

    def check(self) -> None:
        """Loads the file now. Raises ValueError, in one line, if it holds no tokenizer."""
        _ = self.loaded

    @cached_property
    def loaded(self) -> Tokenizer:
        return load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> str:
        return tokenizer_fingerprint(self.loaded)

    @cached_property
    def eos_token_id(self) -> int | None:
        """Raises ValueError if the tokenizer has no such token."""
        if not self.eos_token:
            return None
        token_id = self.loaded.token_to_id(self.eos_token)
        if token_id is None:
            raise ValueError(
                f"{self.path} has no token {self.eos_token}: set --eos-token to one that it has"
            )
        return int(token_id)

    @cached_property
    def token_classes(self) -> TokenClasses:
        return TokenClasses.from_strings(token_strings(self.loaded))
