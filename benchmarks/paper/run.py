"""A whole run: the target's own replies, the predictor, and the rounds of all modes."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.paper.data_sets import Drawn
from benchmarks.paper.fleet import Fleet, reason_of, warm
from benchmarks.paper.kept import Job, KeptResult
from benchmarks.paper.models import CACHE_MODES
from benchmarks.paper.predictor import selection, train_paper
from benchmarks.paper.replies import Asker, TokensOfTurn, record, recorded, session_of, tokens_of
from benchmarks.serving.client import Answer, Conversation, arrivals, play
from sglang_hvd.config import HvdConfig
from sglang_hvd.demo.server import ServerFailed
from sglang_hvd.paper.results import Measurement, Template
from sglang_hvd.payoff import AcceptancePredictor
from sglang_hvd.view.cycles import Cycle

# What the cycles of modes without HVD verify. SGLang does not say which of NGRAM's have a draft.
_SOURCE = {"greedy": "none", "eagle3": "model", "eagle3-adaptive": "model"}

# Of each reply with which a server begins. Kernels are compiled by then.
_NUM_COMPILING_TOKENS = 32

# Table 4 is about this data set, one request at a time.
TEMPLATE_SET = "mt-bench"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    template: of all data sets. with_table_4: one data set is also measured without a template.
    """

    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    rounds: int
    template: Template
    with_table_4: bool

    def jobs(
        self, modes: Sequence[str], data_sets: Sequence[str], *, all_at_once: bool
    ) -> Iterator[Job]:
        """All jobs in their order. Modes take turns, and another one begins each round.

        In the first round mode greedy comes first, at the first concurrency: its replies are the
        ones that the others are compared with.

        all_at_once: all servers are up, so modes take turns at each cell. False: each mode's server
            starts once in each round.
        """
        cells: list[tuple[str, Template, int, float | None]] = [
            (name, self.template, number, None) for number in self.concurrency for name in data_sets
        ]
        if self.with_table_4 and TEMPLATE_SET in data_sets:
            cells.append((TEMPLATE_SET, "none", 1, None))
        cells += [(name, self.template, 1, rate) for rate in self.rates for name in data_sets]
        for number in range(self.rounds):
            turn = number % len(modes)
            in_turn = [*modes[turn:], *modes[:turn]]
            if all_at_once:
                yield from (Job(mode, *cell, number) for cell in cells for mode in in_turn)
            else:
                yield from (Job(mode, *cell, number) for mode in in_turn for cell in cells)


