"""Replays recorded texts as a server under load serves them: N at a time, without end.

The recording is the target model and says which draft tokens it accepts; the model drafter is drawn
(model_drafter.py) and time comes from a table of costs. Each place of the batch goes through the
recording by itself, in a namespace that holds what was recorded before: at its end it begins again,
in another namespace, so no session meets the outputs of its own repetition.

The places begin spread over all tokens of the recording, as if the server had been running for a
while. So a batch is full of unlike texts from the first step on, and all policies, which go at
different speeds, begin with the same texts. Few places see little of a long recording: they are
taken up elsewhere some times meanwhile.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import CacheTrees
from sglang_hvd.drafter import AllocationForecast, HybridDrafter, Proposals
from sglang_hvd.payoff import ModelAcceptance, Prediction
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.replay.acceptance import num_agreeing, outcome_of, right_branch
from sglang_hvd.replay.plan_costs import PlanCosts
from sglang_hvd.replay.totals import CycleTotals, count_step
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftPlans, DraftSource, TokenIds

Int32 = npt.NDArray[np.int32]

# The drafts whose payoff an oracle knows.
ORACLE = frozenset({DraftSource.CACHE, DraftSource.MODEL})

# The golden section: the fractions of its multiples are spread evenly, however many they are.
_SPREAD = (5**0.5 - 1) / 2

# Where the texts are taken up, at least, if that leaves so many tokens for each time.
_FEWEST_PLACES = 8
_FEWEST_TOKENS = 256

# Tokens for each place of the batch that are not counted: with them begins the history of a request
# that is taken up in the middle of a text.
_WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTrace:
    """A trace and what the model drafter has accepted in it.

    accepted: by size of the model drafter's draft in nodes, int32[num_output]: accepted tokens of a
        cycle that starts at each token of the output.
    """

    trace: Trace
    accepted: Mapping[int, Int32]

    @property
    def num_decoded(self) -> int:
        """Tokens behind the first one, which the prefill yields."""
        return max(len(self.trace.output_ids) - 1, 0)


@dataclass(slots=True, eq=False)
class _Running:
    """One request that is being served. later: those that follow it in its place of the batch, with
    their namespaces."""

    drawn: DrawnTrace
    namespace: str
    later: Iterator[tuple[DrawnTrace, str]]
    position: int = 1
    num_missing: int = 0

    @property
    def num_tokens(self) -> int:
        """Of prompt and output so far."""
        return len(self.drawn.trace.prompt_ids) + self.position


class BatchReplay:
    """A drafter, and the engine that its plans run on.

    knows: drafters whose drafts are expected to bring exactly what the recording accepts of them;
        ORACLE: both. The payoffs of other drafts are predicted, and where that takes payoffs of the
        known drafts, it takes predicted ones.
    picks_nodes: of known cache drafts the right nodes alone are verified; else as many of the first
        nodes as it takes to have the right ones.
    model_sizes, num_model_steps: sizes and steps of the model drafter's drafts, needed only where
        these are known.
    runs_ahead: behind a step without drafts the next one is launched before its tokens are known,
        and what it wants is known one step late (docs/allocation.md, "Waiting for tokens"). The
        drafter's allocator has to run ahead, too. Prefills take no time here and end no run.
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        costs: PlanCosts,
        *,
        knows: Collection[DraftSource] = (),
        picks_nodes: bool = False,
        model_sizes: Sequence[int] = (),
        num_model_steps: int = 1,
        runs_ahead: bool = False,
    ) -> None:
        self._runs_ahead = runs_ahead
        self._is_ahead = False  # the next step
        self._num_namespaces = 0
        self._num_plain = 0  # see DraftExtend
        self._drafter = drafter
        self._costs = costs
        self._knows, self._picks_nodes = frozenset(knows), picks_nodes
        self._model_sizes, self._num_model_steps = tuple(model_sizes), num_model_steps

    def serve(
        self,
        sessions: Sequence[Sequence[DrawnTrace]],
        *,
        earlier: Sequence[Trace] = (),
        batch_size: int,
        num_tokens: int,
        seed: int = 0,
    ) -> CycleTotals:
        """Serves sessions until num_tokens tokens were generated. Warm-ups are not counted: a
        quarter as many tokens, in even parts before each time that the places are taken up, or 64
        times the batch size each time if that is more.

        sessions: the turns of each, in order.
        seed: each begins at other places of the texts.
        earlier: traces that each namespace holds from the beginning.
        """
        turns = [drawn for of_session in sessions for drawn in of_session if drawn.num_decoded]
        if not turns:
            return CycleTotals()
        num_takes = min(-(-_FEWEST_PLACES // batch_size), max(num_tokens // _FEWEST_TOKENS, 1))
        num_warm = max(num_tokens // (4 * num_takes), _WARM_UP_TOKENS * batch_size)
        places = itertools.count(seed * num_takes * batch_size)
        totals = CycleTotals()
        for take in range(1, num_takes + 1):
            shares = (next(places) * _SPREAD % 1 for _ in range(batch_size))
            running = [self._taken_up(turns, earlier, share) for share in shares]
            self._is_ahead, self._num_plain = False, 0
            num_left = num_warm
            while totals.num_tokens < num_tokens * take / num_takes:
                of_step = self._step(running)
                if num_left > 0:
                    num_left -= of_step.num_tokens
                else:
                    totals += of_step
            for request in running:
                self._drafter.finish(request, output_ids=None, keep=False)
        return totals

    def _taken_up(
        self, turns: Sequence[DrawnTrace], earlier: Sequence[Trace], share: float
    ) -> _Running:
        """A request that has come to where this share of all tokens has been generated: the cache
        knows the turns before it, and the model drafter lacks nothing."""
        ends = np.cumsum([drawn.num_decoded for drawn in turns])
        at = int(share * ends[-1])
        first = int(np.searchsorted(ends, at, side="right"))
        later = self._in_turn(turns, earlier, first)
        request = _Running(*next(later), later)
        self._start(request)
        request.position += at - int(ends[first] - turns[first].num_decoded)
        output_ids = request.drawn.trace.output_ids
        self._drafter.extend(request, output_ids[1 : request.position])
        return request

    def _in_turn(
        self, turns: Sequence[DrawnTrace], earlier: Sequence[Trace], first: int
    ) -> Iterator[tuple[DrawnTrace, str]]:
        """The turns from this one on, over and over, and the namespace of each repetition."""
        while True:
            namespace = str(self._num_namespaces)
            self._num_namespaces += 1
            for trace in (*earlier, *(drawn.trace for drawn in turns[:first])):
                # Outputs alone are shared.
                self._drafter.start(trace, (), namespace=f"{namespace}/{trace.namespace}")
                self._drafter.finish(trace, output_ids=trace.output_ids, keep=True)
            yield from ((drawn, namespace) for drawn in turns[first:])
            first = 0

    def _start(self, request: _Running) -> None:
        trace = request.drawn.trace
        request.position, request.num_missing = 1, 0
        self._drafter.start(
            request, trace.prompt_ids, namespace=f"{request.namespace}/{trace.namespace}"
        )
        self._drafter.extend(request, trace.output_ids[:1])

    def _start_next(self, request: _Running) -> None:
        self._drafter.finish(request, output_ids=None, keep=True)
        request.drawn, request.namespace = next(request.later)
        self._start(request)

    def _step(self, running: Sequence[_Running]) -> CycleTotals:
        proposals = self._drafter.propose(running)
        num_right = [
            num_agreeing(
                proposals.drafts.token_ids[row, : proposals.drafts.num_nodes[row]],
                request.drawn.trace.output_ids[request.position :],
            )
            for row, request in enumerate(running)
        ]
        if DraftSource.CACHE in self._knows:
            proposals = self._with_cache_labels(proposals, running, num_right)
        if DraftSource.MODEL in self._knows:
            proposals = self._with_model_labels(proposals, running)
        num_context = sum(request.num_tokens for request in running)
        num_missing = [request.num_missing for request in running]
        is_ahead = self._is_ahead and not self._costs.ends_run(num_missing)
        if is_ahead:
            self._is_ahead = not self._drafter.allocate_launched(running, proposals)
            plans = list(DraftPlans.plain(len(running)))
        else:
            plans = list(self._drafter.allocate(running, proposals))
            has_drafts = any(plan.num_nodes for plan in plans)
            self._is_ahead = self._runs_ahead and not has_drafts
        outcomes = []
        for request, plan, of_cache in zip(running, plans, num_right, strict=True):
            of_model = 0
            if plan.num_model_nodes:
                accepted = request.drawn.accepted[plan.num_model_nodes][request.position]
                of_model = min(int(accepted), plan.num_model_steps)
            rest = request.drawn.trace.output_ids[request.position :]
            outcomes.append(outcome_of(plan, rest, of_cache, of_model))
        self._drafter.commit(running, outcomes)
        num_plain = self._num_plain = self._costs.num_plain(plans, self._num_plain)
        of_step = count_step(
            plans,
            outcomes,
            self._costs,
            num_missing,
            num_plain,
            num_context=num_context,
            is_ahead=is_ahead,
        )
        num_tokens = [len(outcome.token_ids) for outcome in outcomes]
        num_missing = self._costs.missing_after(plans, num_missing, num_tokens, num_plain)
        for request, num_new, missing in zip(running, num_tokens, num_missing, strict=True):
            request.position += num_new
            request.num_missing = missing
            if request.position == len(request.drawn.trace.output_ids):
                self._start_next(request)
        return of_step

    def _with_cache_labels(
        self, proposals: Proposals, running: Sequence[_Running], num_right: Sequence[int]
    ) -> Proposals:
        right = np.array(num_right)[:, None] > np.arange(MAX_DRAFT_LEN)
        forecast = proposals.forecast
        assert isinstance(forecast, AllocationForecast), "who knows drafts allocates"
        for row, request in enumerate(running):
            rest = request.drawn.trace.output_ids[request.position :]
            _label(forecast.trees, row, rest, picks_nodes=self._picks_nodes)
        prediction = Prediction(np.array(num_right, np.float32), right.astype(np.float32))
        return replace(proposals, forecast=replace(forecast, prediction=prediction))

    def _with_model_labels(self, proposals: Proposals, running: Sequence[_Running]) -> Proposals:
        steps = np.arange(self._num_model_steps)
        reaches = np.array(
            [
                [
                    request.drawn.accepted[size][request.position] > steps
                    for size in self._model_sizes
                ]
                for request in running
            ],
            np.float32,
        )
        forecast = proposals.forecast
        assert isinstance(forecast, AllocationForecast), "who knows drafts allocates"
        forecast = replace(forecast, model_reaches=ModelAcceptance(reaches, reaches))
        return replace(proposals, forecast=forecast)


def _label(trees: CacheTrees, row: int, text: TokenIds, *, picks_nodes: bool) -> None:
    """Makes the nodes of a draft that are right certain and the others impossible.

    picks_nodes: puts the right ones before the others.
    """
    num = int(trees.num_nodes[row])
    right = right_branch(trees.token_ids[row, :num], trees.parents[row, :num], text)
    if not picks_nodes:
        trees.probs[row, :num] = 0
        trees.probs[row, right] = 1
        return
    order = np.array(right + [node for node in range(num) if node not in right], np.int32)
    rank = np.empty(num + 1, np.int32)
    rank[order], rank[-1] = np.arange(num), -1
    for values in (trees.token_ids, trees.depths, trees.is_chain):
        values[row, :num] = values[row, order]
    trees.parents[row, :num] = rank[trees.parents[row, order]]
    trees.probs[row, :num] = np.arange(num) < len(right)
