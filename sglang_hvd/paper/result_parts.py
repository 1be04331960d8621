"""The sections of a result's page: what each shows in a sentence, in plots and in tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.paper import draft_tables, paper_plots, published, speed_tables
from sglang_hvd.paper.draft_tables import family_payoffs, pooled
from sglang_hvd.paper.rounds import Cell, Measured
from sglang_hvd.paper.speed_tables import mean_over
from sglang_hvd.paper.table_values import METHODS, NONE, RunData, Table, title_of
from sglang_hvd.view.frames import STYLE
from sglang_hvd.view.svg import inline_svg

# Figures by load and mode.
_ByLoad = Mapping[float, Mapping[str, Sequence[Cell]]]


@dataclass(frozen=True, slots=True)
class Part:
    """A section.

    plots: their captions. drawn: the plots.
    details: tables that are folded, by what they hold.
    """

    topic: str
    summary: str
    text: str
    plots: tuple[str, ...]
    drawn: tuple[Markup, ...]
    tables: tuple[Table, ...]
    details: tuple[tuple[str, tuple[Table, ...]], ...] = ()


def parts_of(runs: Sequence[RunData]) -> list[Part]:
    """All sections. With several runs, that of figure 5 comes first, then each run's."""
    with rc_context(STYLE):
        of_machines = _machines(runs)
        parts = [part for number, run in enumerate(runs) for part in _of_run(run, number)]
    if len(runs) == 1:
        return [*parts, of_machines]
    machines = [run.machine for run in runs for _ in range(len(parts) // len(runs))]
    named = [
        replace(part, topic=f"{part.topic}, on {machine}")
        for part, machine in zip(parts, machines, strict=True)
    ]
    return [of_machines, *named]


def _of_run(run: RunData, number: int) -> list[Part]:
    found = [_speedups, _cycles, _structure, _payoffs, _selection, _served, _loads]
    return [part(run, f"run {number}") for part in found]


def _drawn(name: str, plots: Sequence[tuple[str, Figure]]) -> tuple[Markup, ...]:
    return tuple(
        inline_svg(figure, title=title, name=f"{name} {index}")
        for index, (title, figure) in enumerate(plots)
    )


def _part(
    name: str,
    topic: str,
    summary: str,
    text: str,
    plots: Sequence[tuple[str, Figure]],
    tables: Sequence[Table],
    details: Sequence[tuple[str, tuple[Table, ...]]] = (),
) -> Part:
    drawn = _drawn(f"{name} {topic}", plots)
    titles = tuple(title for title, _ in plots)
    return Part(topic, summary, text, titles, drawn, tuple(tables), tuple(details))


# ---- how fast ----


def _speedups(run: RunData, name: str) -> Part:
    plots = []
    method = main_method(run)
    for base in _PROSE:
        of_sets = {
            title_of(one): cell
            for one in run.data_sets
            if isinstance(cell := run.rounds.speedup(method, base, one), Measured)
        }
        if of_sets:
            title = f"{run.label(method)} over {_PROSE[base]}: {_range(of_sets)}"
            plots.append((title, paper_plots.speedup_bars(run, base)))
    return _part(
        name,
        "Table 1: speedup",
        pace(run),
        "Bars show the median of the rounds, whiskers the slowest and the fastest one. Left of the "
        "line, HVD is slower.",
        plots,
        [speed_tables.speedups(run)],
    )


def main_method(run: RunData) -> str:
    """Ours if the run has it, otherwise the paper's."""
    has = {
        method: any(isinstance(mean_over(run, method, base), Measured) for base in _PROSE)
        for method in METHODS
    }
    return published.METHOD if has[published.METHOD] and not has["hvd"] else "hvd"


def pace(run: RunData) -> str:
    """How fast the main method is in comparison with greedy decoding and EAGLE3."""
    method = main_method(run)
    label = run.label(method)
    faster, alike = [], []
    for base, name in _PROSE.items():
        cell = mean_over(run, method, base)
        if not isinstance(cell, Measured):
            continue
        if is_chance(run, cell):
            alike.append(f"{name} ({cell.value:.2f} times as fast, within the noise)")
        else:
            faster.append(f"{cell.value:.2f} times as fast as {name}")
    if faster:
        said = f"{label} decodes {' and '.join(faster)}"
        return f"{said}; no difference from {alike[0]} was measured" if alike else said
    if alike:
        return f"No difference of {label} from {' and '.join(alike)} was measured"
    return f"This run does not say how fast {label} is"


_PROSE = {"greedy": "greedy decoding", "eagle3": "EAGLE3"}


def is_chance(run: RunData, mean: Measured) -> bool:
    """Whether a mean speedup of all data sets is within the noise."""
    noise = run.rounds.noise(run.data_sets)
    return isinstance(noise, Measured) and (1 / (1 + noise.value) <= mean.value <= 1 + noise.value)


def noted(run: RunData, mean: Measured) -> str:
    """Says so if a mean speedup may be chance."""
    return " (within the noise: no difference was measured)" if is_chance(run, mean) else ""


def _range(cells: dict[str, Measured]) -> str:
    best = max(cells, key=lambda name: cells[name].value)
    worst = min(cells, key=lambda name: cells[name].value)
    text = f"{cells[best].value:.2f} on {best}"
    return text if best == worst else f"{cells[worst].value:.2f} on {worst} to {text}"


def _cycles(run: RunData, name: str) -> Part:
    table = speed_tables.breakdown(run)
    points = {}
    for mode, row in zip(run.modes, table.rows, strict=True):
        cycles, cycle_ms = row.cells[:2]
        if isinstance(cycles, Measured) and isinstance(cycle_ms, Measured):
            points[mode] = (cycles.value, cycle_ms.value)
    names = {mode: run.label(mode) for mode in run.modes}
    plots = []
    if points:
        fastest = min(points, key=lambda mode: points[mode][0] * points[mode][1])
        title = f"This run: {names[fastest]} needs the least time (cycles x ms per cycle)"
        plots.append((title, paper_plots.breakdown(names, points)))
    model = published.MODELS[published.BREAKDOWN_MODEL]
    paper = paper_plots.breakdown(names, published.BREAKDOWN)
    plots.append((f"The paper: {model} on an H100", paper))
    return _part(
        name,
        "Tables 11 to 13, figure 4: cycles and their time",
        _fewest(run, {mode: point[0] for mode, point in points.items()}),
        "Each cycle is a forward pass of the target model. A cycle that verifies a longer draft "
        "takes longer.",
        plots,
        [speed_tables.runs(run), table],
        [
            ("Each data set", (speed_tables.runs_by_data_set(run),)),
            ("The paper's other models", tuple(speed_tables.other_models(run))),
        ],
    )


def _fewest(run: RunData, cycles: dict[str, float]) -> str:
    wanted = [mode for mode in ("eagle3", *METHODS) if mode in cycles]
    said = [f"{run.label(mode)} needs {cycles[mode]:.0f}" for mode in wanted]
    if not said:
        return "This run does not have every way of decoding on any data set"
    return f"{', '.join(said)} cycles for 1000 tokens"


def _served(run: RunData, name: str) -> Part:
    cells = [
        (title_of(one), run.rounds.speedup(run.methods[0], "eagle3", one))
        for one in published.SERVED
    ]
    said = [f"{cell.value:.2f} on {one}" for one, cell in cells if isinstance(cell, Measured)]
    paper = " and ".join(f"{of[0]:.2f}" for of in published.SERVED.values())
    label = run.label(run.methods[0])
    is_run = any(one.mode == published.METHOD for one in run.result.measurements)
    lacks = "The data sets of table 3 were" if is_run else f"{run.label(published.METHOD)} was"
    return _part(
        name,
        "Tables 3 and 4: serving, and the template",
        f"{label} over EAGLE3 when served: {', '.join(said)}; in the paper {paper}"
        if said
        else f"{lacks} not run, so table 3 cannot be compared",
        "A model drafter has learned from prompts with the model's chat template. Without the "
        "template it is right less often.",
        [],
        [speed_tables.served(run), speed_tables.templates(run)],
    )


def _loads(run: RunData, name: str) -> Part:
    figures = {load: speed_tables.load_figures(run, load)[1] for load in run.loads()}
    closed: _ByLoad = {one.concurrency: of for one, of in figures.items() if one.rate is None}
    open_: _ByLoad = {one.rate: of for one, of in figures.items() if one.rate is not None}
    plots = []
    for title, by_x, column, x, y in (
        *(
            (
                "Tokens per second, all data sets together",
                closed,
                0,
                _AT_A_TIME,
                "tokens per second",
            ),
        ),
        *(("Speedup over greedy decoding at the same load", closed, 1, _AT_A_TIME, "speedup"),),
        *(("Time until the first token, 90th percentile", open_, 3, _RATE, "milliseconds"),),
        *(("Time per further token, 90th percentile", open_, 6, _RATE, "milliseconds"),),
    ):
        points: dict[str, list[tuple[float, float]]] = {}
        for at in sorted(by_x):
            for mode, cells in by_x[at].items():
                if isinstance(cell := cells[column], Measured):
                    points.setdefault(mode, []).append((at, cell.value))
        if len(by_x) > 1 and points:
            plots.append((title, paper_plots.curves(run, points, x=x, y=y)))
    return _part(
        name,
        "Beyond the paper: loads",
        _at_highest(run, closed),
        "The paper measures one request at a time. With more of them, a verification has less room "
        "for drafts.",
        plots,
        [speed_tables.loads(run)],
    )


_AT_A_TIME, _RATE = "requests at a time", "requests per second"


def _at_highest(run: RunData, closed: _ByLoad) -> str:
    number = max(closed, default=1)
    if number == 1:
        return "This run has one request at a time only"
    cells = {method: closed[number].get(method, [NONE] * 2)[1] for method in METHODS}
    said = [
        f"{run.label(method)} decodes {cell.value:.2f}"
        for method, cell in cells.items()
        if isinstance(cell, Measured)
    ]
    if not said:
        return f"With {number:g} requests at a time, this run has no speedup"
    return (
        f"With {number:g} requests at a time, {' and '.join(said)} times as fast as greedy decoding"
    )


def _machines(runs: Sequence[RunData]) -> Part:
    """Figure 5."""
    table = speed_tables.machines(runs)
    modes = ("eagle3", *METHODS)
    speeds, cycles, times = [], [], []
    method = runs[0].methods[0]
    for run, row in zip(runs, table.rows, strict=False):
        known = {
            mode: (speed.value, number.value)
            for mode, speed, number in zip(modes, row.cells[:6:2], row.cells[1:6:2], strict=True)
            if isinstance(speed, Measured) and isinstance(number, Measured)
        }
        speeds.append((run.machine, {mode: of[0] for mode, of in known.items()}))
        cycles.append((run.machine, {mode: of[1] for mode, of in known.items()}))
        if isinstance(cell := row.cells[6 + METHODS.index(method)], Measured):
            times.append(f"{cell.value:.2f} on {run.machine}")
    paper = [
        (
            f"paper, {gpu.gpu}",
            {"eagle3": gpu.eagle3_cycles, published.METHOD: gpu.method_cycles},
        )
        for gpu in published.GPUS
    ]
    plots = [
        (
            "Cycles for 1000 tokens, with those of the paper's machines",
            paper_plots.machine_bars(
                runs, [*cycles, *paper], label="cycles per 1000 tokens", form=".0f"
            ),
        )
    ]
    if any(of for _, of in speeds):
        bars = paper_plots.machine_bars(runs, speeds, label="tokens per second", form=".1f")
        plots.insert(0, ("Tokens per second", bars))
    label = runs[0].label(method)
    quoted = ", ".join(f"{gpu.speedup:.2f} on {gpu.gpu}" for gpu in published.GPUS)
    return _part(
        "machines",
        "Figure 5: machines",
        f"{label} over EAGLE3: {', '.join(times) or 'not run here'}; in the paper {quoted}",
        "",
        plots,
        [table],
    )


# ---- what cache drafts are worth ----


def _structure(run: RunData, name: str) -> Part:
    shares = {
        title_of(one): cell
        for one in run.data_sets
        if isinstance(cell := draft_tables.cache_share(run, run.methods[0], [one]), Measured)
    }
    label = run.label(run.methods[0])
    plots = []
    if draft_tables.sign_names(run):
        title = "Signs of structure in the prompts, per 1000 characters"
        plots.append((title, paper_plots.signs(run)))
    summary = f"This run does not say how often {label} verifies a cache draft"
    if shares:
        best, worst = (pick(shares, key=lambda one: shares[one].value) for pick in (max, min))
        summary = f"{label} verifies a cache draft in {_percent(shares[best])} of the cycles"
        if len(shares) > 1:
            summary += f" of {best}, and in {_percent(shares[worst])} of {worst}"
        plots.append(("How often a cache draft is verified", paper_plots.cache_shares(run)))
    return _part(
        name,
        "Figure 2: what makes a task cache-friendly",
        summary,
        "Names, paths and formats that come again let the cache find what follows. Stronger "
        "colour means a higher count.",
        plots,
        [draft_tables.structure(run)],
    )


def _payoffs(run: RunData, name: str) -> Part:
    of_families = family_payoffs(run, run.methods[0])
    label = run.label(run.methods[0])
    summary = f"This run does not say what cache drafts of {label} yield"
    plots: list[tuple[str, Figure]] = []
    if of_families:
        num_drafts = sum(of.num_drafts for of in of_families.values())
        high = sum(of.num_drafts * of.high for of in of_families.values()) / num_drafts
        mean = sum(of.num_drafts * of.mean for of in of_families.values()) / num_drafts
        summary = (
            f"{100 * high:.0f}% of the cache drafts that {label} verifies yield {WORTH_LEN} tokens "
            f"or more, and the mean is {mean:.1f}"
        )
        best = max(of_families, key=lambda family: of_families[family].high)
        title = f"The largest share of worthwhile drafts: {best}"
        plots = [
            (title, paper_plots.payoff_bars(of_families)),
            ("Drafts that yield at least so many tokens", paper_plots.survival(of_families)),
        ]
    return _part(
        name,
        "Figure 3: when cache drafts are worth verifying",
        summary,
        "A cache draft that was found may still be wrong. What the target model accepts of it is "
        "its payoff.",
        plots,
        [draft_tables.payoffs(run)],
    )


def _selection(run: RunData, name: str) -> Part:
    whole = pooled(run.result.selections)
    summary = "This run did not evaluate the predictor"
    plots: list[tuple[str, Figure]] = []
    if whole is not None:
        precision, recall = draft_tables.precision(whole), draft_tables.recall(whole)
        summary = f"The predictor selects {whole.num_selected} of {whole.num_proposed} cache drafts"
        if isinstance(precision, Measured) and isinstance(recall, Measured):
            summary = (
                f"The predictor finds {_percent(recall)} of the drafts worth verifying with a "
                f"precision of {_percent(precision)}"
            )
            plots.append(("Precision and recall by data set", paper_plots.decisions(run)))
        if run.is_of_paper:
            paper = published.SELECTIONS[run.paper_model]
            summary += f"; in the paper {paper.recall:.0f}% with {paper.precision:.0f}%"
        if whole.calibration:
            title = "Accepted and predicted lengths; on the thin line, predictions come true"
            plots.append((title, paper_plots.calibration(whole)))
    training = run.result.training
    text = ""
    if training is not None:
        warned = f" {' '.join(training.warnings)}." if training.warnings else ""
        text = (
            f"The predictor was trained on {training.num_examples} drafts of "
            f"{training.num_requests} replies to the warm-up prompts.{warned}"
        )
    return _part(
        name,
        "Table 2: predictor precision and recall",
        summary,
        text,
        plots,
        [draft_tables.selections(run), *([draft_tables.calibration(run)] if plots else [])],
    )


def _percent(cell: Measured) -> str:
    return f"{100 * cell.value:.0f}%"
