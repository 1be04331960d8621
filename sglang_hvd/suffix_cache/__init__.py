"""Cache drafts: continuations of earlier occurrences of what a request has just generated."""

from sglang_hvd.suffix_cache.cache import SuffixCache, SuffixCacheStats
from sglang_hvd.suffix_cache.draft_batch import MATCH_FEATURES, DraftBatch

__all__ = ["MATCH_FEATURES", "DraftBatch", "SuffixCache", "SuffixCacheStats"]
