"""What SGLang's responses tell of the decoding cycles of a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplyCycles:
    """Attributes:
    num_cycles: decoding cycles behind the prefill, which itself yields the first token; without
        speculation each later token is one.
    num_accepted: accepted draft tokens, bonus tokens not counted, and those behind the reply's
        end neither.
    num_cache_cycles: cycles that verified a cache draft, alone or with the model drafter's.
    """

    num_cycles: int
    num_accepted: int
    num_cache_cycles: int

    @classmethod
    def of(cls, meta_info: Mapping[str, Any], num_tokens: int) -> ReplyCycles:
        """Of a reply of so many tokens, by its meta_info."""
        num_cycles = meta_info.get("spec_verify_ct", max(num_tokens - 1, 0))
        # SGLang counts all that the last cycle accepted. Each cycle before it has a bonus token.
        most = max(num_tokens - num_cycles, 0)
        [hvd] = meta_info.get("hvd") or [{}]
        return cls(
            num_cycles,
            min(meta_info.get("spec_num_correct_drafts", 0), most),
            hvd.get("num_cache_cycles", 0) + hvd.get("num_both_cycles", 0),
        )
