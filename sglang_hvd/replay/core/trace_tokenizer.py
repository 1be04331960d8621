"""The tokenizer that recordings are read with, loaded once."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from sglang_hvd.payoff import TokenClasses
from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.reader import has_chats
from sglang_hvd.traces.tokenizer_json import load_tokenizer, token_strings, tokenizer_fingerprint


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

    def check_chats(self, files: Iterable[Path]) -> None:
        """Says on stderr if chat logs are among the files and the tokenizer has no chat template.

        Raises ValueError, in one line, if its chat template cannot be read.
        """
        if any(map(has_chats, files)) and self.chat_template.is_chatml:
            print(
                f"{self.path.parent} has no chat template (chat_template.jinja or "
                "tokenizer_config.json): chat logs are rendered as ChatML",
                file=sys.stderr,
            )

    @cached_property
    def loaded(self) -> Tokenizer:
        return load_tokenizer(self.path)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.path)

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
