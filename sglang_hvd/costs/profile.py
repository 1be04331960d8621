"""A table of costs from times of the parts of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hvd.costs.table import StepCosts, rising


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times of one number of requests, in milliseconds.

    verify, extend: verifications and draft-extends by width, rising from the narrowest; the widest
        may be missing.
    draft: drafts by number of steps, rising.
    """

    num_requests: int
    verify: tuple[float, ...]
    extend: tuple[float, ...]
    draft: tuple[float, ...]


def shortest_times(times: Sequence[BatchTimes]) -> BatchTimes:
    """The shortest time of each part, of several measurements of one number of requests."""
    first = times[0]
    assert all(each.num_requests == first.num_requests for each in times), "of one batch size"
    return BatchTimes(
        first.num_requests,
        *(
            tuple(map(min, zip(*(getattr(each, part) for each in times), strict=True)))
            for part in ("verify", "extend", "draft")
        ),
    )


def costs_of_times(
    times: Sequence[BatchTimes],
    *,
    widths: Sequence[int],
    draft_steps: Sequence[int],
    about: str,
) -> StepCosts:
    """The table of these times.

    times: by number of requests, rising from 1.
    widths: those that were timed, rising; of many requests maybe only the first of them.
    draft_steps: the numbers of steps of the timed drafts, see parts_of_draft.
    about: see StepCosts.
    """
    drafts = [parts_of_draft(draft_steps, of_batch.draft) for of_batch in times]
    batch_sizes = [of_batch.num_requests for of_batch in times]
    verify = [of_batch.verify for of_batch in times]
    extend = [of_batch.extend for of_batch in times]
    # A table needs two of each; what is beyond was not timed and is not asked for.
    if len(times) == 1:
        batch_sizes, verify, extend, drafts = [1, 2], verify * 2, extend * 2, drafts * 2
    draft_once, draft_round = zip(*drafts, strict=True)
    columns = tuple(widths) if widths[0] == 1 else (1, *widths)
    return StepCosts(
        about=about,
        batch_sizes=tuple(batch_sizes),
        widths=columns,
        verify=rising_table(verify, columns),
        draft_round=tuple(np.maximum.accumulate(draft_round).round(4).tolist()),
        draft_extend=rising_table(extend, columns),
        draft_once=tuple(np.maximum.accumulate(draft_once).round(4).tolist()),
    )


def parts_of_draft(steps: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """What a draft takes beside its rounds, and what one of its rounds takes.

    steps: one or two numbers of steps, rising to all. A draft's first step needs no round.
    times: of drafts of so many steps.
    """
    if steps[-1] == 1:
        return times[-1], 0.0
    if len(steps) == 1:
        return 0.0, times[0] / (steps[0] - 1)
    (fewest, most), (of_fewest, of_all) = steps, times
    of_round = max(of_all - of_fewest, 0.0) / (most - fewest)
    return max(of_fewest - (fewest - 1) * of_round, 0.0), of_round


def rising_table(
    rows: Sequence[Sequence[float]], columns: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """A whole table that never falls along a row or a column.

    rows: times by the last of these columns: all of them, or all but the first, which then costs
        what the next one does. A row that is shorter than the first row goes on with its last
        slope; one of a single time, as the row above does.
    """
    num_timed = len(rows[0])
    first = len(columns) - num_timed
    filled: list[list[float]] = []
    for row in rows:
        of_row = list(row)
        while len(of_row) < num_timed:
            at = first + len(of_row)
            if len(row) > 1:
                slope = (of_row[-1] - of_row[-2]) / (columns[at - 1] - columns[at - 2])
                of_row.append(of_row[-1] + slope * (columns[at] - columns[at - 1]))
            else:
                of_row.append(of_row[-1] * filled[-1][at] / filled[-1][at - 1])
        filled.append([of_row[0]] * first + of_row)
    return tuple(tuple(row) for row in rising(np.array(filled)).round(4).tolist())
