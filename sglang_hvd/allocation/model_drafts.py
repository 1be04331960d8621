"""What a drafter on the device can draft, and what that costs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.costs import StepCosts


@dataclass(frozen=True, slots=True)
class DrafterChoices:
    """The choices of one drafter on the device: one row for each draft source of that kind.

    sizes: nodes that its draft may have, root not included, rising.
    num_steps: numbers of steps that it may run, rising.
    max_nodes: the most nodes that its draft can have, root not included, by num_steps; None: the
        largest size.
    draft_ms: float64[num_drafting] by costs, numbers of drafting requests, and steps: the time of
        its steps in milliseconds.

    Raises ValueError if they do not fit each other.
    """

    sizes: tuple[int, ...]
    num_steps: tuple[int, ...]
    max_nodes: tuple[int, ...] | None = None
    draft_ms: Callable[[StepCosts, Sequence[int], int], npt.NDArray[np.float64]] = (
        StepCosts.draft_ms
    )

    def __post_init__(self) -> None:
        require_rising("model_sizes", self.sizes)
        require_rising("num_steps", self.num_steps)
        if self.max_nodes is not None and (
            len(self.max_nodes) != len(self.num_steps) or min(self.max_nodes) < 1
        ):
            raise ValueError("max_nodes must have one number for each of num_steps, 1 or more")

    @property
    def node_limits(self) -> tuple[int, ...]:
        """max_nodes, or the largest size for each number of steps."""
        return self.max_nodes or (self.sizes[-1],) * len(self.num_steps)


def require_rising(name: str, values: Sequence[int]) -> None:
    """Raises ValueError if the values do not rise from 1 or more."""
    if not values or values[0] < 1 or any(np.diff(values) < 1):
        raise ValueError(f"{name} must rise from 1 or more, got {tuple(values)}")


def model_tree_sizes(num_nodes: int) -> tuple[int, ...]:
    """Sizes to choose from for a model drafter's tree, root not included; the last is the whole
    tree."""
    return (
        *(2**k - 1 for k in range(2, num_nodes.bit_length() + 1) if 2**k <= num_nodes),
        num_nodes,
    )


def max_tree_nodes(topk: int, num_steps: int) -> int:
    """The most nodes that EAGLE's tree can have, root not included: topk children of the root, and
    topk of each of the topk nodes that every later step expands."""
    return topk + (num_steps - 1) * topk**2


def draft_step_choices(num_steps: int) -> tuple[int, ...]:
    """At most four numbers of steps to choose from, up to this one, rising."""
    return tuple(range(num_steps, 0, -math.ceil(num_steps / 4)))[::-1]
