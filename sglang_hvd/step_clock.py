"""Measures the time that the host spends in this package's code during decode steps."""

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
    BUILD = "build"  # lays the drafts out as verify trees
    COSTS = "costs"  # learns what steps cost
    TRANSFER = "transfer"  # starts the copies between host and device


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
        self._timers = {phase: _Timer(self._phases, phase, now) for phase in Phase}

    def measure(self, phase: Phase) -> "_Timer":
        """A context manager that measures this phase. Phases must not be nested."""
        return self._timers[phase]

    @property
    def began_at(self) -> float | None:
        """When the step began, by `now`; None between steps."""
        return self._began

    def now(self) -> float:
        """The time in seconds."""
        return self._now()

    def begin_step(self) -> None:
        self.end_step()
        self._began = self._now()

    def end_step(self) -> None:
        """Does nothing between steps."""
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
