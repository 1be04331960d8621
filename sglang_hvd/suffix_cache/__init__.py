"""Cache drafts: continuations of earlier occurrences of what a request has just generated."""

from sglang_hvd.suffix_cache.cache import SuffixCache, SuffixCacheStats
from sglang_hvd.suffix_cache.outputs import NamespaceContents, SharedOutputs, namespace_name

__all__ = [
    "NamespaceContents",
    "SharedOutputs",
    "SuffixCache",
    "SuffixCacheStats",
    "namespace_name",
]
