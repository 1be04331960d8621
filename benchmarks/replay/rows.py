"""The rows of the benchmark, and tables of their means."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.replay.settings import WITHOUT_COSTS
from sglang_hvd.replay.core.recordings import mean_over_families
from sglang_hvd.replay.training.tables import markdown_table


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one file in one cell.

    tokens_per_ms: of the whole batch.
    seed_spread: difference between the fastest and the slowest seed, as a share of tokens_per_ms.
    num_sessions, num_text_tokens: sessions and output tokens of the file that are served at least
        once.
    speedup_vs_model: speed relative to policy `model`.
    regret_to_oracle: share of the oracle's speed that is missing.
    """

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


# Pairs of policies: the second knows more than the first.
_REGRETS = (
    ("allocate", "oracle"),
    ("allocate, one tree", "oracle, one tree"),
    ("allocate", "oracle, right nodes"),
    ("allocate", "knows cache drafts"),
)
# `allocate` should reach this share of the best other policy's speed on every file.
_AIM = 0.98


def beside_oracle(rows: Sequence[Row]) -> list[Row]:
    """The rows of a cell, compared with policy `model` and the oracle on the same file."""
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
    """Each policy's means over the families."""
    figures = {
        "speedup_vs_model": "tokens/ms over model",
        "regret_to_oracle": "regret to oracle",
        "seed_spread": "seed spread",
        "cycles_per_1k": "cycles per 1K",
        "mean_accepted": "accepted",
        "cache_share": "cache",
        "both_share": "both",
    }
    lines = []
    for policy in dict.fromkeys(row.policy for row in rows):
        of_policy = [row for row in rows if row.policy == policy]
        line: dict[str, object] = {"policy": policy, "setting": of_policy[0].setting}
        for name in figures:
            line[name] = mean_over_families((row.family, getattr(row, name)) for row in of_policy)
        lines.append(line)
    columns = {"policy": "policy", "setting": "setting", **figures}
    return markdown_table(columns, lines, num_labels=2)


def plain_table_of(rows: Sequence[Row]) -> str:
    """Speeds in a cell relative to plain serving, which must be among the rows."""
    speeds = _Speeds.of(rows)
    families = list(dict.fromkeys(speeds.families.values()))
    lines = []
    for policy in speeds.by_policy:
        found = speeds.over(policy, "plain")
        line: dict[str, object] = {"policy": policy, "mean": mean_over_families(found)}
        line["lowest"] = min(speed for _, speed in found)
        for family in families:
            line[f"of {family}"] = mean_over_families(f for f in found if f[0] == family)
        lines.append(line)
    columns = {"policy": "tokens/ms over plain", "mean": "mean", "lowest": "lowest file"}
    of_families = {f"of {family}": family for family in families}
    return markdown_table(columns | of_families, lines, digits=2)


def disturbed_table_of(rows: Sequence[Row]) -> str:
    """Speeds over that with the right table: the mean over the families, and the worst file."""
    speeds = _Speeds.of(rows)
    lines = ["| tokens/ms over the right table | mean | worst file |", "|---|---|---|"]
    for policy in speeds.by_policy:
        found = speeds.over(policy, "allocate")
        worst = min(speed for _, speed in found)
        lines.append(f"| {policy} | {mean_over_families(found):.3f} | {worst:.3f} |")
    return "\n".join(lines)


def summary_of(rows: Sequence[Row]) -> str:
    """All cells of one cost table: each policy's speed relative to policy `model`, averaged over
    the
    families; regrets to policies that know more; and `allocate` relative to the best policy that
    ignores costs, file by file."""
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(f"{row.batch_size}, {row.model_drafter}", []).append(row)
    columns = [_column(_Speeds.of(of_cell)) for of_cell in cells.values()]
    figures = [dict(zip(cells, (c[name] for c in columns), strict=True)) for name in columns[0]]
    lines = [{"": name, **line} for name, line in zip(columns[0], figures, strict=True)]
    return markdown_table({"": "tokens/ms over model", **{cell: cell for cell in cells}}, lines)


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Speeds in a cell.

    families: family of each file.
    by_policy: tokens per millisecond of each policy on each file.
    """

    families: dict[str, str]
    by_policy: dict[str, dict[str, float]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_Speeds":
        by_policy: dict[str, dict[str, float]] = {}
        for row in rows:
            by_policy.setdefault(row.policy, {})[row.file] = row.tokens_per_ms
        return cls({row.file: row.family for row in rows}, by_policy)

    def over(self, policy: str, *others: str) -> list[tuple[str, float]]:
        """Family of each file, and the policy's speed relative to the fastest of the others."""
        return [
            (family, self.by_policy[policy][file] / max(self.by_policy[o][file] for o in others))
            for file, family in self.families.items()
        ]


def _column(speeds: _Speeds) -> dict[str, str]:
    """The cells of a column of summary_of, by the name of the line."""
    known = speeds.by_policy
    column = {policy: f"{mean_over_families(speeds.over(policy, 'model')):.2f}" for policy in known}
    for policy, other in _REGRETS:
        if policy in known and other in known:
            reached = mean_over_families(speeds.over(policy, other))
            assert reached is not None, "a cell has files"
            column[f'regret of "{policy}" to "{other}"'] = f"{1 - reached:.3f}"
    if "allocate" in known:
        compared = speeds.over("allocate", *(policy for policy in known if policy in WITHOUT_COSTS))
        of_files = [speed for _, speed in compared]
        column["allocate over the best other policy, worst file"] = f"{min(of_files):.2f}"
        num_below = sum(speed < _AIM for speed in of_files)
        column[f"files of {len(of_files)} below {_AIM}"] = str(num_below)
    return column
