"""The drafts that a cache proposes, one by one."""

from collections.abc import Hashable, Sequence

import numpy as np

from sglang_hvd.replay.core.single_cycles import CacheDraft, single_drafts
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftBatch
from tests.suffix_cache.oracle.cache import OracleCache


def propose(
    cache: SuffixCache | OracleCache, rids: Sequence[Hashable], max_tokens: int
) -> list[CacheDraft | None]:
    """The draft of each request as a chain, None where nothing matches."""
    if isinstance(cache, OracleCache):
        return cache.propose(rids, max_tokens)
    batch = DraftBatch.of_size(len(rids), max_tokens)
    cache.propose_into(batch, rids, np.full(len(rids), max_tokens, np.int32))
    return single_drafts(batch.chains(batch.num_nodes))
