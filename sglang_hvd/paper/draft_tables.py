"""What cache drafts are worth, and whether the predictor knows it: table 2, figures 2 and 3."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_hvd.config import MARGINAL_LEN, PAPER_THRESHOLD, WORTH_LEN
from sglang_hvd.paper import published
from sglang_hvd.paper.results import CalibrationBin, Selection
from sglang_hvd.paper.rounds import NOT_RUN, Cell, Missing
from sglang_hvd.paper.table_values import (
    NONE,
    Column,
    RunData,
    Table,
    TableRow,
    counted,
    quoted,
    title_of,
)

EVERYTHING = "all data sets"

# Calibration is shown for predictions between these lengths. Most drafts are predicted to yield
# little, so that equal numbers of drafts would leave one group above the threshold.
_EDGES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)


def structure(run: RunData) -> Table:
    """Figure 2: signs in the prompts (a), and how often cache drafts are selected (b)."""
    signs = sign_names(run)
    rows = []
    for family, names in run.families().items():
        rows.append(TableRow(family))
        for name in names:
            cells = [*_signs(run, name, signs), *(cache_share(run, m, [name]) for m in run.methods)]
            rows.append(TableRow(title_of(name), tuple(cells), run.marks(cells, [name])))
    return Table(
        "Figure 2",
        "Structural signs in the measured prompts, per 1000 characters, and the share of the "
        "cycles that verify a cache draft. The paper draws both and gives no numbers.",
        "data set",
        (
            *(Column(sign, "signs per 1000 characters", 2) for sign in signs),
            *(
                Column(run.label(m), "cache drafts selected, % of cycles", 1, 100)
                for m in run.methods
            ),
        ),
        tuple(rows),
    )


def sign_names(run: RunData) -> list[str]:
    return list(dict.fromkeys(sign for one in run.result.data_sets for sign in one.signs))


def family_signs(run: RunData) -> dict[str, dict[str, float]]:
    """Mean signs of the run's families, each prompt alike."""
    found = {}
    for family, names in run.run_families().items():
        parts = [one for one in run.result.data_sets if one.name in names and one.num_measured]
        num_prompts = sum(one.num_measured for one in parts)
        found[family] = {
            sign: sum(one.num_measured * one.signs.get(sign, 0.0) for one in parts) / num_prompts
            for sign in sign_names(run)
            if num_prompts
        }
    return found


def _signs(run: RunData, data_set: str, signs: Sequence[str]) -> list[Cell]:
    of = next((one.signs for one in run.result.data_sets if one.name == data_set), None)
    if of is None:
        return [NOT_RUN] * len(signs)
    return [counted(of[sign]) if sign in of else NONE for sign in signs]


def cache_share(run: RunData, mode: str, data_sets: Sequence[str]) -> Cell:
    """Share of the cycles that verify a cache draft, alone or with the model drafter's."""
    found = run.rounds.totals(mode, data_sets)
    if isinstance(found, Missing):
        return found
    num_cycles = sum(total.num_cycles for total in found.values())
    num_cache = sum(total.cycles.get(s, 0) for total in found.values() for s in ("cache", "both"))
    if not num_cycles:
        return NONE
    note = run.rounds.rounds_note(len(found))
    return replace(counted(num_cache / num_cycles), rounds_note=note)


@dataclass(frozen=True, slots=True)
class Payoffs:
    """Accepted lengths of verified cache drafts.

    survival: shares with at least 1, 2, ... accepted tokens, up to the longest that was seen.
    low, marginal, high: shares with 0 to 2, 3 to 5, and at least 6 accepted tokens.
    """

    num_drafts: int
    mean: float
    low: float
    marginal: float
    high: float
    survival: tuple[float, ...]


