"""The settings of each policy, of which the best are compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sglang_hvd.allocation import draft_step_choices
from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, PAPER_THRESHOLD, Policy
from sglang_hvd.replay.core.batch import ORACLE

# Name of the row of `allocate` on a server that never runs ahead.
WAITING = "allocate, waits"
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
MODEL_SIZES = (3, 7, 15, 31)
MODEL_STEPS = draft_step_choices(8)
# Trees for policy `model` to choose from: nodes and steps.
MODEL_TREES = ((3, 2), (7, 4), (15, 4), (15, 6), (31, 6), (31, 8))


@dataclass(frozen=True, slots=True)
class Setting:
    """How a policy runs.

    tree: nodes and steps of the model drafter's draft.
    width: width of the widest verification.
    knows: sources whose drafts have a known accepted length.
    picks_nodes: only the right nodes of known cache drafts are verified.
    is_flexible: `allocate` may choose the number of steps too.
    has_branches: cache drafts may branch.
    disturbed: how its server differs from the table (disturbed.py); None: the table is right.
    waits: whether a step waits for the tokens of the step before it: always; never, as in plain
        serving; or only where `allocate` finds that it pays.
    """

    policy: Policy
    tree: tuple[int, int]
    width: int = WIDTHS[-1]
    threshold: float | None = None
    knows: frozenset[str] = frozenset()
    picks_nodes: bool = False
    is_flexible: bool = False
    has_branches: bool = True
    waits: Literal["always", "never", "if it pays"] = "always"
    disturbed: str | None = None

    def __str__(self) -> str:
        parts = [f"tree {self.tree[0]} x {self.tree[1]}", f"width {self.width}"]
        if self.threshold is not None:
            parts.append(f"threshold {self.threshold:g}")
        return ", ".join(parts)


def settings_of(
    tree: tuple[int, int], thresholds: Sequence[float], *, has_wait: bool = False
) -> dict[str, list[Setting]]:
    """Settings by the name of their rows. Rows show the best setting of each list.

    has_wait: the cost table has a wait. Then every variant of `allocate`, except WAITING, waits
        only where it pays.
    """
    by_name = _settings_of(tree, thresholds)
    if not has_wait:
        return by_name
    waiting = by_name["allocate"]
    for name, of_name in by_name.items():
        if of_name and of_name[0].policy == "allocate":
            by_name[name] = [replace(setting, waits="if it pays") for setting in of_name]
    return {**by_name, WAITING: waiting}


def disturbed_settings(names: Sequence[str], *, has_wait: bool = False) -> dict[str, list[Setting]]:
    """`allocate` with the right table, then on servers that differ from it in these ways.

    has_wait: see settings_of.
    """
    waits: Literal["always", "if it pays"] = "if it pays" if has_wait else "always"
    right = Setting("allocate", MODEL_TREES[-1], is_flexible=True, waits=waits)
    return {
        "allocate": [right],
        **{name: [replace(right, disturbed=name)] for name in names},
    }


def _settings_of(tree: tuple[int, int], thresholds: Sequence[float]) -> dict[str, list[Setting]]:
    def widths(policy: Policy, threshold: float | None = None) -> list[Setting]:
        # Every width holds what the policy always verifies.
        min_width = {"cache": 1, "both": tree[0] + 1}.get(policy, tree[0])
        return [Setting(policy, tree, width, threshold) for width in WIDTHS if width > min_width]

    return {
        "plain": [Setting("cache", tree, 1, waits="never")],
        "cache": widths("cache"),
        "frequency": widths("frequency"),
        "payoff": widths("payoff"),
        "payoff 6": widths("payoff", PAPER_THRESHOLD),
        "payoff fixed": [s for threshold in thresholds for s in widths("payoff", threshold)],
        "always-both": widths("both"),
        "allocate": [Setting("allocate", tree, is_flexible=True)],
        f"allocate, width {DEFAULT_VERIFY_WIDTH}": [
            Setting("allocate", tree, DEFAULT_VERIFY_WIDTH, is_flexible=True)
        ],
        "allocate, chains": [Setting("allocate", tree, is_flexible=True, has_branches=False)],
        "allocate, one tree": [Setting("allocate", tree)],
        "oracle": [Setting("allocate", tree, knows=ORACLE, is_flexible=True)],
        "oracle, one tree": [Setting("allocate", tree, knows=ORACLE)],
        "oracle, right nodes": [
            Setting("allocate", tree, knows=ORACLE, picks_nodes=True, is_flexible=True)
        ],
        **{
            f"knows {source} drafts": [
                Setting("allocate", tree, knows=frozenset({source}), is_flexible=True)
            ]
            for source in ("cache", "model")
        },
    }


# Names of the rows of policies that ignore costs.
WITHOUT_COSTS = frozenset(
    name
    for name, of_name in {
        "model": [Setting("model", MODEL_TREES[0])],
        **_settings_of(MODEL_TREES[0], [PAPER_THRESHOLD]),
    }.items()
    if of_name[0].policy != "allocate"
)