@dataclass(frozen=True)
class Run:
    """Everything that a run needs. Each stage goes on where an earlier run was broken off."""

    folder: Path
    kept: KeptResult
    fleet: Fleet
    plan: Plan
    asker: Asker
    data_sets: Mapping[str, Drawn]
    config: HvdConfig

    @property
    def predictor(self) -> Path:
        return predictor_file(self.folder)

    def go(self) -> None:
        """Raises ServerFailed if the target alone cannot be served."""
        modes = [mode.name for mode in self.kept.result.modes]
        jobs = list(
            self.plan.jobs(modes, list(self.data_sets), all_at_once=self.fleet.limit >= len(modes))
        )
        for name, template in dict.fromkeys((job.data_set, job.template) for job in jobs):
            self._record_warm_up(name, template)
        if "hvd-paper" in modes and self.kept.result.training is None:
            self._train()
        are_done = self._measure(jobs)
        if self.kept.result.training is not None:
            self._judge()
        self.kept.change(is_complete=are_done)

    def _record_warm_up(self, name: str, template: Template) -> None:
        """The target's own replies to the warm-up prompts."""
        path = self._warm_up_file(name, template)
        if path.exists():
            return
        if why_not := self._start("greedy"):
            raise ServerFailed(f"the target cannot be served: {why_not}")
        tell(f"replies to the warm-up prompts of {name}")
        drawn = self.data_sets[name]
        talks = [self.asker.conversation(prompt, template) for prompt in drawn.warm_up]
        played = play(self.fleet.url("greedy"), talks, concurrency=max(self.plan.concurrency))
        record(path, self.asker.traces(talks, played.answers, drawn.about.family))

    def _train(self) -> None:
        tell("training the paper's predictor")
        training = train_paper(
            self._warm_up_file("", self.plan.template).parent,
            self.asker.tokenizer,
            self.config,
            self.predictor,
            seed=self.kept.result.seed,
        )
        for warning in training.warnings:
            tell(warning)
        self.kept.change(training=training)

    def _measure(self, jobs: Sequence[Job]) -> bool:
        """Measures the jobs that are left.

        Returns whether all modes that can be served have all of theirs, none ended by an error.
        """
        done = self.kept.done()
        gone: set[str] = set()
        told = ""
        with tqdm(total=len(jobs), unit="run", disable=None) as bar:
            for job in jobs:
                bar.set_postfix_str(f"{job.mode}, {job.data_set}")
                if job not in done and job.mode not in gone:
                    told = self._tell_stage(job, told)
                    why_not = self._start(job.mode)
                    if why_not is None:
                        self.kept.add(self._measured(job))
                    else:
                        gone.add(job.mode)
                        tell(f"{job.mode} cannot be served: {why_not}")
                bar.update()
        done = self.kept.done()
        return all(job in done for job in jobs if self._was_served(job.mode))

    def _tell_stage(self, job: Job, told: str) -> str:
        """Says where the run is, if that is not what it told before. Returns what it said."""
        load = f"{job.concurrency} at once" if job.rate is None else f"{job.rate:g} per second"
        now = f"round {job.round + 1} of {self.plan.rounds}, {load}"
        if self.fleet.limit == 1:
            now += f", {job.mode}"
        if now != told:
            tell(now)
        return now

    def _start(self, mode: str) -> str | None:
        """Starts the server of a mode unless it runs. Returns why it does not start, if so."""
        if self.fleet.is_running(mode):
            return None
        why_not = None
        try:
            url = self.fleet.url(mode)
            self._compile(url)
        except (ServerFailed, OSError) as error:
            self.fleet.end(mode)
            why_not = reason_of(error)
        if why_not is None or not self._was_served(mode):
            self.kept.change(
                modes=tuple(
                    m.model_copy(update={"why_not": why_not}) if m.name == mode else m
                    for m in self.kept.result.modes
                )
            )
        return why_not

    def _was_served(self, mode: str) -> bool:
        return any(m.mode == mode for m in self.kept.result.measurements)

    def _compile(self, url: str) -> None:
        """Serves at each concurrency once, so that no measurement waits for what is done once."""
        drawn = next(iter(self.data_sets.values()))
        template = self.plan.template
        for number in self.plan.concurrency:
            talks = [self.asker.conversation(p, template) for p in drawn.warm_up[:number]]
            play(url, [_begin_of(talk) for talk in talks], concurrency=number)

    def _measured(self, job: Job) -> Measurement:
        """Measures a job. If the server ends, the measurement says so and has what came before."""
        drawn = self.data_sets[job.data_set]
        prompts = drawn.prompts_for(job.concurrency)
        talks = [self.asker.conversation(prompt, job.template) for prompt in prompts]
        outputs = [t.output_ids for t in recorded(self._warm_up_file(job.data_set, job.template))]
        answers: list[Answer] = []
        error = None
        start = time.perf_counter()
        try:
            url = self.fleet.url(job.mode)
            warm(url, job.mode, outputs, self.asker.tokenizer)
            starts = None
            if job.rate is not None:
                starts = arrivals(len(talks), job.rate, self.kept.result.seed + job.round)
            start = time.perf_counter()
            played = play(url, talks, concurrency=job.concurrency, starts=starts, so_far=answers)
            seconds = played.seconds
        except (ServerFailed, OSError) as failure:
            seconds, error = time.perf_counter() - start, reason_of(failure)
            tell(f"{job.mode} ended during {job.data_set}: {error} (see {self.folder / 'logs'})")
            self.fleet.end(job.mode)
        expected = self._expected(job, talks, answers, is_whole=error is None)
        return measurement_of(job, answers, seconds, expected=expected, error=error)

    def _expected(
        self, job: Job, talks: Sequence[Conversation], answers: Sequence[Answer], *, is_whole: bool
    ) -> TokensOfTurn | None:
        """The replies of mode greedy. Of each prompt its first one counts."""
        path = self._replies_file(job.data_set, job.template)
        known = recorded(path)
        if job.mode == "greedy" and is_whole:
            sessions = {trace.session for trace in known}
            found = self.asker.traces(talks, answers, self.data_sets[job.data_set].about.family)
            if new := [trace for trace in found if trace.session not in sessions]:
                known += new
                record(path, known)
        return tokens_of(known) if known else None

    def _judge(self) -> None:
        """The predictor's choices among the drafts of greedy's replies."""
        judged = {found.data_set for found in self.kept.result.selections}
        predictor = AcceptancePredictor.load(self.predictor)
        template = self.plan.template
        for name, drawn in self.data_sets.items():
            replies = recorded(self._replies_file(name, template))
            if name in judged or not replies:
                continue
            tell(f"replay of the replies to {name}")
            found = selection(
                name,
                recorded(self._warm_up_file(name, template)),
                [t for t in replies if int(t.session) < drawn.about.num_measured],
                predictor,
                self.asker.tokenizer,
                self.config,
            )
            self.kept.change(selections=(*self.kept.result.selections, found))

    def _warm_up_file(self, name: str, template: Template) -> Path:
        return self.folder / "warm_up" / template / f"{name}.hvdt"

    def _replies_file(self, name: str, template: Template) -> Path:
        return self.folder / "replies" / template / f"{name}.hvdt"


