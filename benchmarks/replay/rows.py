"""The rows of the benchmark, and the tables of their means."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.replay.settings import WITHOUT_COSTS
from sglang_hvd.replay.metrics import mean_over_families


@dataclass(frozen=True, slots=True)
class Row:
    """tokens_per_ms: of the whole batch. seed_spread: between the fastest and the slowest seed, as
    a share of it. num_sessions, num_text_tokens: of the file, that are served, once or many times.
    regret_to_oracle: share of the oracle's speed that is missing. speedup_vs_model: speed over that
    of policy `model`."""

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
    num_sessions: int
    num_text_tokens: int
    speedup_vs_model: float = 1.0
    regret_to_oracle: float = 0.0


# Whose speed is looked at beside whose, of what knows more.
_REGRETS = (
    ("allocate", "oracle"),
    ("allocate, one tree", "oracle, one tree"),
    ("allocate", "oracle, right nodes"),
    ("allocate", "knows cache drafts"),
)
# Of the best other policy's speed: what `allocate` is to have in every file.
_AIM = 0.98


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
        "| policy | setting | tokens/ms over model | regret to oracle | seed spread "
        "| cycles per 1K | accepted | cache | both |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row.policy for row in rows):
        of_policy = [row for row in rows if row.policy == policy]
        means = [
            mean_over_families((row.family, getattr(row, name)) for row in of_policy)
            for name in (
                "speedup_vs_model",
                "regret_to_oracle",
                "seed_spread",
                "cycles_per_1k",
                "mean_accepted",
                "cache_share",
                "both_share",
            )
        ]
        lines.append(
            f"| {policy} | {of_policy[0].setting} | {means[0]:.3f} | {means[1]:.3f} "
            f"| {means[2]:.2f} | {means[3]:.0f} | {means[4]:.2f} | {means[5]:.2f} "
            f"| {means[6]:.2f} |"
        )
    return "\n".join(lines)


def plain_table_of(rows: Sequence[Row]) -> str:
    """Of a cell: speeds over that of plain serving, which is among them."""
    speeds = _Speeds.of(rows)
    families = list(dict.fromkeys(speeds.families.values()))
    lines = [
        f"| tokens/ms over plain | mean | lowest file | {' | '.join(families)} |",
        "|---|---|---|" + "---|" * len(families),
    ]
    for policy in speeds.by_policy:
        found = speeds.over(policy, "plain")
        figures = [
            mean_over_families(found),
            min(speed for _, speed in found),
            *(mean_over_families(f for f in found if f[0] == family) for family in families),
        ]
        lines.append(f"| {policy} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    return "\n".join(lines)


def disturbed_table_of(rows: Sequence[Row]) -> str:
    """Speeds of learners over that of the right table: mean over the families, and worst file."""
    speeds = _Speeds.of(rows)
    lines = ["| tokens/ms over the right table | mean | worst file |", "|---|---|---|"]
    for policy in speeds.by_policy:
        found = speeds.over(policy, "allocate")
        worst = min(speed for _, speed in found)
        lines.append(f"| {policy} | {mean_over_families(found):.3f} | {worst:.3f} |")
    return "\n".join(lines)


def summary_of(rows: Sequence[Row]) -> str:
    """Of one table of costs, cell by cell: speeds over that of policy `model`, mean of the
    families; what is missing of the speeds of those that know more; and `allocate` beside the best
    of the policies that weigh no costs, file by file."""
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(f"{row.batch_size}, {row.model_drafter}", []).append(row)
    columns = [_column(_Speeds.of(of_cell)) for of_cell in cells.values()]
    lines = [f"| tokens/ms over model | {' | '.join(cells)} |", "|---|" + "---|" * len(cells)]
    for name in columns[0]:
        lines.append(f"| {name} | {' | '.join(column[name] for column in columns)} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Of a cell. families: of each file. by_policy: tokens per millisecond of each file."""

    families: dict[str, str]
    by_policy: dict[str, dict[str, float]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_Speeds":
        by_policy: dict[str, dict[str, float]] = {}
        for row in rows:
            by_policy.setdefault(row.policy, {})[row.file] = row.tokens_per_ms
        return cls({row.file: row.family for row in rows}, by_policy)

    def over(self, policy: str, *others: str) -> list[tuple[str, float]]:
        """Family and speed of each file, beside that of the fastest other policy there."""
        return [
            (family, self.by_policy[policy][file] / max(self.by_policy[o][file] for o in others))
            for file, family in self.families.items()
        ]


def _column(speeds: _Speeds) -> dict[str, str]:
    """By name of the line."""
    known = speeds.by_policy
    column = {policy: f"{mean_over_families(speeds.over(policy, 'model')):.2f}" for policy in known}
    for policy, other in _REGRETS:
        if policy in known and other in known:
            reached = mean_over_families(speeds.over(policy, other))
            assert reached is not None, "a cell has files"
            column[f'regret of "{policy}" to "{other}"'] = f"{1 - reached:.3f}"
    if "allocate" in known:
        beside = speeds.over("allocate", *(policy for policy in known if policy in WITHOUT_COSTS))
        of_files = [speed for _, speed in beside]
        column["allocate over the best other policy, worst file"] = f"{min(of_files):.2f}"
        num_below = sum(speed < _AIM for speed in of_files)
        column[f"files of {len(of_files)} below {_AIM}"] = str(num_below)
    return column
