"""The page's sections on cache drafts: what can be copied, and what it brings."""

from collections.abc import Sequence

from sglang_hvd.config import WORTH_LEN
from sglang_hvd.replay.analysis import MARGINAL_LEN, Analysis, Structure
from sglang_hvd.replay.findings import Finding
from sglang_hvd.replay.markup import folded, legend, section, share_cell, table, tokens_cell
from sglang_hvd.replay.plots import Axis, Bar, Part, Series, bar_plot, xy_plot

_NUM_COLOURS = 8
_ORIGINS = {
    "prompt": "from the prompt",
    "output": "from its own output",
    "own": "from the request itself",
    "finished": "from finished requests",
}
_VERIFIED = {
    "high": f"at least {WORTH_LEN} tokens",
    "marginal": f"{MARGINAL_LEN} to {WORTH_LEN - 1}",
    "low": f"0 to {MARGINAL_LEN - 1}",
}


def structure_section(analysis: Analysis, found: Finding) -> str:
    families = [row for row in analysis.structure if row.file is None]
    files = [row for row in analysis.structure if row.file is not None]
    origins = tuple(families[0].copied_shares)
    top = max(row.copied_share for row in families)
    bars = [
        Bar(
            row.family,
            [
                Part(
                    f"{row.family}: {share_cell(share)} % {_ORIGINS[origin]}",
                    share,
                    f"{_colour(analysis, row.family)} o{index}",
                )
                for index, (origin, share) in enumerate(row.copied_shares.items())
            ],
            f"{share_cell(row.copied_share)} %",
        )
        for row in families
    ]
    share_axis = Axis.of_shares("places where the next token is right (%)", top)
    most = max(row.cache_share for row in analysis.structure)
    plots = (
        bar_plot(found.plots[0], share_axis, bars),
        xy_plot(
            found.plots[1],
            Axis.of_shares(
                "places where the next token is right (%)",
                max(row.copied_share for row in analysis.structure),
            ),
            Axis.of_shares("cycles that verify a cache draft (%)", most),
            [
                Series(
                    row.file or row.family,
                    _colour(analysis, row.family) + (" file" if row.file else ""),
                    [(row.copied_share, row.cache_share)],
                    marker=_number(analysis, row.family),
                    sizes=[4.5 if row.file else 7.5],
                )
                for row in (*files, *families)
            ],
            labels=[
                ((row.copied_share, row.cache_share), row.family, _colour(analysis, row.family))
                for row in families
            ],
        ),
    )
    legends = (
        legend([(f"neutral o{i}", None, _ORIGINS[name]) for i, name in enumerate(origins)]),
        _family_legend(analysis, "large: family; small: file"),
    )
    return section(
        "What makes a task cache-friendly",
        found,
        "The bars show how much of the output the suffix cache has right, by where its draft is "
        "from; the dots, how often the payoff policy then verifies a cache draft.",
        plots,
        legends,
        _structure_tables(_listed(analysis)),
    )


