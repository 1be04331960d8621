"""Measures what the host does in a decode step, and how long the device waits for it."""

import enum
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

_NUM_RECENT_STEPS = 1024


class Phase(enum.Enum):
    """The host's work for a decode step. Waiting for the device does not count."""

    COMMIT = "commit"  # hands the tokens of the last step to the drafter
    PROPOSE = "propose"  # asks the suffix cache
    FEATURES = "features"
    PREDICT = "predict"
    ALLOCATE = "allocate"  # decides what each request verifies
    BUILD = "build"  # lays the drafts out as verify trees, and looks who catches up
    COSTS = "costs"  # learns what steps cost
    TRANSFER = "transfer"  # starts the copies between host and device

    __hash__ = object.__hash__  # enum's own is in Python, and each member is one object


class Stage(enum.Enum):
    """The way from the tokens of the last step to the next verification, in order. While the host
    is on this way, a device has nothing to do but to draft."""

    SCHEDULE = "schedule"  # SGLang's scheduler, between two steps
    PLAN = "plan"  # commit the tokens, decide what each request verifies, send it to the device
    DRAFT = "draft"  # run the model drafter, or launch it; no part of the gap
    LAYOUT = "layout"  # lay the drafts out as verify trees
    LAUNCH = "launch"  # SGLang's preparation, up to the target model's forward pass

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Number and duration of decode steps, and the host's time in them, in seconds."""

    num_steps: int
    step: float
    phases: Mapping[Phase, float]

    @property
    def host(self) -> float:
        """The time of all phases together."""
        return sum(self.phases.values())


class StepClock:
    """Measures the phases of one step at a time, each as `with clock.measure(phase)`.

    A step lasts from begin_step to end_step or to the next begin_step. Phases outside of steps
    are not counted. Not thread-safe.

    The gap of a step is measured too: the time from know_tokens, which says that the tokens of the
    last step are known, to the stage LAUNCH, without the stage DRAFT. A step that was launched
    before these tokens were known has none. On a GPU the tokens count as known when the host has
    them. Their copy may have ended before, so the device may have waited longer.

    now: returns the time in seconds; tests replace it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._num_steps = 0
        self._total = 0.0
        self._totals = dict.fromkeys(Phase, 0.0)
        self._began: float | None = None
        self._phases = dict.fromkeys(Phase, 0.0)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT_STEPS)
        self._reached: float | None = None
        self._stages = dict.fromkeys(Stage, 0.0)
        self._stage_totals = dict.fromkeys(Stage, 0.0)
        self._num_gaps = 0
        self._gaps: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        self._new_gaps: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        self._timers = {phase: _Timer(self._phases, phase, now) for phase in Phase}

    def measure(self, phase: Phase) -> "_Timer":
        """A context manager that measures this phase. Phases must not be nested."""
        return self._timers[phase]

    def add(self, phase: Phase, seconds: float) -> None:
        """A phase took so long, measured elsewhere."""
        self._phases[phase] += seconds

    @property
    def began_at(self) -> float | None:
        """When the step began, by `now`; None between steps."""
        return self._began

    def now(self) -> float:
        """The time in seconds."""
        return self._now()

    def begin_step(self) -> None:
        """A gap that has begun goes on in the step."""
        reached = self._reached
        self.end_step()
        self._began, self._reached = self._now(), reached
        self.reach(Stage.SCHEDULE)

    def end_step(self) -> None:
        """Does nothing between steps, except that it ends a gap that has begun."""
        self._reached = None
        if self._began is not None:
            duration = self._now() - self._began
            self._began = None
            self._num_steps += 1
            self._total += duration
            self._recent.append((duration, sum(self._phases.values())))
            for phase, seconds in self._phases.items():
                self._totals[phase] += seconds
        for phase in Phase:
            self._phases[phase] = 0.0

    def know_tokens(self) -> None:
        """The tokens of the last step are known from now on: the gap begins."""
        self._reached = self._now()
        for stage in Stage:
            self._stages[stage] = 0.0

    def reach(self, stage: Stage) -> None:
        """A stage ends. The time since the end of the stage before it is its own. Does nothing
        without a gap that has begun. LAUNCH ends the gap."""
        if self._reached is None:
            return
        now = self._now()
        self._stages[stage] += now - self._reached
        self._reached = now
        if stage is not Stage.LAUNCH:
            return
        self._reached = None
        self._num_gaps += 1
        for of_stage, seconds in self._stages.items():
            self._stage_totals[of_stage] += seconds
        gap = sum(self._stages.values()) - self._stages[Stage.DRAFT]
        self._gaps.append(gap)
        self._new_gaps.append(gap)

    def new_gaps(self) -> list[float]:
        """The gaps since the last call, in seconds; at most the latest 1,024."""
        gaps = list(self._new_gaps)
        self._new_gaps.clear()
        return gaps

    def totals(self) -> StepTimes:
        """The totals of all steps that ended."""
        return StepTimes(self._num_steps, self._total, dict(self._totals))

    def describe(self) -> dict[str, object]:
        """Means over all steps, and medians and 99th percentiles over the latest 1,024."""
        totals = self.totals()
        if not totals.num_steps:
            return {"num_steps": 0}
        steps, hosts = np.array(self._recent).T
        shares = hosts / np.maximum(steps, 1e-9)
        return {
            "num_steps": totals.num_steps,
            "step_us": 1e6 * totals.step / totals.num_steps,
            "host_us": 1e6 * totals.host / totals.num_steps,
            "host_us_by_phase": {
                phase.value: 1e6 * seconds / totals.num_steps
                for phase, seconds in totals.phases.items()
            },
            "host_us_p50": 1e6 * float(np.median(hosts)),
            "host_us_p99": 1e6 * float(np.quantile(hosts, 0.99)),
            "host_share": totals.host / totals.step,
            "host_share_p50": float(np.median(shares)),
            "host_share_p99": float(np.quantile(shares, 0.99)),
            "gap": self._describe_gaps(),
        }

    def _describe_gaps(self) -> dict[str, object]:
        if not self._num_gaps:
            return {"num_gaps": 0}
        means = {stage: 1e6 * of / self._num_gaps for stage, of in self._stage_totals.items()}
        return {
            "num_gaps": self._num_gaps,
            "us": sum(means.values()) - means[Stage.DRAFT],
            "us_by_stage": {stage.value: of_stage for stage, of_stage in means.items()},
            "us_p50": 1e6 * float(np.median(self._gaps)),
            "us_p99": 1e6 * float(np.quantile(self._gaps, 0.99)),
        }


class _Timer:
    """Adds the time between entering and leaving to a phase."""

    __slots__ = ("_began", "_now", "_phase", "_phases")

    def __init__(self, phases: dict[Phase, float], phase: Phase, now: Callable[[], float]) -> None:
        self._phases = phases
        self._phase = phase
        self._now = now
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        self._phases[self._phase] += self._now() - self._began
