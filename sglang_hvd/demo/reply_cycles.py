"""Counts of the decoding cycles of a reply, read from SGLang's response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplyCycles:
    """Attributes:
    num_cycles: decoding cycles after the prefill. The prefill yields the first token. Without
        speculation each later token takes one cycle.
    num_accepted: accepted draft tokens, without bonus tokens and tokens after the reply's end.
    num_cache_cycles: cycles that verified a cache draft, alone or together with the model
        drafter's.
    """

    num_cycles: int
    num_accepted: int
    num_cache_cycles: int

    @classmethod
    def of(cls, meta_info: Mapping[str, Any], num_tokens: int) -> ReplyCycles:
        """The counts of a reply of `num_tokens` tokens, from its meta_info."""
        num_cycles = meta_info.get("spec_verify_ct", max(num_tokens - 1, 0))
        # SGLang counts all tokens that the last cycle accepted, also those after the reply's end.
        # Each earlier cycle added a bonus token.
        max_accepted = max(num_tokens - num_cycles, 0)
        [hvd] = meta_info.get("hvd") or [{}]
        return cls(
            num_cycles,
            min(meta_info.get("spec_num_correct_drafts", 0), max_accepted),
            hvd.get("num_cache_cycles", 0) + hvd.get("num_both_cycles", 0),
        )
