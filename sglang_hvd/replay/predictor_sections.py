"""The page's sections on predictors: what they find, how right they are, and what they read."""

import math
from collections.abc import Callable, Sequence

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.replay.analysis import (
    RECALLS,
    Analysis,
    Bin,
    Calibration,
    PrecisionRecall,
)
from sglang_hvd.replay.core.recordings import MEAN
from sglang_hvd.replay.findings import Finding
from sglang_hvd.replay.importance import Drop
from sglang_hvd.replay.markup import (
    area_cell,
    folded,
    legend,
    section,
    share_cell,
    table,
    tokens_cell,
)
from sglang_hvd.replay.plots import Axis, Bar, Part, Series, bar_plot, dot_plot, xy_plot
from sglang_hvd.replay.training.evaluate import Evaluation

_PREDICTORS = {"predictor": "predictor", "mlp": "mlp", "frequency": "frequency score"}


def quality_section(analysis: Analysis, found: Finding) -> str:
    at_cycles = [row for row in analysis.quality if row.at == "cycle"]
    names = [name for name in _PREDICTORS if any(row.predictor == name for row in at_cycles)]
    quality = {(row.file, row.predictor): row.quality for row in at_cycles}
    families = list(dict.fromkeys(file for file, _ in quality))
    everywhere = Axis("", 0, 1, [(share / 4, f"{25 * share}") for share in range(5)])

    def dots(file: str, figure: str) -> list[Series]:
        found = [(name, getattr(quality[file, name], figure)) for name in names]
        return [
            Series(
                f"{_PREDICTORS[name]}: {figure} {share_cell(value)} %",
                f"p{index}",
                [(value, 0.0)],
                marker=index,
            )
            for index, (name, value) in reversed(list(enumerate(found)))
            if value is not None
        ]

    plots = (
        dot_plot(
            found.plots[0],
            [
                Axis("precision (%)", 0, 1, everywhere.ticks),
                Axis("recall (%)", 0, 1, everywhere.ticks),
            ],
            [
                (
                    "mean of the families" if file == MEAN else file,
                    [dots(file, figure) for figure in ("precision", "recall")],
                )
                for file in families
            ],
        ),
        xy_plot(
            found.plots[1],
            Axis("recall (%)", 0, 1, everywhere.ticks),
            Axis("precision (%)", 0, 1, everywhere.ticks),
            [series for curve in analysis.curves for series in _curve(curve)],
        ),
    )
    tables = _quality_table("At the cycles of the payoff policy.", at_cycles) + folded(
        "At every position of the outputs",
        _quality_table(
            "At every position of the outputs, as the paper counts.",
            [row for row in analysis.quality if row.at == "position"],
        ),
    )
    curve_rows = [
        ["average precision", *(area_cell(curve.average_precision) for curve in analysis.curves)],
        [
            "precision of the decisions, %",
            *(share_cell(curve.precision) for curve in analysis.curves),
        ],
        ["recall of the decisions, %", *(share_cell(curve.recall) for curve in analysis.curves)],
    ] + [
        [
            f"precision at recall {share_cell(recall)} %, %",
            *(share_cell(curve.at_recall[index]) for curve in analysis.curves),
        ]
        for index, recall in enumerate(RECALLS)
    ]
    tables += folded(
        "The curve",
        table(
            "Highest precision with at least each recall, on all families\u2019 drafts together.",
            ["", *(_PREDICTORS[curve.predictor] for curve in analysis.curves)],
            curve_rows if analysis.curves else [],
        ),
    )
    legend = _predictor_legend(names)
    return section(
        "Can the predictor identify them",
        found,
        f"A draft is worth verifying if at least {WORTH_LEN} of its tokens are accepted. The "
        "rows show what each way of choosing selects; the curves, all thresholds, and a marker the "
        "one in use.",
        plots,
        (legend, legend),
        tables,
    )


def _curve(curve: PrecisionRecall) -> list[Series]:
    name, index = _PREDICTORS[curve.predictor], list(_PREDICTORS).index(curve.predictor)
    points = list(zip(RECALLS, curve.at_recall, strict=True))
    series = [Series(name, f"p{index}", points)]
    if curve.precision is not None and curve.recall is not None:
        decided = [(curve.recall, curve.precision)]
        series.append(
            Series(f"{name}: as decided", f"p{index}", decided, marker=index, sizes=[6.5])
        )
    return series


def _quality_table(where: str, rows: Sequence[Evaluation]) -> str:
    return table(
        f"{where} Decisions against the drafts that reach the threshold. Mean: over the families. "
        "Calibration error: the largest gap between predicted and real share in any tenth of the "
        "drafts.",
        [
            *("family", "predictor", "drafts", "oracle share, %", "precision, %", "recall, %"),
            *("average precision", "ROC area", "precision at recall 60 %, %"),
            *("calibration error of the worst tenth, %", "mean absolute error, tokens"),
        ],
        [
            [
                row.file,
                _PREDICTORS[row.predictor],
                str(row.quality.num_drafts),
                share_cell(row.quality.oracle_share),
                share_cell(row.quality.precision),
                share_cell(row.quality.recall),
                area_cell(row.quality.average_precision),
                area_cell(row.quality.roc_auc),
                share_cell(row.quality.precision_at_recall_60),
                share_cell(row.quality.calibration_error),
                tokens_cell(row.quality.mean_absolute_error),
            ]
            for row in rows
        ],
        num_texts=2,
    )


