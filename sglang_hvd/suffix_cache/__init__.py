"""Cache drafts: continuations of earlier occurrences of what a request has just generated."""

from sglang_hvd.suffix_cache.cache import SuffixCache, SuffixCacheStats

__all__ = ["SuffixCache", "SuffixCacheStats"]