def payoffs_of(accepted: Mapping[int, int]) -> Payoffs | None:
    """accepted: numbers of drafts by accepted length. None if there is no draft."""
    num_drafts = sum(accepted.values())
    if not num_drafts:
        return None

    def share(lens: range) -> float:
        return sum(number for length, number in accepted.items() if length in lens) / num_drafts

    longest = max(accepted)
    end = longest + 1
    return Payoffs(
        num_drafts,
        sum(length * number for length, number in accepted.items()) / num_drafts,
        share(range(MARGINAL_LEN)),
        share(range(MARGINAL_LEN, WORTH_LEN)),
        share(range(WORTH_LEN, max(end, WORTH_LEN))),
        tuple(share(range(length, end)) for length in range(1, end)),
    )


def family_payoffs(run: RunData, mode: str) -> dict[str, Payoffs]:
    """Payoffs of a mode's cache drafts by family, over all rounds with one request at a time."""
    found = {}
    for family, names in run.run_families().items():
        if (payoffs := payoffs_of(_accepted(run, mode, names))) is not None:
            found[family] = payoffs
    return found


def _accepted(run: RunData, mode: str, data_sets: Iterable[str]) -> Counter[int]:
    accepted: Counter[int] = Counter()
    for name in data_sets:
        rounds = run.rounds.of(mode, name)
        if not isinstance(rounds, Missing):
            for measurement in rounds.values():
                accepted.update(measurement.accepted)
    return accepted


def payoffs(run: RunData) -> Table:
    """Figure 3, and the same for the other modes that verify cache drafts."""
    rows = []
    for mode in dict.fromkeys((run.methods[0], *run.modes)):
        of_families = {f: (names, _accepted(run, mode, names)) for f, names in _families(run)}
        if mode != run.methods[0] and not any(some for _, some in of_families.values()):
            continue
        rows.append(TableRow(run.label(mode)))
        for family, (names, accepted) in of_families.items():
            found = payoffs_of(accepted)
            cells: list[Cell]
            if found is None:
                rounds = [run.rounds.of(mode, name) for name in names]
                why = next((one for one in rounds if isinstance(one, Missing)), NONE)
                cells = [NOT_RUN if not names else why] * 5
            else:
                figures = (found.num_drafts, found.mean, found.low, found.marginal, found.high)
                cells = list(map(counted, figures))
            rows.append(
                TableRow(
                    family, tuple(cells), run.marks(cells, names), is_mean=family == EVERYTHING
                )
            )
    return Table(
        "Figure 3",
        "Accepted tokens of the cache drafts that were verified, one request at a time, all "
        f"rounds. A draft is worth verifying if at least {WORTH_LEN} tokens are accepted. The "
        "paper draws the figure and gives no numbers.",
        "family",
        (
            *(Column("drafts", "", 0), Column("mean accepted", "", 2)),
            Column(f"0 to {MARGINAL_LEN - 1} tokens, %", "", 1, 100),
            Column(f"{MARGINAL_LEN} to {WORTH_LEN - 1} tokens, %", "", 1, 100),
            Column(f"{WORTH_LEN} or more, %", "", 1, 100),
        ),
        tuple(rows),
    )


def _families(run: RunData) -> list[tuple[str, list[str]]]:
    return [*run.run_families().items(), (EVERYTHING, run.data_sets)]


def pooled(selections: Sequence[Selection]) -> Selection | None:
    """The selections of several data sets together; None if there are none."""
    if not selections:
        return None
    return Selection(
        data_set=EVERYTHING,
        threshold=selections[0].threshold,
        num_proposed=sum(one.num_proposed for one in selections),
        num_high=sum(one.num_high for one in selections),
        num_selected=sum(one.num_selected for one in selections),
        num_both=sum(one.num_both for one in selections),
        calibration=_merged([b for one in selections for b in one.calibration]),
    )


