"""Paper mode against the Python cache where many occurrences match for long, which it does not look
at one by one for each match length and each token of a draft."""

import numpy as np
import pytest

from sglang_hvd.replay.core.single_cycles import CacheDraft
from sglang_hvd.suffix_cache import SuffixCache
from tests.suffix_cache.oracle.cache import OracleCache
from tests.suffix_cache.proposed_drafts import propose

NUM_TOKENS = 3000  # several blocks


def runs(*lengths_and_ends: tuple[int, int]) -> list[int]:
    """Runs of 0 of these lengths, each followed by its end, over and over."""
    once = [token for length, end in lengths_and_ends for token in [*[0] * length, end]]
    return once * (NUM_TOKENS // len(once))


def rare_ones(share: float) -> list[int]:
    return (np.random.default_rng(0).random(NUM_TOKENS) < share).astype(int).tolist()


TEXTS = {
    "one token": [0] * NUM_TOKENS,
    "two in turns": [0, 1] * (NUM_TOKENS // 2),
    "a period of 7": [0, 1, 2, 3, 4, 5, 6] * (NUM_TOKENS // 7),
    "a period with repeats": [0, 0, 1, 0, 0, 2, 0] * (NUM_TOKENS // 7),
    "a period longer than a match": list(range(70)) * (NUM_TOKENS // 70),
    "random, of two": rare_ones(0.5),
    "a rare second": rare_ones(0.02),
    "runs with ends in turns": runs((63, 1), (63, 2)),
    "runs of many lengths": runs(*((length, 1) for length in range(1, 76))),
    "runs as long as a draft": runs((32, 1), (31, 1), (33, 2)),
    # What the longest matches go on with is not what most go on with.
    "a long match unlike the others": [*[0] * NUM_TOKENS, 5, *[0] * 62, 6, 5, *[0] * 62],
    "short runs among long ones": [
        *[0] * NUM_TOKENS,
        *(token for length in range(63, 80) for token in [*[0] * length, 7]),
        *[0] * NUM_TOKENS,
    ],
    "others each time": [token for other in range(1, NUM_TOKENS // 2) for token in (0, other)],
}
LIMITS: dict[str, dict[str, float]] = {
    "the paper's": {},
    "every probability": {"min_token_prob": 0.0},
    "short": {"max_depth": 12, "max_spec_factor": 2.0, "max_spec_offset": -1.0},
    "longer than a block's margins": {"max_depth": 150, "max_draft_tokens": 100},
}


def as_tuple(draft: CacheDraft | None) -> tuple[list[int], int, float, str] | None:
    if draft is None:
        return None
    return draft.token_ids.tolist(), draft.match_len, draft.score, draft.source


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_drafts_from_repetitive_texts_are_the_oracles(
    text: list[int], limits: dict[str, float]
) -> None:
    caches = [OracleCache(**limits), SuffixCache.as_in_paper(**limits)]  # type: ignore[arg-type]
    for cache in caches:
        cache.start("earlier", [])
        cache.finish("earlier", keep=True, output_ids=text)
        cache.start("own", text)
        cache.start("shared", text[-100:])
    for committed in ([], text[:1], [0], [0, 1], text[:40]):
        for cache in caches:
            cache.commit(["own", "shared"], [committed, committed])
        want, got = (propose(cache, ["own", "shared"], 200) for cache in caches)
        assert [as_tuple(draft) for draft in got] == [as_tuple(draft) for draft in want]
