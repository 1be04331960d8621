"""What branches add to cache drafts, and how often votes off the chain are right.

    python -m benchmarks.experiments.branches --traces DIR --tokenizer FILE [--starts N]
        [--json FILE]

Both tables are about cycle starts of the payoff policy, on sessions that the shipped predictor was
not trained on; the model drafter has two tokens accepted in each of its cycles. The first table
compares drafts of 3, 7, 15 and 31 nodes: accepted tokens of a chain / of a chain with branches
(sglang_hvd/allocation/host_trees.py). The second table is about nodes that leave the chain where
the text leaves it: how many are right, by their share of the votes that are not for the chain.
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks.command import parser_of, run, write_rows
from sglang_hvd.allocation import HostTrees
from sglang_hvd.commands.arguments import add_json, add_texts, count
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import ChainPrediction, HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, AcceptancePredictor
from sglang_hvd.replay.core.recordings import (
    NOTHING_LEFT,
    TraceTokenizer,
    find_recordings,
    session_fingerprints,
)
from sglang_hvd.replay.core.replayed import num_agreeing, outcome_of, right_branch
from sglang_hvd.replay.core.single_cycles import outcome_batch, single_plans
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import DraftBatch, TokenIds

SIZES = (3, 7, 15, 31)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
_MODEL_ACCEPTED, _NUM_STEPS = 2, 8


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    rows, shares = [], []
    for recording in tqdm(find_recordings(options.traces), unit="file", disable=None):
        walk = _Walk(tokenizer, recording.traces(tokenizer))
        accepted = []
        for of_sizes, of_shares in walk.starts(options.starts):
            accepted.append(of_sizes)
            shares += of_shares
        if accepted:
            chain, tree = np.mean(accepted, axis=0).T.tolist()
            rows.append(
                {"file": recording.name, "starts": len(accepted), "chain": chain, "tree": tree}
            )
    if not rows:
        raise ValueError(NOTHING_LEFT)
    print(f"\n{_table_of_sizes(rows)}\n\n{_table_of_shares(np.array(shares).reshape(-1, 2))}")
    write_rows(options.json, rows)
    return 0


def _table_of_sizes(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        pairs = zip(SIZES, row["chain"], row["tree"], strict=True)
        cells = {str(size): f"{chain:.2f} / {tree:.2f}" for size, chain, tree in pairs}
        lines.append({"file": row["file"], "starts": row["starts"], **cells})
    return markdown_table({name: name for name in lines[0]}, lines)


def _table_of_shares(shares: npt.NDArray[np.float64]) -> str:
    """shares: float64[num_nodes, 2], share of the other votes and whether the node was right."""
    lines = []
    for low, high in itertools.pairwise(SHARES):
        of_bin = shares[(shares[:, 0] > low) & (shares[:, 0] <= high)]
        if len(of_bin):
            share, right = of_bin.mean(axis=0).tolist()
            lines.append(
                {"bin": f"{low:g} to {high:g}", "num": len(of_bin), "share": share, "right": right}
            )
    columns = {"bin": "share of the other votes", "num": "nodes", "share": "mean share"}
    return markdown_table({**columns, "right": "right"}, lines)


class _Walk:
    """Serves the sessions of one recording that the predictor was not trained on."""

    def __init__(self, tokenizer: TraceTokenizer, traces: Sequence[Trace]) -> None:
        config = HvdConfig(policy="payoff")
        predictor = AcceptancePredictor.load(DEFAULT_PREDICTORS["votes"])
        self._cache = SuffixCache.of_config(config, background=False)
        self._drafter = HybridDrafter(
            config,
            cache=self._cache,
            predictor=predictor,
            token_classes=tokenizer.token_classes,
            num_model_steps=_NUM_STEPS,
            num_model_nodes=SIZES[-1],
            verify_width=64,
        )
        self._traces = traces
        self._known = predictor.trained_sessions
        self._votes = DraftBatch.of_size(1, SIZES[-1])
        self._trees = HostTrees(1, 64)

    def starts(
        self, max_starts: int
    ) -> Iterator[tuple[list[tuple[int, int]], list[tuple[float, bool]]]]:
        """For each cycle start with a cache draft: accepted tokens of chain and tree by size, and,
        for each node that leaves the chain where the text does, its share of the other votes and
        whether it was right.
        """
        fingerprints, drafter, num = session_fingerprints(self._traces), self._drafter, 0
        for trace in self._traces:
            drafter.start(trace, trace.prompt_ids, namespace=trace.namespace)
            drafter.extend(trace, trace.output_ids[:1])
            position = 1
            if fingerprints[trace.session] in self._known:
                drafter.extend(trace, trace.output_ids[1:])
                position = len(trace.output_ids)
            while position < len(trace.output_ids) and num < max_starts:
                rest = trace.output_ids[position:]
                proposals = drafter.propose([trace])
                chain = proposals.drafts.token_ids[0, : proposals.drafts.num_nodes[0]].copy()
                right = num_agreeing(chain, rest)
                [plan] = single_plans(drafter.choose([trace], proposals))
                outcome = outcome_of(plan, rest, right, _MODEL_ACCEPTED)
                if len(chain):
                    assert isinstance(proposals.predicted, ChainPrediction)
                    self._cache.propose_into(
                        self._votes, [trace], np.full(1, SIZES[-1], np.int32), is_tree=True
                    )
                    survival = proposals.predicted.prediction.acceptance
                    assert survival is not None, "the shipped predictor predicts distributions"
                    self._trees.join(proposals.drafts, survival, self._votes)
                    yield self._accepted(rest, right), self._shares(chain, rest, right)
                    num += 1
                drafter.commit([trace], outcome_batch([outcome]))
                position += len(outcome.token_ids)
            drafter.finish(trace, output_ids=None, keep=True)

    def _accepted(self, rest: TokenIds, num_right: int) -> list[tuple[int, int]]:
        trees, found = self._trees, []
        for size in SIZES:
            taken = min(size, int(trees.num_nodes[0]))
            branch = right_branch(trees.token_ids[0, :taken], trees.parents[0, :taken], rest)
            found.append((min(num_right, size), len(branch)))
        return found

    def _shares(self, chain: TokenIds, rest: TokenIds, num_right: int) -> list[tuple[float, bool]]:
        if num_right in (len(chain), len(rest)):
            return []  # the text does not leave the chain
        votes, num = self._votes, int(self._votes.num_nodes[0])
        on_text = right_branch(votes.token_ids[0, :num], votes.parents[0, :num], rest[:num_right])
        if len(on_text) < num_right:
            return []  # the tree of votes ends before that
        above = on_text[-1] if on_text else -1
        following = np.flatnonzero(votes.parents[0, :num] == above)
        tokens, probs = votes.token_ids[0, following], votes.probs[0, following]
        before = float(votes.probs[0, above]) if on_text else 1.0
        others = before - float(probs[tokens == chain[num_right]].sum())
        if others <= 0:
            return []
        return [
            (min(float(prob) / others, 1.0), bool(token == rest[num_right]))
            for token, prob in zip(tokens, probs, strict=True)
            if token != chain[num_right]
        ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("experiments.branches", "Measure what branches add to cache drafts.")
    add_texts(parser)
    parser.add_argument(
        "--starts",
        type=count,
        default=4000,
        help="maximum of cycle starts of each file (default: %(default)s)",
    )
    add_json(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
