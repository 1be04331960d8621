"""Features and predictions have the same bits whatever the registers they are computed in."""

from collections.abc import Iterator

import numpy as np
import pytest

from sglang_hvd._native import use_lanes, widest_lanes
from sglang_hvd.config import CacheMode, HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.payoff import AcceptancePredictor, TokenClasses
from sglang_hvd.replay.core.single_cycles import VerifyOutcome, outcome_batch
from sglang_hvd.suffix_cache import SuffixCache

NUM_REQUESTS = 7  # four rows at a time go through the network, and then one by one


@pytest.fixture(autouse=True)
def _widest_afterwards() -> Iterator[None]:
    yield
    use_lanes(widest_lanes())


def bits(lanes: int, mode: CacheMode) -> list[bytes]:
    """Of all features and predictions of some cycles on random phrases that repeat."""
    use_lanes(lanes)
    rng = np.random.default_rng(1)
    phrases = [rng.integers(0, 300, size).tolist() for size in (3, 5, 9, 14, 22)]

    def text(num_phrases: int) -> list[int]:
        return [token for n in rng.integers(0, 5, num_phrases) for token in phrases[n]]

    config = HvdConfig(policy="payoff", cache_mode=mode)
    made = HybridDrafter(
        config,
        cache=SuffixCache.of_config(config, background=False),
        predictor=AcceptancePredictor.of_config(config),
        token_classes=TokenClasses.from_strings(["a", ",", " b", "\n", "12", "(", ")", '"'] * 40),
        num_model_steps=3,
        num_model_nodes=7,
        verify_width=64,
    )
    rids = range(NUM_REQUESTS)
    for rid in rids:
        made.start(rid, text(8))
    found = []
    for _ in range(20):
        proposals = made.propose(rids)
        assert proposals.features is not None
        assert proposals.predicted is not None
        prediction = proposals.predicted.prediction
        assert prediction.acceptance is not None
        found += [
            proposals.features.features[:NUM_REQUESTS].tobytes(),
            prediction.acceptance.tobytes(),
            prediction.accepted_lens.tobytes(),
        ]
        for row, num in enumerate(proposals.drafts.num_nodes[:NUM_REQUESTS].tolist()):
            found.append(proposals.features.positions[row, :, :num].tobytes())
        made.choose(rids, proposals)
        made.commit(rids, outcome_batch([VerifyOutcome(text(1)[:2], 1) for _ in rids]))
    return found


@pytest.mark.parametrize("mode", ["votes", "paper"])
@pytest.mark.parametrize("lanes", [8, 16])  # in memory where the machine's registers are narrower
def test_wider_vectors_give_the_same_bits(lanes: int, mode: CacheMode) -> None:
    assert bits(lanes, mode) == bits(4, mode)


@pytest.mark.parametrize("lanes", [0, 2, 12, 32])
def test_other_vectors_are_refused(lanes: int) -> None:
    with pytest.raises(ValueError, match="lanes must be 4, 8 or 16"):
        use_lanes(lanes)
