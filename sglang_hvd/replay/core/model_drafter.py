"""Simulates the model drafter, because recordings do not contain its drafts.

Either every cycle has a fixed number of its tokens accepted, or each token is right with some
probability and tokens are accepted up to the first wrong one. Which tokens are right is drawn once
per recording, so every policy meets the same model drafter.

Text that an earlier occurrence predicts is easy for a model as well. With an odds_ratio above 1,
the odds that a token is right are that much higher where the cache would have it right. The overall
probability is chosen so that the mean accepted length over all positions of a recording equals
mean_accepted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import SIZE_EFFECT
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftBatch

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

# By name: the odds that a token is right where the cache has it right, relative to the odds where
# it does not. None: the same number is accepted in every cycle.
ODDS_RATIOS = {"constant": None, "independent": 1.0, "correlated": 8.0}

# By name: accepted tokens per cycle, on average.
STRENGTHS = {"weak": 0.75, "usual": 2.7, "strong": 4.2}

_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """How many tokens of the model drafter's drafts are accepted.

    mean_accepted: accepted tokens on average over all positions, bonus token not counted. The
        paper's three models have 3.2, 2.2 and 0.8 (appendix C).
    odds_ratio: see ODDS_RATIOS. None: exactly mean_accepted tokens in each cycle, which must then
        be a whole number.
    num_steps: maximum of accepted tokens in a cycle; the paper's is 8 (table 7).
    num_nodes: nodes of the full tree, root not counted.
    size_effect: log odds that each doubling of the nodes adds to a token.
    spread: standard deviation between sessions in log odds: a drafter is better at some sessions.
    seed: seed of the draw.

    Raises ValueError for a mean_accepted that is impossible.
    """

    mean_accepted: float = 2.0
    odds_ratio: float | None = None
    num_steps: int = 8
    num_nodes: int = 31
    size_effect: float = SIZE_EFFECT
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mean_accepted < self.num_steps:
            raise ValueError(
                f"a model drafter of {self.num_steps} steps has at least 0 and fewer than "
                f"{self.num_steps} tokens accepted, got {self.mean_accepted:g}: lower "
                f"--model-accepted"
            )
        if self.odds_ratio is None and self.mean_accepted != int(self.mean_accepted):
            raise ValueError(
                f"{self.mean_accepted:g} accepted tokens in every cycle is not a whole number: "
                f"give one, or let the number vary with --model-drafter independent"
            )

    def accepted_lens(self, traces: Sequence[Trace], config: HvdConfig) -> list[Int32]:
        """Accepted tokens of the cycle that starts at each token of each output: int32[num_output].

        traces: all traces of a recording, in order.
        config: configuration of the cache that odds_ratio refers to.
        """
        return self.accepted_by_size(traces, config, [self.num_nodes])[self.num_nodes]

    def accepted_by_size(
        self,
        traces: Sequence[Trace],
        config: HvdConfig,
        sizes: Sequence[int],
        copied: Callable[[], Sequence[Bool]] | None = None,
    ) -> dict[int, list[Int32]]:
        """accepted_lens by the tree's number of nodes, root not counted.

        copied: returns copied_tokens(traces, config), for callers that keep them: they take long.
        """
        if self.odds_ratio is None:
            num = int(self.mean_accepted)
            return {
                size: [np.full(len(t.output_ids), min(num, size), np.int32) for t in traces]
                for size in sizes
            }
        lengths = [len(trace.output_ids) for trace in traces]
        if not sum(lengths):
            return {size: [np.zeros(0, np.int32) for _ in traces] for size in sizes}
        own = [self.spread * _of_session(trace.session, self.seed) for trace in traces]
        easier = np.repeat(own, lengths)
        if self.odds_ratio != 1:
            is_copied = copied_tokens(traces, config) if copied is None else copied()
            easier += np.log(self.odds_ratio) * np.concatenate(is_copied)
        draws = np.concatenate([_draws(trace, self.seed) for trace in traces])
        # Bisect for the log odds that give mean_accepted: the mean grows with the log odds.
        low, high = -30.0, 30.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self._accepted(draws, easier, lengths, middle).mean() > self.mean_accepted:
                high = middle
            else:
                low = middle
        ends = np.cumsum(lengths)[:-1]
        by_size = {}
        for size in sizes:
            log_odds = low + self.size_effect * np.log2(size / self.num_nodes)
            accepted = self._accepted(draws, easier, lengths, log_odds)
            by_size[size] = np.split(np.minimum(accepted, np.int32(size)), ends)
        return by_size

    def _accepted(
        self,
        draws: Float64,
        easier: Float64,
        lengths: Sequence[int],
        log_odds: float,
    ) -> Int32:
        is_right = draws < 1 / (1 + np.exp(-(log_odds + easier)))
        accepted = np.zeros(len(draws), np.int32)
        ends = np.repeat(np.cumsum(lengths), lengths)
        positions = np.arange(len(draws))
        goes_on = np.ones(len(draws), np.bool_)
        for step in range(self.num_steps):
            place = positions + step
            goes_on &= (place < ends) & is_right[np.minimum(place, len(draws) - 1)]
            accepted += goes_on
        return accepted


def copied_tokens(traces: Sequence[Trace], config: HvdConfig) -> list[Bool]:
    """Whether the cache, knowing all tokens before it, would have drafted each output token:
    bool[num_output] for each trace."""
    cache = SuffixCache.of_config(config, background=False)
    draft, one = DraftBatch.of_size(1, 1), np.ones(1, np.int32)
    copied = []
    for rid, trace in enumerate(traces):
        of_trace = np.zeros(len(trace.output_ids), np.bool_)
        cache.start(rid, trace.prompt_ids, trace.namespace)
        for place, token in enumerate(trace.output_ids):
            cache.propose_into(draft, [rid], one)
            of_trace[place] = draft.num_nodes[0] > 0 and draft.token_ids[0, 0] == token
            cache.commit([rid], [trace.output_ids[place : place + 1]])
        cache.finish(rid, keep=True)
        copied.append(of_trace)
    return copied


def _draws(trace: Trace, seed: int) -> npt.NDArray[np.float64]:
    """A number between 0 and 1 for each output token, the same in every replay of this text."""
    text = np.frombuffer(trace.output_ids.tobytes(), np.uint32)
    entropy = [seed] if seed else []
    generator = np.random.default_rng([*entropy, len(trace.prompt_ids), *text.tolist()])
    return generator.random(len(text))


def _of_session(session: str, seed: int) -> float:
    """A standard normal number, the same for all turns of a session."""
    return float(np.random.default_rng([seed, *session.encode()]).normal())
