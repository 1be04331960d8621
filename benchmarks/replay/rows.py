"""The rows of the benchmark, and the table of their means."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_hvd.replay.metrics import mean_over_families


@dataclass(frozen=True, slots=True)
class Row:
    """tokens_per_ms: of the whole batch. seed_spread: between the fastest and the slowest seed, as
    a share of it. regret_to_oracle: share of the oracle's speed that is missing. speedup_vs_model:
    speed over that of policy `model`."""

    file: str
    family: str
    costs: str
    batch_size: int
    model_drafter: str
    policy: str
    setting: str
    tokens_per_ms: float
    cycles_per_1k: float
    mean_accepted: float
    cache_share: float
    both_share: float
    seed_spread: float
    speedup_vs_model: float = 1.0
    regret_to_oracle: float = 0.0


def beside_oracle(rows: Sequence[Row]) -> list[Row]:
    """The rows of a cell, beside those of policy `model` and the oracle for the same file."""
    speed = {(row.file, row.policy): row.tokens_per_ms for row in rows}
    return [
        replace(
            row,
            speedup_vs_model=row.tokens_per_ms / speed[row.file, "model"],
            regret_to_oracle=1 - row.tokens_per_ms / speed[row.file, "oracle"],
        )
        for row in rows
    ]


def table_of(rows: Sequence[Row]) -> str:
    """Means over the families, relative to policy `model`."""
    lines = [
        "| policy | setting | tokens/ms over model | regret to oracle | cycles per 1K | cache "
        "| both |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row.policy for row in rows):
        of_policy = [row for row in rows if row.policy == policy]
        means = [
            mean_over_families((row.family, getattr(row, name)) for row in of_policy)
            for name in (
                "speedup_vs_model",
                "regret_to_oracle",
                "cycles_per_1k",
                "cache_share",
                "both_share",
            )
        ]
        lines.append(
            f"| {policy} | {of_policy[0].setting} | {means[0]:.3f} | {means[1]:.3f} "
            f"| {means[2]:.0f} | {means[3]:.2f} | {means[4]:.2f} |"
        )
    return "\n".join(lines)
