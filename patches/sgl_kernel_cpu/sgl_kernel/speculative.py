"""The module name under which SGLang's NGRAM path looks for its operator."""

from sgl_kernel.tree import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
