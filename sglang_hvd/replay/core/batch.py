"""Replays recorded texts as a server under load serves them: a full batch all the time.

The recording is the target model and says which draft tokens are accepted. The model drafter is
simulated (model_drafter.py), and times come from a table of costs. Each slot of the batch goes
through the recording by itself, in a namespace that holds the texts before its own. At the end of
the recording it starts over in a new namespace, so no session sees the outputs of its own
repetition.

The slots start at places that are spread over all tokens of the recording, as if the server had
been running for a while. So the batch holds different texts from the first step on, and all
policies, which differ in speed, start with the same texts. A few slots see little of a long
recording, so they are moved to other places several times.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation import HostTrees
from sglang_hvd.drafter import HybridDrafter, Proposals, TreePrediction
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.replay.core.replayed import num_agreeing, outcome_of, right_branch
from sglang_hvd.replay.core.single_cycles import outcome_batch, single_plans
from sglang_hvd.replay.core.totals import CycleTotals, PlanCosts, count_step
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftPlans, TokenIds

Int32 = npt.NDArray[np.int32]

# The drafts whose accepted length an oracle knows.
ORACLE = frozenset({"cache", "model"})

# The golden ratio: the fractional parts of its multiples are spread evenly, however many there are.
_SPREAD = (5**0.5 - 1) / 2

# Minimum of places at which serving starts, if each start still has so many tokens to measure.
_MIN_PLACES = 8
_MIN_TOKENS = 256

# Tokens of each slot that are not counted: a request that starts in the middle of a text has no
# history yet.
_WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTrace:
    """A trace and the acceptance that was drawn for the model drafter.

    accepted: by the draft's size in nodes, int32[num_output]: accepted tokens of the cycle that
        starts at each output token.
    """

    trace: Trace
    accepted: Mapping[int, Int32]

    @property
    def num_decoded(self) -> int:
        """Output tokens after the first one, which the prefill generates."""
        return max(len(self.trace.output_ids) - 1, 0)


@dataclass(slots=True, eq=False)
class _Running:
    """The request that runs in one slot of the batch.

    later: the requests that follow in this slot, with their namespaces.
    """

    drawn: DrawnTrace
    namespace: str
    later: Iterator[tuple[DrawnTrace, str]]
    position: int = 1
    num_missing: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.drawn.trace.prompt_ids) + self.position


class BatchReplay:
    """A drafter, and a simulated engine that runs its plans.

    knows: sources whose drafts get their true accepted length instead of a predicted one; ORACLE:
        both sources. Where the prediction for another draft depends on a known draft, it uses the
        predicted length of the known draft.
    picks_nodes: only the right nodes of known cache drafts are verified. Otherwise the first nodes
        are verified, up to the last right one.
    model_sizes, num_model_steps: sizes and steps of the model drafter's drafts; needed only if
        these are known.
    runs_ahead: after a step without drafts, the next step is launched before the tokens are known,
        so its drafts are known one step late (docs/experiments/allocation.md, "Running ahead"). The
        drafter's allocator must run ahead as well. Prefills take no time here and end no run.
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        costs: PlanCosts,
        *,
        knows: Collection[str] = (),
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
        """Serves sessions until num_tokens tokens were generated.

        Each time that the slots move to new places, a warm-up is served first and not counted. All
        warm-ups together have a quarter of num_tokens, and each has at least 64 tokens per slot.

        sessions: the turns of each session, in order.
        seed: different seeds start at different places of the texts.
        earlier: traces that each namespace holds from the beginning.
        """
        turns = [drawn for of_session in sessions for drawn in of_session if drawn.num_decoded]
        if not turns:
            return CycleTotals()
        num_starts = min(-(-_MIN_PLACES // batch_size), max(num_tokens // _MIN_TOKENS, 1))
        num_warm = max(num_tokens // (4 * num_starts), _WARM_UP_TOKENS * batch_size)
        places = itertools.count(seed * num_starts * batch_size)
        totals = CycleTotals()
        for start in range(1, num_starts + 1):
            shares = (next(places) * _SPREAD % 1 for _ in range(batch_size))
            running = [self._started_at(share, turns, earlier) for share in shares]
            self._is_ahead, self._num_plain = False, 0
            num_left = num_warm
            while totals.num_tokens < num_tokens * start / num_starts:
                of_step = self._step(running)
                if num_left > 0:
                    num_left -= of_step.num_tokens
                else:
                    totals += of_step
            for request in running:
                self._drafter.finish(request, output_ids=None, keep=False)
        return totals

    def _started_at(
        self, share: float, turns: Sequence[DrawnTrace], earlier: Sequence[Trace]
    ) -> _Running:
        """A request at the place where this share of all tokens has been generated. The cache knows
        the turns before it, and the model drafter's KV cache is complete."""
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
        """The turns from the first given one on, over and over, with the namespace of each pass."""
        while True:
            namespace = str(self._num_namespaces)
            self._num_namespaces += 1
            for trace in (*earlier, *(drawn.trace for drawn in turns[:first])):
                # Only outputs are shared, so the prompt can be empty.
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
        if "cache" in self._knows:
            self._label_cache(proposals, running, num_right)
        if "model" in self._knows:
            self._label_model(proposals, running)
        num_context = sum(request.num_tokens for request in running)
        num_missing = [request.num_missing for request in running]
        is_ahead = self._is_ahead and not self._costs.ends_run(num_missing)
        if is_ahead:
            self._is_ahead = not self._drafter.choose_launched(running)
            plans = single_plans(DraftPlans.plain(len(running)))
        else:
            plans = single_plans(self._drafter.choose(running, proposals))
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
        self._drafter.commit(running, outcome_batch(outcomes))
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

    def _label_cache(
        self, proposals: Proposals, running: Sequence[_Running], num_right: Sequence[int]
    ) -> None:
        """Writes what is right of the cache drafts in place of what is predicted."""
        predicted = proposals.predicted
        assert isinstance(predicted, TreePrediction), "only policy allocate can know drafts"
        for row, request in enumerate(running):
            rest = request.drawn.trace.output_ids[request.position :]
            _label(predicted.trees, row, rest, picks_nodes=self._picks_nodes)
        right = np.array(num_right)
        predicted.prediction.accepted_lens[:] = right
        predicted.chain_acceptance[:] = right[:, None] > np.arange(MAX_DRAFT_LEN)

    def _label_model(self, proposals: Proposals, running: Sequence[_Running]) -> None:
        """The same for the model drafter's drafts."""
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
        predicted = proposals.predicted
        assert isinstance(predicted, TreePrediction), "only policy allocate can know drafts"
        predicted.model_acceptance.of_all[:] = reaches
        predicted.model_acceptance.if_cache_right[:] = reaches


def _label(trees: HostTrees, row: int, text: TokenIds, *, picks_nodes: bool) -> None:
    """Gives the right nodes of a draft probability 1 and the others 0.

    picks_nodes: the right nodes also move before the others.
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
