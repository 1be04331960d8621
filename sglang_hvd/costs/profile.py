"""Makes a table of costs from times of the parts of a step, taken before a server serves."""

from collections.abc import Sequence

import numpy as np

from sglang_hvd.costs.table import Float64, StepCosts, interpolate, rising


def costs_of_times(
    batch_sizes: Sequence[int],
    verify: Float64,
    extend: Float64,
    draft: Float64,
    *,
    widths: Sequence[int],
    draft_steps: Sequence[int],
    longer: Float64,
    contexts: tuple[int, int],
    about: str,
) -> StepCosts:
    """The table of these times in milliseconds, each measured in several rounds.

    The shortest time counts, since anything else that runs on the machine makes times longer only.

    verify, extend: float64[num_rounds, num_batch_sizes, num_widths]; nan at widths that were not
        timed.
    draft: drafts by number of steps, float64[num_rounds, num_batch_sizes, num_draft_steps].
    batch_sizes (from 1), widths: rising. draft_steps: see parts_of_draft. about: see StepCosts.
    longer: float64[num_rounds]; the narrowest verification of the most requests, with longer
        contexts. They tell what a token of context takes.
    contexts: tokens of context of each request in `verify`, and in `longer`.
    """
    verify, extend, draft = (times.min(axis=0) for times in (verify, extend, draft))
    context, long_context = contexts
    num_more = batch_sizes[-1] * (long_context - context)
    token_ms = max(longer.min() - verify[-1, 0], 0.0) / max(num_more, 1)
    of_contexts = token_ms * context * np.array(batch_sizes)[:, None]
    verify = np.maximum(verify - of_contexts, 0.1 * verify)  # timed on their own, with noise
    if len(batch_sizes) == 1:  # a table needs two, and the second is never asked for
        batch_sizes = [1, 2]
        verify, extend, draft = (np.repeat(times, 2, axis=0) for times in (verify, extend, draft))
    parts = [parts_of_draft(draft_steps, of_batch) for of_batch in draft.tolist()]
    once, of_round = np.maximum.accumulate(parts).round(4).T.tolist()
    columns = tuple(widths) if widths[0] == 1 else (1, *widths)
    return StepCosts(
        about=about,
        batch_sizes=tuple(batch_sizes),
        widths=columns,
        verify=rising_table(verify, columns),
        draft_round=of_round,
        draft_extend=rising_table(extend, columns),
        draft_once=once,
        context=1000 * token_ms or None,
    )


def parts_of_draft(steps: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """What a draft takes once, and what each of its rounds takes. Its first step needs no round.

    steps, times: of one draft or two; the last one has all steps.
    """
    if len(steps) == 1:  # nothing tells its parts apart
        return (times[0], 0.0) if steps[0] == 1 else (0.0, times[0] / (steps[0] - 1))
    of_round = max(times[1] - times[0], 0.0) / (steps[1] - steps[0])
    return max(times[0] - (steps[0] - 1) * of_round, 0.0), of_round


def rising_table(times: Float64, columns: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """A whole table that never falls along a row or a column.

    times: float64[num_rows, num_times], by the last of these columns. A first column without times
        costs what the second does. A row that ends in nan goes on with its last slope, or as the
        row above if it has a single time."""
    first = len(columns) - times.shape[1]
    table = np.column_stack([times[:, :1]] * first + [times])
    for row, num in enumerate(np.isfinite(table).sum(axis=1).tolist()):
        if num == first + 1:
            table[row, num:] = table[row, num - 1] * table[row - 1, num:] / table[row - 1, num - 1]
        else:
            table[row] = interpolate(np.array(columns), columns[:num], table[row, :num])
    return tuple(map(tuple, rising(table).round(4).tolist()))
