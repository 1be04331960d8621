"""What the model drafter can draft, and when it catches up on what was committed without it."""

import math

# Where draft-extend is postponed: tokens that the model drafter's KV cache lacks of a request from
# which it is brought up to date though the request does not draft.
MAX_POSTPONED_TOKENS = 64


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


def catches_up(num_model_nodes: int, num_missing: int) -> bool:
    """Whether a request's postponed draft-extend runs in a step.

    num_model_nodes: nodes of the model drafter's draft that it verifies.
    num_missing: tokens that the model drafter's KV cache lacks of it.
    """
    return num_missing > 0 and (num_model_nodes > 0 or num_missing >= MAX_POSTPONED_TOKENS)


def missing_after(num_model_nodes: int, num_missing: int, num_tokens: int) -> int:
    """Tokens that the model drafter's KV cache lacks of a request after a step.

    num_model_nodes, num_missing: see catches_up. num_tokens: committed in the step.
    """
    return num_tokens + (0 if catches_up(num_model_nodes, num_missing) else num_missing)
