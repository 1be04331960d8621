"""What the model drafter can draft."""

import math


def model_tree_sizes(num_nodes: int) -> tuple[int, ...]:
    """Sizes to choose from of a model drafter's tree, root not included; the last is the whole."""
    return (
        *(2**k - 1 for k in range(2, num_nodes.bit_length() + 1) if 2**k <= num_nodes),
        num_nodes,
    )


def most_tree_nodes(topk: int, num_steps: int) -> int:
    """Nodes that EAGLE's tree can have, root not included: topk children of the root, and topk of
    each of the topk nodes that every later step expands."""
    return topk + (num_steps - 1) * topk**2


def draft_step_choices(num_steps: int) -> tuple[int, ...]:
    """At most four numbers of steps to choose from, up to this one, rising."""
    return tuple(range(num_steps, 0, -math.ceil(num_steps / 4)))[::-1]
