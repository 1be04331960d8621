"""Figures of a result: medians over its rounds, with their spread (paper, appendix A)."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_hvd.paper.results import Measurement, Result, Template


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure of a run.

    value: median over the rounds. low, high: the lowest and the highest round.
    note: the data sets that a mean has, such as "2 of 3"; empty if it has all.
    rounds_note: the rounds in the same way, such as "1 of 3 rounds".
    """

    value: float
    low: float
    high: float
    num_rounds: int
    note: str = ""
    rounds_note: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that the run does not have."""

    why: str


Cell = Measured | Missing

NOT_RUN = Missing("not run")
NOT_YET_RUN = Missing("not yet run")


@dataclass(frozen=True, slots=True)
class Load:
    """How requests were sent. By default as in the paper: one at a time, with the template.

    rate: requests that arrive per second; None in a closed loop.
    """

    template: Template = "official"
    concurrency: int = 1
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """Counts of one mode, over several data sets or rounds."""

    num_tokens: int
    seconds: float
    num_cycles: int
    num_accepted: int
    cycles: Mapping[str, int]

    @classmethod
    def of(cls, parts: "Sequence[Measurement | Total]") -> "Total":
        cycles: Counter[str] = Counter()
        for part in parts:
            cycles.update(part.cycles)
        return cls(
            sum(part.num_tokens for part in parts),
            sum(part.seconds for part in parts),
            sum(part.num_cycles for part in parts),
            sum(part.num_accepted for part in parts),
            cycles,
        )

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def cycles_per_1k(self) -> float:
        """Cycles per 1000 tokens."""
        return 1000 * self.num_cycles / self.num_tokens

    @property
    def cycle_ms(self) -> float | None:
        return 1000 * self.seconds / self.num_cycles if self.num_cycles else None

    @property
    def mean_accepted(self) -> float | None:
        """Draft tokens that a cycle accepts on average, cycles without a draft included.

        Appendix G says "over verified draft cycles", but the paper's tables agree with its own
        cycles per 1000 tokens only over all of them: 1000 / 397.8 - 1 is the 1.51 of its row
        Suffix, where 97.6 % of the cycles verify a draft.
        """
        is_known = self._has_drafts or not self.cycles
        return self.num_accepted / self.num_cycles if self.num_cycles and is_known else None

    def share(self, source: str) -> float | None:
        """Share of the cycles that verify a draft of this source alone; of `both`, of both.

        None if no cycle verifies a draft, or if the server does not say which do.
        """
        return self.cycles.get(source, 0) / self.num_cycles if self._has_drafts else None

    @property
    def _has_drafts(self) -> bool:
        sources = ("cache", "model", "both")
        return self.num_cycles > 0 and any(self.cycles.get(source) for source in sources)


class Rounds:
    """The measurements of a result, by what they measured and by round.

    A measurement that an error ended early is not among them: its prompts are not those of the
    others.

    alone: the load of the paper's tables, which methods assume unless they are given another one.
        A run that omits the template everywhere has them without it.
    """

    def __init__(self, result: Result) -> None:
        self.result = result
        are_plain = {one.template for one in result.measurements} == {"none"}
        self.alone = Load("none") if are_plain else Load()
        self._of: dict[tuple[str, str, Load], dict[int, Measurement]] = {}
        self._broken: set[tuple[str, str, Load]] = set()
        self._num_rounds = len({one.round for one in result.measurements})
        for one in result.measurements:
            key = one.mode, one.data_set, Load(one.template, one.concurrency, one.rate)
            if one.error is not None or not one.num_tokens or one.seconds <= 0:
                self._broken.add(key)
            else:
                self._of.setdefault(key, {})[one.round] = one

    def of(
        self, mode: str, data_set: str, load: Load | None = None
    ) -> dict[int, Measurement] | Missing:
        """The measurements by round, or why there are none."""
        key = mode, data_set, load or self.alone
        if found := self._of.get(key):
            return found
        if key in self._broken:
            return Missing("broke off")
        known = next((one for one in self.result.modes if one.name == mode), None)
        if known is not None and known.why_not is not None:
            return Missing("not served")
        return NOT_RUN if self.result.is_complete or known is None else NOT_YET_RUN

    def loads(self) -> list[Load]:
        """All that were measured, in the order of the file."""
        return list(dict.fromkeys(load for _, _, load in self._of))

    def data_sets(self, modes: Iterable[str], load: Load | None = None) -> list[str]:
        """The data sets that all of the modes have, modes without any left out."""
        known = [one.name for one in self.result.data_sets]
        of_modes = [
            {name for name in known if not isinstance(self.of(mode, name, load), Missing)}
            for mode in modes
        ]
        shared = set.intersection(*(some for some in of_modes if some)) if any(of_modes) else set()
        return [name for name in known if name in shared]

    def totals(
        self, mode: str, data_sets: Sequence[str], load: Load | None = None
    ) -> dict[int, Total] | Missing:
        """Counts over the data sets, of each round that all of them have."""
        parts = []
        for name in data_sets:
            found = self.of(mode, name, load)
            if isinstance(found, Missing):
                return found
            parts.append(found)
        if not parts:
            return NOT_RUN
        return {
            number: Total.of([part[number] for part in parts]) for number in common_rounds(parts)
        } or Missing("no whole round")

    def speedup(self, mode: str, base: str, data_set: str, load: Load | None = None) -> Cell:
        """Throughput over that of another mode on the same prompts."""
        found = self._ratios(mode, base, data_set, load)
        return found if isinstance(found, Missing) else self.over(found)

    def over(self, values: Mapping[int, float], note: str = "") -> Measured:
        """The figure of these rounds, which says so if the run has more."""
        return replace(over_rounds(values, note), rounds_note=self.rounds_note(len(values)))

    def rounds_note(self, number: int) -> str:
        """What a figure of so many rounds says of them; empty if the run has no more."""
        return f"{number} of {self._num_rounds} rounds" if number < self._num_rounds else ""

    def mean_speedup(
        self,
        mode: str,
        base: str,
        data_sets: Sequence[str],
        load: Load | None = None,
        *,
        is_geometric: bool = True,
    ) -> Cell:
        """Mean speedup over the data sets that have both modes."""
        found = [self._ratios(mode, base, name, load) for name in data_sets]
        ratios = [one for one in found if not isinstance(one, Missing)]
        if not ratios:
            return next((one for one in found if isinstance(one, Missing)), NOT_RUN)
        mean = statistics.geometric_mean if is_geometric else statistics.fmean
        means = {number: mean([one[number] for one in ratios]) for number in common_rounds(ratios)}
        if not means:
            return Missing("no whole round")
        note = "" if len(ratios) == len(found) else f"{len(ratios)} of {len(found)}"
        return self.over(means, note)

    def noise(self, data_sets: Sequence[str], load: Load | None = None) -> Cell:
        """See `noise_of`. Of several data sets, it is that of the mean of their speedups."""
        logs = []
        found: Cell = NOT_RUN
        for wanted in data_sets:
            of_modes = [
                {number: one.num_tokens / one.seconds for number, one in rounds.items()}
                for (_, name, at), rounds in self._of.items()
                if (name, at) == (wanted, load or self.alone)
            ]
            found = noise_of(of_modes)
            if isinstance(found, Missing):
                return found
            logs.append(math.log1p(found.value))
        if isinstance(found, Missing):
            return found
        share = math.expm1(math.hypot(*logs) / len(logs))
        note = self.rounds_note(found.num_rounds)
        return Measured(share, share, share, found.num_rounds, rounds_note=note)

    def _ratios(
        self, mode: str, base: str, data_set: str, load: Load | None
    ) -> dict[int, float] | Missing:
        mine, theirs = (self.of(one, data_set, load) for one in (mode, base))
        if isinstance(mine, Missing):
            return mine
        if isinstance(theirs, Missing):
            return theirs
        # Rounds are interleaved, so that a machine that slows down meets both modes.
        rounds = common_rounds([mine, theirs])
        if any(mine[number].num_requests != theirs[number].num_requests for number in rounds):
            return Missing("other prompts")
        return {
            number: Total.of([mine[number]]).throughput / Total.of([theirs[number]]).throughput
            for number in rounds
        } or Missing("no common round")


def over_rounds(values: Mapping[int, float], note: str = "") -> Measured:
    found = values.values()
    return Measured(statistics.median(found), min(found), max(found), len(found), note)


def noise_of(throughputs: Sequence[Mapping[int, float]]) -> Cell:
    """How far a speedup can be from 1 by chance, as a share.

    A mode that is measured twice in these rounds is faster or slower than itself by more than this
    in one case of twenty. The deviation of a throughput is that of its logarithm from what its mode
    and its round have on average: a round in which the machine is slow slows all modes.

    throughputs: of each mode, by round. Modes that lack a round are left out.
    """
    num_rounds = max(map(len, throughputs), default=0)
    whole = [one for one in throughputs if len(one) == num_rounds]
    rounds = common_rounds(whole) if whole else []
    if len(rounds) < 2:
        return Missing("one round" if whole else NOT_RUN.why)
    if len(whole) < 2:
        return Missing("one way")
    logs = [[math.log(one[number]) for number in rounds] for one in whole]
    of_modes = list(map(statistics.fmean, logs))
    of_rounds = [statistics.fmean(column) for column in zip(*logs, strict=True)]
    middle = statistics.fmean(of_modes)
    squares = sum(
        (value - mode - of_round + middle) ** 2
        for row, mode in zip(logs, of_modes, strict=True)
        for value, of_round in zip(row, of_rounds, strict=True)
    )
    freedom = (len(logs) - 1) * (len(rounds) - 1)
    # Deviations of the median of so many rounds, and of the difference of two such medians.
    of_median = math.sqrt(squares / freedom * math.pi / (2 * len(rounds)))
    share = math.expm1(_student_95(freedom) * math.sqrt(2) * of_median)
    return Measured(share, share, share, len(rounds))


def _student_95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t.

    It is exact for one and two degrees of freedom. From three on, Cornish and Fisher's expansion of
    the normal quantile is too low by less than 1 %.
    """
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def common_rounds(parts: Sequence[Mapping[int, object]]) -> list[int]:
    """The rounds that every part has. There is one part at least."""
    return sorted(set.intersection(*(set(part) for part in parts)))