def calibration_section(analysis: Analysis, found: Finding) -> str:
    probabilities = [one for one in analysis.calibration if one.of == "probability"]
    lengths = [one for one in analysis.calibration if one.of == "length"]
    shares = [(share / 4, f"{25 * share}") for share in range(5)]
    most = max(max(b.predicted, b.real) for one in lengths for b in one.bins)
    top = 4 * max(1, math.ceil(most / 4))
    numbers = [(top * i / 4, f"{top * i // 4}") for i in range(5)]
    plots = (
        xy_plot(
            found.plots[0],
            Axis(f"predicted to bring {WORTH_LEN} tokens (%)", 0, 1, shares),
            Axis("drafts that do (%)", 0, 1, shares),
            [_reliability(one) for one in probabilities],
            rules=[((0, 0), (1, 1), "")],
        ),
        xy_plot(
            found.plots[1],
            Axis("predicted accepted length (tokens)", 0, top, numbers),
            Axis("mean accepted length (tokens)", 0, top, numbers),
            [_reliability(one) for one in lengths],
            rules=[((0, 0), (top, top), "")],
        ),
    )
    tables = "".join(
        folded(
            title,
            table(
                caption,
                ["predictor", "prediction", "mean prediction", "came true", "drafts"],
                [
                    [
                        _PREDICTORS[one.predictor],
                        _range(b, form),
                        form(b.predicted),
                        form(b.real),
                        str(b.num_drafts),
                    ]
                    for one in curves
                    for b in one.bins
                ],
                num_texts=2,
            ),
        )
        for title, caption, curves, form in (
            (
                "Probabilities",
                f"Probability that at least {WORTH_LEN} tokens are accepted, in %.",
                probabilities,
                share_cell,
            ),
            ("Lengths", "Accepted length, in tokens.", lengths, tokens_cell),
        )
    )
    return section(
        "Are the predictions right on average",
        found,
        "The error is a mean over all drafts, in groups of a tenth of probability each; the "
        "calibration error of the tables above is that of the worst tenth of the drafts. "
        "On the thin line what is predicted comes true. A larger marker stands for more drafts. "
        "The frequency score\u2019s probability is the suffix cache\u2019s own estimate.",
        plots,
        (
            _predictor_legend([one.predictor for one in probabilities]),
            _predictor_legend([one.predictor for one in lengths]),
        ),
        tables,
    )


def importance_section(analysis: Analysis, found: Finding) -> str:
    importance = analysis.importance
    if importance is None:
        return section("What the predictor reads", found, "", ("", ""), ("", ""), "")
    tables = "".join(
        folded(
            title,
            table(
                f"Loss of average precision, from {area_cell(importance.average_precision)} on "
                f"{importance.num_drafts} drafts; mean and standard deviation over permutations.",
                ["inputs", "number", "loss", "deviation"],
                [
                    [
                        drop.name,
                        str(drop.num_features),
                        area_cell(drop.drop),
                        area_cell(drop.deviation),
                    ]
                    for drop in drops
                ],
            ),
        )
        for title, drops in (("Groups", importance.groups), ("Single inputs", importance.features))
    )
    return section(
        "What the predictor reads",
        found,
        "Some inputs are dealt out to other drafts: what average precision loses, the predictor "
        "owed to them. Whiskers: standard deviation over permutations.",
        (
            _drop_plot(found.plots[0], importance.groups),
            _drop_plot(found.plots[1], importance.features),
        ),
        ("", ""),
        tables,
    )


def _drop_plot(title: str, drops: Sequence[Drop]) -> str:
    high = max(0.01, *(drop.drop + drop.deviation for drop in drops))
    low = min(0.0, *(drop.drop for drop in drops))
    step = next(step for step in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if high - low <= 6 * step)
    # A bar below 0 that is too short to see needs no room.
    first, last = math.floor(low / step + 0.1), math.ceil(high / step)
    decimals = 3 if step < 0.01 else 2
    ticks = [(number * step, f"{number * step:.{decimals}f}") for number in range(first, last + 1)]
    axis = Axis("loss of average precision", first * step, last * step, ticks)
    bars = [
        Bar(drop.name, [Part(drop.name, drop.drop, "p0")], area_cell(drop.drop), drop.deviation)
        for drop in drops
    ]
    return bar_plot(title, axis, bars)


def _reliability(one: Calibration) -> Series:
    index = list(_PREDICTORS).index(one.predictor)
    num_drafts = sum(b.num_drafts for b in one.bins)
    return Series(
        _PREDICTORS[one.predictor],
        f"p{index}",
        [(max(0.0, b.predicted), b.real) for b in one.bins],
        marker=index,
        sizes=[3 + 7 * (b.num_drafts / num_drafts) ** 0.5 for b in one.bins],
    )


def _range(b: Bin, form: Callable[[float | None], str]) -> str:
    if b.low is None:
        return f"below {form(b.high)}"
    return f"from {form(b.low)}" if b.high is None else f"{form(b.low)} to {form(b.high)}"


def _predictor_legend(names: Sequence[str]) -> str:
    order = list(_PREDICTORS)
    return legend(
        [(f"p{order.index(name)}", order.index(name), _PREDICTORS[name]) for name in names]
    )
