"""The shape of a simulated model drafter's tree: a chain, and alternatives to its nodes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TreeShape:
    """A tree as EAGLE's draft loop describes it. The loop numbers candidates step by step: topk
    below
    the root, then topk below each of the topk most probable candidates of the step before.

    parent_list: int64[1 + (num_steps - 1) * topk], the parent of each group of topk candidates.
    candidates: int64[num_nodes], ascending, the candidates that are nodes.
    depths: int64[num_nodes], depths of the nodes, from 1.
    siblings: int64[num_nodes], 0 for nodes of the chain, else a number that differs from siblings'.
    ranks: int64[num_nodes], ranks of the nodes by probability; the chain comes first.
    """

    parent_list: Int64
    candidates: Int64
    depths: Int64
    siblings: Int64
    ranks: Int64

    @classmethod
    def of(cls, topk: int, num_steps: int, num_nodes: int) -> "TreeShape":
        """Raises ValueError if there are fewer candidates than nodes."""

        def first_group(depth: int) -> int:
            return 0 if depth == 1 else 1 + (depth - 2) * topk

        parents = [-1]
        for depth in range(2, num_steps + 1):
            above = first_group(depth - 1)  # the chain's node and its siblings, in this order
            parents += [above * topk + child for child in range(topk)]
        depths_of = range(1, num_steps + 1)
        # (candidate, depth, sibling), the most probable first.
        nodes = [(first_group(depth) * topk, depth, 0) for depth in depths_of]
        nodes += [
            (first_group(depth) * topk + child, depth, child)
            for depth in depths_of
            for child in range(1, topk)
        ]
        nodes += [
            ((first_group(depth) + group) * topk + child, depth, 1 + child)
            for depth in depths_of[1:]
            for group in range(1, topk)
            for child in range(topk)
        ]
        if num_nodes > len(nodes):
            raise ValueError(
                f"{num_steps} steps with topk {topk} have {len(nodes)} candidates, fewer than the "
                f"{num_nodes} nodes"
            )
        kept = nodes[:num_nodes]
        order = np.argsort([candidate for candidate, _, _ in kept])
        candidates, depths, siblings = np.array(kept, np.int64)[order].T
        return cls(np.array(parents, np.int64), candidates, depths, siblings, order)
