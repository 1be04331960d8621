"""The shape of a simulated model drafter's tree: a chain as deep as its steps, and alternatives."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TreeShape:
    """As EAGLE's draft loop describes a tree. It numbers candidates: topk under the root, then topk
    under each of the topk most probable ones of the step before, step by step.

    parent_list: int64[1 + (num_steps - 1) * topk]; the parent of each group of topk candidates.
    candidates: int64[num_nodes], ascending; those that are nodes.
    depths: int64[num_nodes], of the nodes, from 1.
    siblings: int64[num_nodes]; 0 for the nodes of the chain, else a number that no sibling shares.
    ranks: int64[num_nodes]; place of each node where the most probable are kept: the chain first.
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
            above = first_group(depth - 1)  # children of the chain, the chain's own node first
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
            raise ValueError(f"{num_steps} steps with topk {topk} have {len(nodes)} candidates")
        kept = nodes[:num_nodes]
        order = np.argsort([candidate for candidate, _, _ in kept])
        candidates, depths, siblings = np.array(kept, np.int64)[order].T
        return cls(np.array(parents, np.int64), candidates, depths, siblings, order)