def selections(run: RunData) -> Table:
    """Table 2: the run by model, then by data set."""
    rows = [TableRow("all data sets, by model")]
    whole = pooled(run.result.selections)
    if not run.is_of_paper:
        cells = _selection_cells(whole)
        marks = run.marks(cells, run.data_sets)
        rows.append(TableRow(run.result.model, (*cells, *[NONE] * 4), marks))
    for model, title in published.MODELS.items():
        paper = published.SELECTIONS[model]
        is_own = model == run.result.model
        cells = _selection_cells(whole) if is_own else [NONE] * 5
        quotes = quoted(paper.high, paper.selected, paper.precision, paper.recall)
        rows.append(TableRow(title, (*cells, *quotes), run.marks(cells, run.data_sets)))
    by_name = {one.data_set: one for one in run.result.selections}
    for family, names in run.run_families().items():
        rows.append(TableRow(family))
        for name in names:
            cells = _selection_cells(by_name.get(name))
            rows.append(TableRow(title_of(name), (*cells, *[NONE] * 4), run.marks(cells, [name])))
    heads = ("reach the threshold, %", "selected, %", "precision, %", "recall, %")
    threshold = PAPER_THRESHOLD if whole is None else whole.threshold
    return Table(
        "Table 2",
        f"Cache drafts with at least {threshold:g} accepted tokens, and those that the run's own "
        "predictor selects because it expects so many. Precision: share of the selected drafts "
        "that reach the threshold. Recall: share of the drafts reaching the threshold that are "
        "selected. Every draft that a replay proposes counts, verified or not.",
        "model or data set",
        (
            Column("drafts", "this run", 0),
            *(Column(head, "this run", 1, 100) for head in heads),
            *(Column(head, "paper") for head in heads),
        ),
        tuple(rows),
    )


def _selection_cells(of: Selection | None) -> list[Cell]:
    if of is None:
        return [NOT_RUN] * 5
    return [
        counted(of.num_proposed),
        _ratio(of.num_high, of.num_proposed),
        _ratio(of.num_selected, of.num_proposed),
        precision(of),
        recall(of),
    ]


def precision(of: Selection) -> Cell:
    """Share of the selected drafts that reach the threshold."""
    return _ratio(of.num_both, of.num_selected)


def recall(of: Selection) -> Cell:
    """Share of the drafts that reach the threshold which are selected."""
    return _ratio(of.num_both, of.num_high)


def _ratio(part: int, whole: int) -> Cell:
    return counted(part / whole) if whole else Missing("no such draft")


def calibration(run: RunData) -> Table:
    """Predicted and real accepted lengths, which the paper does not have."""
    whole = pooled(run.result.selections)
    bins = () if whole is None else whole.calibration
    rows = []
    for b in bins:
        cells = (counted(b.predicted), counted(b.accepted), counted(b.num_drafts))
        rows.append(TableRow(bin_name(b), cells, run.marks(cells, run.data_sets)))
    return Table(
        "Calibration",
        "Accepted lengths of the drafts of table 2, grouped by what was predicted.",
        "predicted accepted tokens",
        (Column("mean predicted", "", 2), Column("mean accepted", "", 2), Column("drafts", "", 0)),
        tuple(rows),
    )


def bin_name(of: CalibrationBin) -> str:
    low = max((edge for edge in _EDGES if edge <= of.predicted), default=None)
    high = min((edge for edge in _EDGES if edge > of.predicted), default=None)
    if low is None:
        return f"below {high}"
    return f"from {low}" if high is None else f"{low} to {high}"


def _merged(bins: Sequence[CalibrationBin]) -> tuple[CalibrationBin, ...]:
    """Bins of several data sets together, in groups of mean predictions between _EDGES."""
    groups: dict[str, list[CalibrationBin]] = {}
    for b in sorted((b for b in bins if b.num_drafts), key=lambda b: b.predicted):
        groups.setdefault(bin_name(b), []).append(b)
    found = []
    for group in groups.values():
        number = sum(b.num_drafts for b in group)
        predicted, accepted = (
            sum(b.num_drafts * value for b, value in zip(group, values, strict=True)) / number
            for values in ([b.predicted for b in group], [b.accepted for b in group])
        )
        found.append(CalibrationBin(num_drafts=number, predicted=predicted, accepted=accepted))
    return tuple(found)
