"""The simulated model drafter."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.replay.core.model_drafter import ODDS_RATIOS, ModelDrafter
from sglang_hvd.traces.trace import Trace
from tests.traces.made_up import trace


def texts(num: int = 6) -> list[Trace]:
    """The first half of each output copies its prompt; the second half is random tokens."""
    random = np.random.default_rng(3)
    made = []
    for _ in range(num):
        prompt = random.integers(0, 10_000, 300)
        made.append(trace(prompt, [*prompt, *random.integers(0, 10_000, 300)]))
    return made


def halves(accepted: list[np.ndarray]) -> tuple[float, float]:
    """Means over the copied halves and over the other halves."""
    return (
        float(np.mean([of_trace[2:290] for of_trace in accepted])),
        float(np.mean([of_trace[300:] for of_trace in accepted])),
    )


def test_a_constant_drafter_has_the_same_number_accepted_in_every_cycle() -> None:
    for accepted, of_trace in zip(
        ModelDrafter(3).accepted_lens(texts(), HvdConfig()), texts(), strict=True
    ):
        assert accepted.tolist() == [3] * len(of_trace.output_ids)


@pytest.mark.parametrize("spread", ["independent", "correlated"])
@pytest.mark.parametrize("strength", [0.0, 0.75, 2.2, 4.2])
def test_the_mean_is_the_strength(spread: str, strength: float) -> None:
    drafter = ModelDrafter(strength, ODDS_RATIOS[spread])
    accepted = np.concatenate(drafter.accepted_lens(texts(), HvdConfig()))
    assert accepted.mean() == pytest.approx(strength, abs=0.01)
    assert accepted.min() >= 0
    assert accepted.max() <= drafter.num_steps


def test_a_correlated_drafter_is_better_where_the_cache_is_right() -> None:
    copied, fresh = halves(
        ModelDrafter(2.2, ODDS_RATIOS["correlated"]).accepted_lens(texts(), HvdConfig())
    )
    assert copied > 2 * fresh
    copied, fresh = halves(ModelDrafter(2.2, 1.0).accepted_lens(texts(), HvdConfig()))
    assert copied == pytest.approx(fresh, rel=0.2)


def test_sessions_may_differ_in_how_well_they_are_drafted() -> None:
    made = [replace(each, session=f"s{place // 2}") for place, each in enumerate(texts(24))]
    means = {}
    for spread in (0.0, 1.5):
        drafter = ModelDrafter(2.7, 1.0, spread=spread)
        of_turns = [of.mean() for of in drafter.accepted_lens(made, HvdConfig())]
        assert np.mean(of_turns) == pytest.approx(2.7, abs=0.1)
        means[spread] = np.reshape(of_turns, (-1, 2))
    assert means[1.5].mean(axis=1).std() > 4 * means[0.0].mean(axis=1).std()
    # All turns of a session have the same offset.
    assert np.corrcoef(means[1.5].T)[0, 1] > 0.9


def test_what_another_namespace_generated_is_not_copied() -> None:
    drafter = ModelDrafter(2.2, ODDS_RATIOS["correlated"])

    def second_of(namespace: str) -> float:
        """Mean for a text of random tokens that another request generated before."""
        output = texts(1)[0].output_ids[300:]
        given = [trace([5], output), trace([6], output, namespace=namespace)]
        return float(drafter.accepted_lens([*texts(), *given], HvdConfig())[-1].mean())

    assert second_of("") > 2 * second_of("another")


def test_a_cycle_that_begins_inside_another_draft_continues_it() -> None:
    [accepted] = ModelDrafter(2.2, 1.0).accepted_lens(texts(1), HvdConfig())
    num_steps = ModelDrafter().num_steps
    for place in range(len(accepted) - 1):
        if 0 < accepted[place] < num_steps:
            assert accepted[place + 1] == accepted[place] - 1
    assert all(accepted[place] <= len(accepted) - place for place in range(len(accepted)))


def test_it_is_the_same_every_time_and_empty_for_an_empty_output() -> None:
    given = [*texts(2), trace([1, 2], [])]
    drafter = ModelDrafter(2.2, ODDS_RATIOS["correlated"])
    first, second = (drafter.accepted_lens(given, HvdConfig()) for _ in range(2))
    assert [a.tolist() for a in first] == [b.tolist() for b in second]
    assert len(first[2]) == 0
    assert [len(a) for a in drafter.accepted_lens([given[2]], HvdConfig())] == [0]


@pytest.mark.parametrize(("strength", "odds_ratio"), [(-1, 1.0), (8, 1.0), (2.5, None)])
def test_an_impossible_strength_is_refused(strength: float, odds_ratio: float | None) -> None:
    with pytest.raises(ValueError, match="tokens"):
        ModelDrafter(strength, odds_ratio)
