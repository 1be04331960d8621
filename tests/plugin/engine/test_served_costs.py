"""Step costs learned while serving, alone and on every rank of a tensor-parallel group."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_hvd.allocation import DrafterChoices, PredictedDrafts, StepAllocator
from sglang_hvd.costs import StepCosts
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.engine.served_costs import ServedCosts
from sglang_hvd.step_clock import StepClock

WIDTHS, SIZES, NUM_STEPS = (1, 4, 8, 16), (3, 7), 3


def allocator(costs: StepCosts | None = None) -> StepAllocator:
    """costs: a table that was timed before the first step; None: the assumed one."""
    made = StepAllocator(
        costs or StepCosts.assumed(WIDTHS),
        widths=WIDTHS,
        drafters=[DrafterChoices(SIZES, (NUM_STEPS,))],
    )
    for slot in range(8):
        made.start(slot)
    return made


def clock(
    *, fixed: float, per_node: float, noise: float, seed: int, of_context: float = 0.0
) -> Callable[..., float]:
    """A machine on which a verification takes fixed + per_node n w milliseconds, and of_context
    more for each token of context, in seconds."""
    random = np.random.default_rng(seed)

    def duration(num_requests: int, width: int, num_context: int = 0) -> float:
        exact = fixed + per_node * num_requests * width + of_context * num_context
        return exact * (1 + noise * float(random.random())) / 1000

    return duration


class Stopwatch:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def serve(
    made: StepAllocator,
    costs: ServedCosts,
    watch: Stopwatch,
    duration: Callable[..., float],
    num_steps: int,
) -> str:
    """Steps of drafts that are drawn alike everywhere; returns a digest of all decisions."""
    random, contexts = np.random.default_rng(5), np.random.default_rng(6)
    digest = hashlib.sha256()
    kinds = []
    for n in range(1, 9):
        for _ in range(4):
            hazards = random.random((n, 16)).astype(np.float32) ** 0.3
            reaches = np.cumprod(random.random((n, len(SIZES), NUM_STEPS)), axis=2)
            of_all = np.sort(reaches.astype(np.float32), axis=1)
            kinds.append(
                PredictedDrafts(
                    np.cumprod(hazards, axis=1),
                    np.tile(np.arange(1, 17, dtype=np.int32), (n, 1)),
                    random.integers(0, 17, n).astype(np.int32),
                    of_all,
                    of_all,
                )
            )
    slots = np.arange(8, dtype=np.int32)
    for odds in itertools.islice(itertools.cycle(kinds), num_steps):
        n = len(odds.num_nodes)
        costs.begin_step(n)
        num_context = int(contexts.integers(50, 5000, n).sum())
        found = made.allocate(slots[:n], odds, num_context=num_context)
        digest.update(found.num_host.tobytes() + found.num_model.tobytes())
        digest.update(bytes([found.width]))
        with costs.time_draft(int((found.num_model > 0).sum()), NUM_STEPS):
            watch.seconds += duration(n, 2)
        with costs.time_verify(n, found.width, num_context=num_context):
            watch.seconds += duration(n, found.width, num_context)
        with costs.time_extend(n, found.width):
            watch.seconds += duration(n, 1) / 10
        costs.end_step()
        made.observe(slots[:n], np.minimum(found.num_host, 3) + np.int32(1))
    return digest.hexdigest()


def served(
    made: StepAllocator,
    watch: Stopwatch,
    *,
    is_fixed: bool = False,
    runs_ahead: bool = False,
    ranks: RankGroup | None = None,
) -> ServedCosts:
    return ServedCosts(
        made,
        is_fixed=is_fixed,
        runs_ahead=runs_ahead,
        device="cpu",
        ranks=ranks or RankGroup(),
        clock=StepClock(),
        now=watch,
    )


def verify_only(costs: ServedCosts, watch: Stopwatch, *, rest: float) -> None:
    """A step of 5 ms of verification, and so many seconds besides."""
    costs.begin_step(2)
    with costs.time_verify(2, 8, num_context=0):
        watch.seconds += 0.005
    costs.end_step()
    watch.seconds += rest


def test_the_table_becomes_that_of_the_machine() -> None:
    made, watch = allocator(), Stopwatch()
    costs = served(made, watch)
    serve(made, costs, watch, clock(fixed=7, per_node=0.25, noise=0, seed=1), 600)
    for n in (1, 2, 4, 8):
        for width in WIDTHS:
            # Steps of four and eight nodes are the usual ones.
            is_usual = width == (8 if n == 1 else 4)
            wanted = pytest.approx(7 + 0.25 * n * width, rel=0.01 if is_usual else 0.12)
            assert made.costs.verify_ms(n, [width])[0] == wanted
    described = costs.describe()
    assert described is not None
    assert described["num_timed_steps"] == 600
    assert described["about"] == made.costs.about


def test_what_a_step_takes_beside_its_parts_is_part_of_its_costs() -> None:
    made, watch = allocator(), Stopwatch()
    costs = served(made, watch)
    for number in range(40):
        verify_only(costs, watch, rest=0.003)
        if number % 10 == 9:  # a prefill, or the server was idle
            costs.interrupt()
            watch.seconds += 60
    assert made.costs.verify_ms(2, [8])[0] == pytest.approx(8, rel=0.01)


def test_what_has_no_price_is_no_part_of_what_a_step_costs() -> None:
    made, watch = allocator(), Stopwatch()
    costs = served(made, watch)
    for _ in range(40):
        costs.begin_step(2)
        with costs.time_unpriced():
            watch.seconds += 0.02
        with costs.time_verify(2, 8, num_context=0):
            watch.seconds += 0.005
        costs.end_step()
        watch.seconds += 0.003
    assert made.costs.verify_ms(2, [8])[0] == pytest.approx(8, rel=0.01)


def test_a_gpu_that_waits_for_the_host_takes_that_long_beside_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, watch = allocator(), Stopwatch()

    class Event:
        """Reached by the device two milliseconds after the host recorded it."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.seconds = watch.seconds

        def query(self) -> bool:
            return watch.seconds > self.seconds + 0.002

        def elapsed_time(self, end: Event) -> float:
            assert end.query()
            return 1000 * (end.seconds - self.seconds)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    costs = ServedCosts(
        made,
        is_fixed=False,
        runs_ahead=False,
        device="cuda",
        ranks=RankGroup(),
        clock=StepClock(),
        now=watch,
    )
    for number in range(64):
        costs.begin_step(2)
        with costs.time_draft(2, NUM_STEPS):
            watch.seconds += 0.002
        watch.seconds += 0.00025
        with costs.time_verify(2, 8, num_context=0):
            watch.seconds += 0.005
        watch.seconds += 0.001
        costs.end_step()
        if number % 10 == 9:  # a prefill, or the server was idle
            costs.interrupt()
            watch.seconds += 60
    assert made.costs.verify_ms(2, [8])[0] == pytest.approx(6.25, abs=0.05)


