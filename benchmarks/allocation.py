"""Host time of a step under policy allocate, compared with the paper's gate (policy payoff).

    python -m benchmarks.allocation [--json FILE]

The model drafter has 4 sizes and 2, 4, 6 or 8 steps; widths go up to 32. Times are in microseconds:
lower quartile, median, upper quartile. `search` is the allocator alone, called repeatedly with the
same random drafts, chains of up to 31 nodes. The other parts run in turn, as in a server, on texts
of phrases in random order. `propose` asks the suffix cache for drafts and predicts their
acceptance, `plan` chooses among them and makes the engine's plans, and `commit` records the few
tokens that the step accepted. `postpone` is the work of a postponed draft-extend in one step: three
tokens of each request are kept, and those of all requests are taken.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.command import parser_of, run, silence_servers, write_rows
from benchmarks.roofline import h100
from sglang_hvd.allocation import (
    DrafterChoices,
    PredictedDrafts,
    StepAllocator,
    draft_step_choices,
    max_tree_nodes,
)
from sglang_hvd.commands.arguments import add_json
from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import DEFAULT_PREDICTORS, AcceptancePredictor, TokenClasses
from sglang_hvd.plugin.device.host_transfer import all_to_device
from sglang_hvd.plugin.engine.missing_tokens import MissingTokens
from sglang_hvd.replay.core.replayed import num_agreeing, outcome_of
from sglang_hvd.replay.core.single_cycles import single_plans
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.suffix_cache.token_ids import padded
from sglang_hvd.types import VerifyOutcomes

WIDTHS, SIZES, NUM_STEPS = (1, 2, 4, 8, 16, 32), (3, 7, 15, 31), 8
TOPK = 4
POLICIES: tuple[Policy, ...] = ("allocate", "payoff")
_ROUNDS, _CALLS = 31, 200
_STEPS, _FIRST_STEPS = 400, 50  # the first steps are not counted
_PHRASES, _PHRASE_LEN = 40, 12
_Quartiles = tuple[float, float, float]
_PARTS = ("propose", "plan", "commit")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("allocation", "Measure the host time of a step.")
    add_json(parser)
    options = parser.parse_args(arguments)
    silence_servers()
    rows, lines = [], []
    names = ["search", "postpone", *(f"{part}, {policy}" for policy in POLICIES for part in _PARTS)]
    for num_requests in (1, 8, 64, 128, 256):
        times = {
            "search": _time(_search(num_requests)),
            "postpone": _time(_postpone(num_requests)),
        }
        for policy in POLICIES:
            for part, of_part in zip(_PARTS, _steps(policy, num_requests), strict=True):
                times[f"{part}, {policy}"] = of_part
        line: dict[str, object] = {"requests": num_requests}
        for name, (low, mid, high) in times.items():
            line[name] = f"{low:.1f} / {mid:.1f} / {high:.1f}"
            rows.append(
                {
                    "requests": num_requests,
                    "what": name,
                    "us": mid,
                    "us_quartiles": [low, high],
                }
            )
        lines.append(line)
    print(markdown_table({name: name for name in ("requests", *names)}, lines))
    write_rows(options.json, rows)
    return 0


def _allocator(num_requests: int) -> StepAllocator:
    steps = draft_step_choices(NUM_STEPS)
    made = StepAllocator(
        h100(),
        widths=WIDTHS,
        drafters=[DrafterChoices(SIZES, steps, tuple(max_tree_nodes(TOPK, num) for num in steps))],
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
    predicted = PredictedDrafts(
        np.cumprod(hazards, axis=1).astype(np.float32),
        np.tile(np.arange(1, 65, dtype=np.int32), (num_requests, 1)),
        random.integers(0, 32, num_requests).astype(np.int32),
        of_all,
        of_all,
    )
    slots = np.arange(num_requests, dtype=np.int32)
    return lambda: made.allocate(slots, predicted)


def _postpone(num_requests: int) -> Callable[[], object]:
    width, num_new = 8, 3
    missing = MissingTokens(num_requests * width)
    slots = np.arange(num_requests)
    cached_lens = np.full(num_requests, 100)
    token_ids = torch.zeros(num_requests * width, dtype=torch.int32)
    hidden_states = torch.zeros(num_requests * width, 64)

    def step() -> None:
        missing.keep(slots, cached_lens, token_ids, hidden_states)
        settled = missing.settle(slots, cached_lens + num_new)
        sent = all_to_device({"settled": settled, "taken": missing.take(slots)}, "cpu")
        missing.store(sent["settled"])
        missing.read(sent["taken"])

    return step


def _steps(policy: Policy, num_requests: int) -> list[_Quartiles]:
    """Times of the parts of a step, in the order of _PARTS."""
    random = np.random.default_rng(0)
    config = HvdConfig(policy=policy, predictor=DEFAULT_PREDICTORS["votes"])
    drafter = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=AcceptancePredictor.of_config(config),
        token_classes=TokenClasses.from_strings(["a"] * 1000),
        num_model_steps=NUM_STEPS,
        num_model_nodes=SIZES[-1],
        verify_width=WIDTHS[-1],
        allocator=_allocator(0),
    )
    rids = list(range(num_requests))
    phrases = random.integers(0, 1000, (_PHRASES, _PHRASE_LEN))
    shape = num_requests, 200 + _STEPS * WIDTHS[-1] // _PHRASE_LEN
    texts = phrases[random.integers(0, _PHRASES, shape)].reshape(num_requests, -1).astype(np.int32)
    begins = np.full(num_requests, 200 * _PHRASE_LEN)
    for rid in rids:
        drafter.start(rid, texts[rid, : begins[rid]])
    seconds = []
    for _ in range(_STEPS):
        times = [time.perf_counter()]
        proposals = drafter.propose(rids)
        times.append(time.perf_counter())
        plans = drafter.choose(rids, proposals)
        times.append(time.perf_counter())
        rests = [texts[rid, begins[rid] :] for rid in rids]
        drafts = proposals.drafts
        chains = zip(drafts.token_ids, drafts.num_nodes.tolist(), strict=True)
        rights = [num_agreeing(c[:n], rest) for (c, n), rest in zip(chains, rests, strict=False)]
        # Two tokens of the model drafter's draft are accepted, if it is verified.
        verified = [
            outcome_of(plan, rest, right, 2)
            for plan, rest, right in zip(single_plans(plans), rests, rights, strict=True)
        ]
        token_ids, lengths = padded([outcome.token_ids for outcome in verified])
        outcomes = VerifyOutcomes(token_ids, lengths, lengths - 1, np.minimum(lengths - 1, 2))
        begins += lengths
        times.append(time.perf_counter())
        drafter.commit(rids, outcomes)
        times.append(time.perf_counter())
        seconds.append((times[1] - times[0], times[2] - times[1], times[4] - times[3]))
    low, mid, high = 1e6 * np.quantile(seconds[_FIRST_STEPS:], (0.25, 0.5, 0.75), axis=0)
    return list(zip(low.tolist(), mid.tolist(), high.tolist(), strict=True))


def _time(call: Callable[[], object]) -> _Quartiles:
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