def predictor_file(folder: Path) -> Path:
    """The predictor of a run. An absolute path: servers run in their own folders."""
    return folder.absolute() / "predictor.safetensors"


def measurement_of(
    job: Job,
    answers: Sequence[Answer],
    seconds: float,
    *,
    expected: TokensOfTurn | None,
    error: str | None = None,
) -> Measurement:
    """The figures of replies.

    expected: those of mode greedy, which may be fewer; None: not compared. Replies are identical
        only if each has its counterpart there; one that differs is told in any case.
    """
    num_cycles = sum(answer.counts.num_cycles for answer in answers)
    cycles, accepted = {}, {}
    if job.mode in CACHE_MODES:
        reports = [Cycle.from_report(report) for a in answers for report in a.cycles]
        found = Counter(cycle.source for cycle in reports)
        cycles = {"none" if source == "plain" else source: n for source, n in found.items()}
        accepted = dict(
            sorted(Counter(c.cache_right for c in reports if c.cache_right is not None).items())
        )
    elif num_cycles and job.mode in _SOURCE:
        cycles = {_SOURCE[job.mode]: num_cycles}
    tpots = [takes for answer in answers if (takes := answer.tpot) is not None]
    is_identical = None
    if expected is not None and answers:
        pairs = [(expected.get((session_of(a), a.turn)), a.token_ids) for a in answers]
        if any(wanted is not None and wanted != given for wanted, given in pairs):
            is_identical = False
        elif all(wanted is not None for wanted, _ in pairs):
            is_identical = True
    return Measurement(
        **job._asdict(),
        num_requests=len(answers),
        num_tokens=sum(answer.num_tokens for answer in answers),
        seconds=seconds,
        num_cycles=num_cycles,
        num_accepted=sum(answer.counts.num_accepted for answer in answers),
        cycles=cycles,
        accepted=accepted,
        ttft_ms=_percentiles([answer.ttft for answer in answers]),
        tpot_ms=_percentiles(tpots),
        is_identical=is_identical,
        error=error,
    )


def tell(line: str) -> None:
    """Progress, on stderr. A progress bar stays below it."""
    tqdm.write(line, file=sys.stderr)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float] | None:
    if not seconds:
        return None
    low, middle, high = 1000 * np.percentile(seconds, (50, 90, 99))
    return float(low), float(middle), float(high)


def _begin_of(talk: Conversation) -> Conversation:
    """The first tokens of the first reply."""

    def next_body(answers: Sequence[Answer]) -> dict[str, Any] | None:
        body = None if answers else talk([])
        if body is not None:
            sampling = {**body["sampling_params"], "max_new_tokens": _NUM_COMPILING_TOKENS}
            body = {**body, "sampling_params": sampling}
        return body

    return next_body