def test_a_wait_is_that_of_the_steps_before_those_that_did_not_run_ahead() -> None:
    made, watch = allocator(), Stopwatch()
    costs = served(made, watch, runs_ahead=True)
    for number in range(128):
        is_ahead = number % 4 != 0
        watch.seconds += 0.0001 if is_ahead else 0.003  # since the last
        costs.begin_step(2, is_ahead=is_ahead)
        with costs.time_verify(2, 8, num_context=0):
            watch.seconds += 0.005
        costs.end_step()
    assert made.costs.verify_ms(2, [8])[0] == pytest.approx(5.1, abs=0.05)
    assert made.costs.wait_ms(2) == pytest.approx(2.9, abs=0.05)


def test_a_step_that_had_nothing_beside_its_parts_soon_has_it_counted() -> None:
    made, watch = allocator(), Stopwatch()
    costs = served(made, watch)
    for number in range(640):
        costs.begin_step(2)
        with costs.time_verify(2, 8, num_context=0):
            watch.seconds += 0.005
        costs.end_step()
        watch.seconds += 0.0 if number < 64 else 0.003
    assert made.costs.verify_ms(2, [8])[0] == pytest.approx(8, rel=0.1)


def test_on_a_machine_where_nodes_are_free_steps_are_wider() -> None:
    widths = []
    for per_node in (0.0, 2.0):
        made, watch = allocator(), Stopwatch()
        costs = served(made, watch)
        serve(made, costs, watch, clock(fixed=7, per_node=per_node, noise=0, seed=1), 600)
        probs = np.cumprod(np.full((4, 16), 0.8, np.float32), axis=1)
        nothing = np.zeros((4, len(SIZES), NUM_STEPS), np.float32)
        depths = np.tile(np.arange(1, 17, dtype=np.int32), (4, 1))
        odds = PredictedDrafts(probs, depths, np.full(4, 15, np.int32), nothing, nothing)
        widths.append(made.allocate(np.arange(4, dtype=np.int32), odds).width)
    assert widths[0] == 16
    assert widths[1] < 8


