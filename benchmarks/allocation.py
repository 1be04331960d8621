"""What an allocation costs the host, beside the paper's gate.

    python -m benchmarks.allocation [--json FILE]

The drafts are drawn: chains of up to 31 nodes, a model drafter of 4 sizes and 2, 4, 6 or 8 steps,
widths up to 32; texts are of phrases in random order. Times in microseconds, medians over rounds
with the quartiles: `search` is the allocator alone, `propose` the drafter's first half, from the
suffix cache to what is expected of the drafts, `plan` the second, plans for the engine included.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.command import add_json, run, write_rows
from benchmarks.roofline import h100
from sglang_hvd.allocation import DraftOdds, StepAllocator, draft_step_choices, most_tree_nodes
from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, PayoffPredictor, TokenClasses
from sglang_hvd.suffix_cache import SuffixCache

WIDTHS, SIZES, NUM_STEPS = (1, 2, 4, 8, 16, 32), (3, 7, 15, 31), 8
TOPK = 4
POLICIES: tuple[Policy, ...] = ("allocate", "payoff")
_ROUNDS, _CALLS = 31, 200


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What an allocation costs.")
    add_json(parser)
    options = parser.parse_args(arguments)
    rows = []
    names = [
        "search",
        *(f"{half}, {policy}" for policy in POLICIES for half in ("propose", "plan")),
    ]
    print(f"| requests | {' | '.join(names)} |")
    print("|---|" + "---|" * len(names))
    for num_requests in (1, 8, 64):
        times = {
            "search": _time(_search(num_requests)),
        }
        for policy in POLICIES:
            propose, plan = _plan(policy, num_requests)
            times[f"propose, {policy}"], times[f"plan, {policy}"] = _time(propose), _time(plan)
        cells = [f"{low:.1f} / {mid:.1f} / {high:.1f}" for low, mid, high in times.values()]
        print(f"| {num_requests} | {' | '.join(cells)} |", flush=True)
        for name, (low, mid, high) in times.items():
            rows.append(
                {
                    "requests": num_requests,
                    "what": name,
                    "us": mid,
                    "us_quartiles": [low, high],
                }
            )
    write_rows(options.json, rows)
    return 0


def _allocator(num_requests: int) -> StepAllocator:
    steps = draft_step_choices(NUM_STEPS)
    made = StepAllocator(
        h100(),
        widths=WIDTHS,
        model_sizes=SIZES,
        num_steps=steps,
        most_nodes=[most_tree_nodes(TOPK, num) for num in steps],
    )
    for slot in range(num_requests):
        made.start(slot)
    return made


def _search(num_requests: int) -> Callable[[], object]:
    random = np.random.default_rng(0)
    made = _allocator(num_requests)
    hazards = random.random((num_requests, 64)) ** 0.3
    reaches = np.cumprod(random.random((num_requests, len(SIZES), NUM_STEPS)) ** 0.5, axis=2)
    of_all = np.sort(reaches.astype(np.float32), axis=1)
    odds = DraftOdds(
        np.cumprod(hazards, axis=1).astype(np.float32),
        np.tile(np.arange(1, 65, dtype=np.int32), (num_requests, 1)),
        random.integers(0, 32, num_requests).astype(np.int32),
        of_all,
        of_all,
    )
    slots = np.arange(num_requests, dtype=np.int32)
    is_pinned = np.zeros(num_requests, np.bool_)
    return lambda: made.allocate(slots, odds, is_pinned)


def _plan(policy: Policy, num_requests: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The two halves of a plan."""
    random = np.random.default_rng(0)
    config = HvdConfig(policy=policy, predictor=DEFAULT_PREDICTORS["votes"])
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=PayoffPredictor.of_config(config),
        token_classes=TokenClasses.from_strings(["a"] * 1000),
        num_model_steps=NUM_STEPS,
        num_model_nodes=SIZES[-1],
        verify_width=WIDTHS[-1],
        allocator=_allocator(0),
    )
    rids = list(range(num_requests))
    phrases = random.integers(0, 1000, (40, 12))
    for rid in rids:
        text = phrases[random.integers(0, len(phrases), 200)].reshape(-1)
        drafter.start(rid, np.concatenate([text, text[:8]]).astype(np.int32))
    proposals = drafter.propose(rids)
    return lambda: drafter.propose(rids), lambda: drafter.allocate(rids, proposals)


def _time(call: Callable[[], object]) -> tuple[float, float, float]:
    """Microseconds: lower quartile, median, upper quartile over the rounds."""
    of_rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        of_rounds.append(1e6 * (time.perf_counter() - began) / _CALLS)
    low, mid, high = np.quantile(of_rounds, (0.25, 0.5, 0.75)).tolist()
    return low, mid, high


if __name__ == "__main__":
    run(main)
