"""The model drafter in replay: recordings do not hold what it would have drafted.

Either it has a fixed number of tokens accepted in each cycle, or it has each token of the text
right with some probability and is accepted up to the first that it has wrong. Which tokens those
are is drawn once for a recording, so every policy meets the same model drafter.

Text that an earlier occurrence predicts is easy for a model as well. With odds_ratio above 1 a
token is that much more likely, in odds, to be right where the cache would have it right. The
overall probability is chosen so that the mean accepted length over all positions of a recording is
the strength that was asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import SIZE_EFFECT
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

# By name: odds that a token is right where the cache has it right, over those where it has not.
# None: every cycle has the same.
ODDS_RATIOS = {"constant": None, "independent": 1.0, "correlated": 8.0}

# By name: mean accepted tokens.
STRENGTHS = {"weak": 0.75, "usual": 2.7, "strong": 4.2}

_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """What each cycle of the model drafter has accepted.

    mean_accepted: tokens in the mean over all positions, bonus token not counted. 2 lies between
        those with the paper's three models (appendix C: 3.2, 2.2 and 0.8).
    odds_ratio: None: exactly mean_accepted tokens in each cycle, which is then a whole number.
    num_steps: the most tokens that are accepted in a cycle; 8 is the paper's (table 7).
    num_nodes: of the full tree, root not counted.
    size_effect: log odds of a token that each doubling of the nodes adds.
    spread: standard deviation between sessions, in log odds: a drafter knows some better.
    seed: of the draw.

    Raises ValueError for a strength that cannot be.
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
                f"a model drafter of {self.num_steps} steps has 0 to less than {self.num_steps} "
                f"tokens accepted, got {self.mean_accepted:g}: lower --model-accepted"
            )
        if self.odds_ratio is None and self.mean_accepted != int(self.mean_accepted):
            raise ValueError(
                f"{self.mean_accepted:g} tokens in every cycle cannot be: give a whole number, or "
                f"let them vary (--model-drafter independent)"
            )

    def accepted_lens(self, traces: Sequence[Trace], config: HvdConfig) -> list[Int32]:
        """Accepted tokens of the cycle that starts at each token of each output: int32[num_output].

        traces: a recording, in order.
        config: of the cache that odds_ratio is about.
        """
        return self.accepted_by_size(traces, config, [self.num_nodes])[self.num_nodes]

    def accepted_by_size(
        self,
        traces: Sequence[Trace],
        config: HvdConfig,
        sizes: Sequence[int],
        copied: Callable[[], Sequence[Bool]] | None = None,
    ) -> dict[int, list[Int32]]:
        """accepted_lens for trees of each of these numbers of nodes, root not counted.

        copied: gives copied_tokens(traces, config), which take long, where they are kept.
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
        # The highest log odds with at most the strength: the mean grows with them.
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
    """Whether the cache would have had each output token right, knowing all before it:
    bool[num_output] of each trace."""
    cache = SuffixCache.of_config(config, background=False)
    copied = []
    for rid, trace in enumerate(traces):
        of_trace = np.zeros(len(trace.output_ids), np.bool_)
        cache.start(rid, trace.prompt_ids, trace.namespace)
        for place, token in enumerate(trace.output_ids):
            [draft] = cache.propose([rid], 1)
            of_trace[place] = draft is not None and draft.token_ids[0] == token
            cache.commit([rid], [trace.output_ids[place : place + 1]])
        cache.finish(rid, keep=True)
        copied.append(of_trace)
    return copied


def _draws(trace: Trace, seed: int) -> npt.NDArray[np.float64]:
    """Uniform in 0..1 for each output token, the same in every replay of this text."""
    text = np.frombuffer(trace.output_ids.tobytes(), np.uint32)
    entropy = [seed] if seed else []
    generator = np.random.default_rng([*entropy, len(trace.prompt_ids), *text.tolist()])
    return generator.random(len(text))


def _of_session(session: str, seed: int) -> float:
    """Standard normal, the same for all turns of a session."""
    return float(np.random.default_rng([seed, *session.encode()]).normal())