def test_a_table_that_was_given_stays() -> None:
    made, watch = allocator(), Stopwatch()
    before = made.costs
    costs = served(made, watch, is_fixed=True)
    serve(made, costs, watch, clock(fixed=70, per_node=9, noise=0, seed=1), 200)
    assert made.costs is before


def test_without_an_allocator_nothing_is_timed() -> None:
    costs = ServedCosts(
        None,
        is_fixed=False,
        runs_ahead=False,
        device="cpu",
        ranks=RankGroup(),
        clock=StepClock(),
        now=Stopwatch(),
    )
    with costs.time_verify(1, 4, num_context=0):
        pass
    costs.end_step()
    assert costs.describe() is None


PROFILE = StepCosts(
    about="timed",
    batch_sizes=(1, 8),
    widths=(1, 16),
    verify=((6.0, 9.0), (8.0, 40.0)),
    draft_round=(0.5, 0.8),
    draft_extend=((0.5, 0.6), (0.6, 2.0)),
)


def test_a_profile_is_in_force_at_once_and_refined_by_the_steps() -> None:
    made, watch = allocator(PROFILE), Stopwatch()
    costs = served(made, watch)
    assert made.costs is PROFILE
    serve(made, costs, watch, clock(fixed=60, per_node=0, noise=0, seed=0), 300)
    described = costs.describe()
    assert described is not None
    assert described["about"] == "timed, refined by its steps"
    assert made.costs.verify_ms(1, [1])[0] > 2 * PROFILE.verify_ms(1, [1])[0]


def _clock_of(rank: int) -> Callable[..., float]:
    """The second rank's machine is slower at everything but wide steps."""
    return clock(
        fixed=5 + 20 * rank,
        per_node=0.3 / (1 + 9 * rank),
        noise=1.0,
        seed=rank,
        of_context=1e-4 * (1 + rank),
    )


def _serve_as_rank(rank: int, folder: str, num_steps: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2
    )
    for profile in (PROFILE, None):
        made, watch = allocator(profile), Stopwatch()
        costs = served(made, watch, ranks=RankGroup(torch.distributed.group.WORLD))
        digest = serve(made, costs, watch, _clock_of(rank), num_steps)
        with Path(folder, str(rank)).open("a") as file:
            file.write(f"{digest} {costs.describe()}\n")
    torch.distributed.barrier()  # a rank that leaves early takes the connection along
    torch.distributed.destroy_process_group()


def test_what_contexts_take_is_a_part_of_the_table() -> None:
    made, watch = allocator(), Stopwatch()
    costs = served(made, watch)
    for step in range(256):
        costs.begin_step(2)
        num_context = 1000 if step % 20 < 10 else 8000
        with costs.time_verify(2, 4, num_context=num_context):
            watch.seconds += 0.005 + 1e-6 * num_context
        costs.end_step()
    state = costs.describe()
    assert state is not None
    assert state["context"] == pytest.approx(1.0, rel=0.1)


def test_a_pause_is_no_cost_of_a_step() -> None:
    made, watch = allocator(), Stopwatch()
    costs = served(made, watch)
    for number in range(64):
        verify_only(costs, watch, rest=300 if number == 20 else 0.003)
    # It counts as ten such verifications at most.
    assert made.costs.verify_ms(2, [8])[0] == pytest.approx(8 + 50 / 64, rel=0.1)


@pytest.mark.parametrize("num_steps", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_two_ranks_with_different_clocks_decide_alike(tmp_path: Path, num_steps: int) -> None:
    torch.multiprocessing.spawn(_serve_as_rank, args=(str(tmp_path), num_steps), nprocs=2)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first == second
    assert first.count("\n") == 2


@pytest.mark.parametrize("has_profile", [True, False])
def test_left_to_themselves_these_ranks_would_not(has_profile: bool) -> None:
    digests = set()
    for rank in range(2):
        made, watch = allocator(PROFILE if has_profile else None), Stopwatch()
        costs = served(made, watch)
        digests.add(serve(made, costs, watch, _clock_of(rank), 2000))
    assert len(digests) == 2
