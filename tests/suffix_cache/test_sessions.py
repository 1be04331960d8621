"""The next turn of a session takes over what its last turn indexed, and nobody else does."""

import numpy as np
import pytest

from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftBatch, TokenIds


def text(num_tokens: int, seed: int, vocabulary: int = 50) -> TokenIds:
    """Tokens of which runs come again."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, num_tokens, dtype=np.int32)
    for at in range(40, num_tokens - 20, 20):
        if rng.random() < 0.5:
            source = int(rng.integers(0, at - 20))
            tokens[at : at + 20] = tokens[source : source + 20]
    return tokens


def run_turn(
    cache: SuffixCache, prompt: TokenIds, output: TokenIds, namespace: str = "", keep: bool = True
) -> None:
    cache.start("turn", prompt, namespace)
    for step in np.split(output, range(3, len(output), 3)):
        cache.commit(["turn"], [step])
    cache.finish("turn", keep=keep)
    cache.drain()


def tree(cache: SuffixCache, rid: str) -> list[list[float]]:
    batch = DraftBatch.of_size(1, 64)
    cache.propose_into(batch, [rid], np.array([64], np.int32), is_tree=True)
    n = int(batch.num_nodes[0])
    arrays = (batch.token_ids, batch.parents, batch.depths, batch.probs)
    return [*(array[0, :n].tolist() for array in arrays), batch.matches[0].tolist()]


@pytest.mark.parametrize("vocabulary", [1, 2, 20, 60, 5000])
@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_those_of_a_prompt_that_is_indexed_anew(seed: int, vocabulary: int) -> None:
    # The tables have the same size all the time: then everything must be equal.
    first, output, more = (text(n, seed + n, vocabulary) for n in (1_300, 500, 20))
    second = np.concatenate([first, output[: seed * 40], more])
    caches = [SuffixCache(session_tokens=budget, background=False) for budget in (10_000, 0)]
    for cache in caches:
        run_turn(cache, first, output)
        assert cache.stats().num_sessions == (cache is caches[0])
        cache.start("next", second)
        cache.check()
        assert cache.stats().num_sessions == 0
    for step in np.split(text(120, seed, vocabulary), 40):
        assert tree(caches[0], "next") == tree(caches[1], "next")
        for cache in caches:
            cache.commit(["next"], [step])
            cache.check()


@pytest.mark.parametrize("length", [1_100, 2_047, 2_048, 2_049, 5_000, 9_000])
def test_texts_stay_sound_over_many_turns(length: int) -> None:
    cache = SuffixCache(background=False)
    prompt = text(length, length)
    for turn in range(6):
        output = text(700, turn)
        run_turn(cache, prompt, output)
        cache.check()
        stats = cache.stats()
        assert stats.num_sessions == 1
        # Without what a template may change, and cut to what can be found.
        assert 0 <= len(prompt) - 64 - stats.num_session_tokens < 256
        prompt = np.concatenate([prompt, output, text(100 + 37 * turn, 100 + turn)])


def test_the_next_turn_indexes_only_what_is_new() -> None:
    cache = SuffixCache()
    prompt = text(50_000, 1)
    run_turn(cache, prompt, text(50, 2))
    cache.start("next", np.concatenate([prompt, text(100, 3)]))
    assert cache.stats().num_pending_tokens == 0  # little enough to be done at once
    cache.check()


def test_a_request_that_ends_before_it_is_indexed_is_kept_whole() -> None:
    cache = SuffixCache()
    prompt = text(50_000, 1)
    for rid in range(5):
        cache.start(rid, prompt)
        cache.finish(rid, keep=True)
        cache.drain()
        cache.start("next", np.concatenate([prompt, text(100, 3)]))
        assert cache.stats().num_pending_tokens == 0
        cache.check()
        cache.finish("next", keep=False)


def test_another_beginning_is_not_taken() -> None:
    cache = SuffixCache(background=False)
    prompt = text(3_000, 1)
    run_turn(cache, prompt, text(50, 2))
    other = prompt.copy()
    other[0] += 1
    cache.start("other", other)
    cache.start("shorter", prompt[:2_000])
    assert cache.stats().num_sessions == 1
    cache.start("same", prompt)
    assert cache.stats().num_sessions == 0


def test_the_longest_beginning_is_taken() -> None:
    cache = SuffixCache(background=False)
    prompt = text(8_000, 1)
    for length in (2_000, 4_000, 6_000):
        run_turn(cache, np.concatenate([prompt[:length], text(2_000, length)]), text(5, 2))
        cache.start(length, prompt[:length])  # takes none: all that is kept is longer
    run_turn(cache, prompt[:2_000], text(5, 3))
    run_turn(cache, prompt[:5_000], text(5, 3))
    before = cache.stats().num_session_tokens
    cache.start("next", prompt)
    taken = before - cache.stats().num_session_tokens
    assert 5_000 - 64 - 256 < taken <= 5_000


def test_prompts_that_are_not_kept() -> None:
    cache = SuffixCache(background=False)
    run_turn(cache, text(1_087, 1), text(10, 2))  # too short
    run_turn(cache, text(3_000, 1), text(10, 2), keep=False)
    assert cache.stats().num_sessions == 0
    run_turn(cache, text(1_088, 1), text(10, 2))
    assert cache.stats().num_session_tokens == 1_024


def test_namespaces_keep_their_sessions_apart_and_a_flush_ends_them() -> None:
    cache = SuffixCache(background=False)
    prompt = text(3_000, 1)
    for namespace in ("left", "right"):
        run_turn(cache, prompt, text(10, 2), namespace)
    assert cache.stats().num_sessions == 2
    cache.start("third", prompt, "middle")
    assert cache.stats().num_sessions == 2
    cache.flush("left")
    assert cache.stats().num_sessions == 1
    cache.start("late", prompt, "left")
    assert cache.stats().num_sessions == 1
    cache.flush()
    assert cache.stats().num_sessions == cache.stats().num_session_tokens == 0


def test_over_the_budget_the_one_kept_first_leaves() -> None:
    cache = SuffixCache(session_tokens=5_000, background=False)
    prompts = [text(2_000, seed) for seed in range(3)]
    for prompt in prompts:
        run_turn(cache, prompt, text(10, 9))
    assert cache.stats().num_sessions == 2
    cache.start("first", prompts[0])
    assert cache.stats().num_sessions == 2
    cache.start("last", prompts[2])
    assert cache.stats().num_sessions == 1


def test_memory_goes_back() -> None:
    cache = SuffixCache(shared_cache_tokens=0, session_tokens=100_000, background=False)
    sizes = []
    for seed in range(12):
        run_turn(cache, text(40_000, seed), text(5, seed))
        sizes.append(cache.stats().num_bytes)
    assert max(sizes) < 100_000 * 60
    cache.flush()
    assert cache.stats().num_bytes < 2_000_000


def test_a_budget_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="session_tokens must lie in"):
        SuffixCache(session_tokens=-1)