def payoff_section(analysis: Analysis, found: Finding) -> str:
    longest = len(analysis.payoffs[0].survival)
    most = max(row.survival[0] for row in analysis.payoffs)
    shares = Axis.of_shares("proposed cache drafts (%)", most)
    ticks = [(float(length), str(length)) for length in (1, WORTH_LEN, 12, 18, 24, longest)]
    plots = (
        xy_plot(
            found.plots[0],
            Axis("accepted length, at least (tokens)", 1, longest, ticks),
            shares,
            [
                Series(
                    row.family,
                    _colour(analysis, row.family),
                    [(float(i), share) for i, share in enumerate(row.survival, start=1)],
                )
                for row in analysis.payoffs
            ],
            rules=[
                (
                    (WORTH_LEN, 0),
                    (WORTH_LEN, shares.high),
                    f"worth verifying: {WORTH_LEN} or more",
                )
            ],
        ),
        bar_plot(
            found.plots[1],
            Axis.of_shares("verified cache drafts (%)"),
            [
                Bar(
                    row.family,
                    [
                        Part(
                            f"{row.family}: {share_cell(share)} % {_VERIFIED[name]}",
                            share,
                            f"{_colour(analysis, row.family)} o{index}",
                        )
                        for index, (name, share) in enumerate(
                            (
                                ("high", row.verified_high_share),
                                ("marginal", row.verified_marginal_share),
                                ("low", row.verified_low_share),
                            )
                        )
                        if share is not None
                    ],
                    f"{row.num_verified} drafts, mean {tokens_cell(row.verified_mean_accepted)}",
                )
                for row in analysis.payoffs
            ],
        ),
    )
    tables = table(
        "Accepted lengths of the cache drafts, proposed and verified.",
        [
            "family",
            "drafts",
            "mean accepted",
            f"oracle share (\u2265 {WORTH_LEN}), %",
            "verified",
            "mean of these",
            *(f"{text}, %" for text in _VERIFIED.values()),
        ],
        [
            [
                row.family,
                str(row.num_drafts),
                tokens_cell(row.mean_accepted),
                share_cell(row.oracle_share),
                str(row.num_verified),
                tokens_cell(row.verified_mean_accepted),
                share_cell(row.verified_high_share),
                share_cell(row.verified_marginal_share),
                share_cell(row.verified_low_share),
            ]
            for row in analysis.payoffs
        ],
    ) + folded(
        "Every length",
        table(
            "Share of the proposed drafts with at least so many accepted tokens, in %.",
            ["at least", *(row.family for row in analysis.payoffs)],
            [
                [str(index + 1), *(share_cell(row.survival[index]) for row in analysis.payoffs)]
                for index in range(longest)
            ],
        ),
    )
    legends = (
        _family_legend(analysis),
        legend([(f"neutral o{i}", None, text) for i, text in enumerate(_VERIFIED.values())]),
    )
    return section(
        "When cache drafts become worth verifying",
        found,
        "The curves show how long the proposed cache drafts are right, verified or not; the bars, "
        "what the verified ones brought.",
        plots,
        legends,
        tables,
    )


def _listed(analysis: Analysis) -> list[Structure]:
    """Each family and its files; the file alone where there is one."""
    listed = []
    for family in analysis.families:
        whole, *files = [row for row in analysis.structure if row.family == family]
        listed += files if len(files) == 1 else [whole, *files]
    return listed


def _structure_tables(rows: Sequence[Structure]) -> str:
    origins, classes = tuple(rows[0].copied_shares), tuple(rows[0].class_shares)
    prompts = table(
        "Requests, in tokens. Repeated: runs of four tokens that the prompt had before.",
        [
            *("family", "file", "requests", "prompt, median", "prompt, 90th percentile"),
            *("output, median", "repeated, %"),
        ],
        [
            [
                *_names(row),
                str(row.num_requests),
                tokens_cell(row.prompt_tokens_median),
                tokens_cell(row.prompt_tokens_p90),
                tokens_cell(row.output_tokens_median),
                share_cell(row.repeated_share),
            ]
            for row in rows
        ],
        num_texts=2,
    )
    kinds = table(
        "Tokens of the prompts that are, or contain, such characters. A token may be in several.",
        ["family", "file", *(f"{name.replace('_', ' ')}, %" for name in classes)],
        [[*_names(row), *(share_cell(row.class_shares[name]) for name in classes)] for row in rows],
        num_texts=2,
    )
    copied = table(
        "Places in the outputs where the cache draft has the next token right, by where the draft "
        f"is from, and where it has {WORTH_LEN} in a row right; and what is made of it.",
        [
            *("family", "file", *(f"{_ORIGINS[origin]}, %" for origin in origins)),
            *(f"{WORTH_LEN} in a row, %", "cycles with a draft, %", "cycles that verify it, %"),
        ],
        [
            [
                *_names(row),
                *(share_cell(row.copied_shares[origin]) for origin in origins),
                share_cell(row.copied_run_share),
                share_cell(row.proposed_share),
                share_cell(row.cache_share),
            ]
            for row in rows
        ],
        num_texts=2,
    )
    return copied + prompts + folded("Kinds of tokens in the prompts", kinds)


def _names(row: Structure) -> list[str]:
    return [row.family, "all" if row.file is None else row.file]


def _number(analysis: Analysis, family: str) -> int:
    return analysis.families.index(family) % _NUM_COLOURS


def _colour(analysis: Analysis, family: str) -> str:
    return f"f{_number(analysis, family)}"


def _family_legend(analysis: Analysis, note: str = "") -> str:
    return legend(
        [
            (_colour(analysis, family), _number(analysis, family), family)
            for family in analysis.families
        ],
        note,
    )
