"""The native suffix cache: life cycle, limits, and what it says to wrong input."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import MATCH_COLUMNS, DraftBatch
from tests.suffix_cache.proposed_drafts import propose

PHRASE = [11, 12, 13, 14, 15, 16]


@pytest.fixture
def cache() -> SuffixCache:
    return SuffixCache(background=False)


def proposed(cache: SuffixCache, rid: object, max_tokens: int = 64) -> list[int]:
    [draft] = propose(cache, [rid], max_tokens)
    return [] if draft is None else draft.token_ids.tolist()


def tree(cache: SuffixCache, rid: object, max_nodes: int) -> DraftBatch:
    batch = DraftBatch.of_size(1, max_nodes)
    cache.propose_into(batch, [rid], np.array([max_nodes], np.int32), is_tree=True)
    return batch


def test_a_draft_follows_the_prompt(cache: SuffixCache) -> None:
    cache.start("a", [*PHRASE, 1, 11, 12])
    [draft] = propose(cache, ["a"], 4)
    assert draft.token_ids.tolist() == [13, 14, 15, 16]
    assert draft.match_len == 2
    assert draft.source == "request"
    assert not draft.token_ids.flags.writeable


def test_a_draft_may_be_longer_than_its_match(cache: SuffixCache) -> None:
    text = list(range(100, 200))
    cache.start("a", [*text, 1, 100])
    assert proposed(cache, "a") == text[1:65]


def test_a_draft_repeats_what_ends_with_the_text(cache: SuffixCache) -> None:
    cache.start("a", [7, 8, 7, 8, 7])
    assert proposed(cache, "a", 6) == [8, 7, 8, 7, 8, 7]


def test_finished_request_stays_in_shared_cache(cache: SuffixCache) -> None:
    cache.start("a", [1])
    cache.commit(["a"], [PHRASE])
    cache.finish("a", keep=True)
    cache.start("b", [2, 11])
    [draft] = propose(cache, ["b"], 3)
    assert draft.token_ids.tolist() == [12, 13, 14]
    assert draft.source == "shared"


def test_prompts_are_not_shared(cache: SuffixCache) -> None:
    cache.start("a", PHRASE)
    cache.finish("a", keep=True)
    cache.start("b", [11])
    assert proposed(cache, "b") == []


def test_a_request_that_is_not_kept_leaves_nothing(cache: SuffixCache) -> None:
    cache.start("a", [1])
    cache.commit(["a"], [PHRASE])
    cache.finish("a", keep=False)
    assert cache.stats().num_shared_tokens == 0


def test_the_output_to_keep_can_be_given(cache: SuffixCache) -> None:
    cache.start("a", [1])
    cache.commit(["a"], [[5, 6, 7]])
    cache.finish("a", keep=True, output_ids=PHRASE)
    assert cache.stats().num_shared_tokens == len(PHRASE)
    cache.start("b", [5])
    assert proposed(cache, "b") == []


def test_namespaces_do_not_see_each_other(cache: SuffixCache) -> None:
    cache.start("a", [1], "left")
    cache.commit(["a"], [PHRASE])
    cache.finish("a", keep=True)
    cache.start("b", [11], "right")
    cache.start("c", [11], "left")
    assert proposed(cache, "b") == []
    assert proposed(cache, "c") == PHRASE[1:]
    cache.flush("right")
    assert proposed(cache, "c") == PHRASE[1:]
    cache.flush("left")
    assert proposed(cache, "c") == []


def test_the_oldest_output_leaves_first() -> None:
    cache = SuffixCache(shared_cache_tokens=12, background=False)
    for rid, first in enumerate((100, 200, 300)):
        cache.start(rid, [1])
        cache.commit([rid], [range(first, first + 5)])
        cache.finish(rid, keep=True)
    assert cache.stats().num_shared_tokens == 10
    cache.start("a", [100])
    cache.start("b", [200])
    assert proposed(cache, "a") == []
    assert proposed(cache, "b") == [201, 202, 203, 204]


def test_a_namespace_keeps_to_its_own_budget() -> None:
    cache = SuffixCache(shared_cache_tokens=100, namespace_tokens=6, background=False)
    for rid, namespace in enumerate(("left", "right", "left")):
        cache.start(rid, [1], namespace)
        cache.commit([rid], [PHRASE])
        cache.finish(rid, keep=True)
    assert cache.stats().num_shared_requests == 2


def test_a_request_larger_than_the_budget_works_from_its_own_text() -> None:
    cache = SuffixCache(shared_cache_tokens=10, background=False)
    cache.start("a", [*range(5_000), 17])
    assert proposed(cache, "a", 3) == [18, 19, 20]
    cache.commit(["a"], [list(range(50))])
    cache.finish("a", keep=True)
    assert cache.stats().num_shared_tokens == 0


def test_memory_goes_back_when_requests_and_shared_outputs_leave() -> None:
    cache = SuffixCache(shared_cache_tokens=2_000_000)
    text = np.arange(200_000, dtype=np.int32)
    for rid in range(5):
        cache.start(rid, text)
        cache.commit([rid], text[None], np.array([len(text)], np.int32))
        cache.finish(rid, keep=True)
    cache.drain()
    full = cache.stats()
    assert full.num_shared_tokens == 1_000_000
    assert full.num_bytes < 48 * full.num_shared_tokens
    cache.resize(400_000)
    assert cache.stats().num_bytes < 0.8 * full.num_bytes
    cache.flush()
    assert cache.stats().num_bytes < 0.05 * full.num_bytes


def test_trees_keep_to_the_node_budget_and_merge_equal_prefixes(cache: SuffixCache) -> None:
    cache.start("a", [5, 1, 2, 0, 5, 1, 3, 0, 5, 4, 4, 0, 5])
    batch = tree(cache, "a", 6)
    num_nodes = int(batch.num_nodes[0])
    assert num_nodes == 6
    first = [batch.token_ids[0, node] for node in range(num_nodes) if batch.parents[0, node] == -1]
    assert sorted(first) == [1, 4]


def test_columns_describe_the_match(cache: SuffixCache) -> None:
    cache.start("a", [*PHRASE, 9, *PHRASE, 9, 11])
    batch = tree(cache, "a", 4)
    match = dict(zip(MATCH_COLUMNS, batch.matches[0].tolist(), strict=True))
    assert match["match_len"] == len(PHRASE) + 2
    assert match["origin"] == 0
    assert match["age"] == 7
    assert match["num_occurrences"] == match["num_agreeing"] == 2
    assert match["agreement"] == pytest.approx(1)
    assert match["num_tokens"] == 4
    assert match["score"] == pytest.approx(float(batch.probs[0].sum()))


def test_nothing_is_kept_of_the_callers_arrays(cache: SuffixCache) -> None:
    prompt = np.array([*PHRASE, 11], np.int32)
    cache.start("a", prompt)
    prompt[:] = 0
    step = np.array([[12]], np.int32)
    cache.commit(["a"], step, np.array([1], np.int32))
    step[:] = 0
    assert proposed(cache, "a", 2) == [13, 14]


def test_a_long_prompt_is_taken_in_beside_the_caller() -> None:
    cache = SuffixCache()
    prompt = np.arange(1_000_000, dtype=np.int32) % 40_000
    cache.start("a", prompt)
    assert cache.stats().num_pending_tokens > 0
    cache.commit(["a"], [[500]])
    propose(cache, ["a"], 4)  # uses what is there
    cache.drain()
    assert cache.stats().num_pending_tokens == 0
    assert proposed(cache, "a", 3) == [501, 502, 503]


def test_a_long_request_may_end_before_its_prompt_is_taken_in() -> None:
    cache = SuffixCache()
    for rid in range(20):
        cache.start(rid, np.arange(100_000, dtype=np.int32))
        cache.finish(rid, keep=True)
    cache.drain()
    assert cache.stats().num_requests == 0
    cache.check()


def test_an_output_that_waits_to_be_shared_does_not_survive_a_flush() -> None:
    cache = SuffixCache(shared_cache_tokens=2_000_000)
    for rid in range(20):
        cache.start(rid, [1])
        cache.commit([rid], [np.arange(50_000, dtype=np.int32)])
        cache.finish(rid, keep=True)
    cache.flush()
    cache.drain()
    assert cache.stats().num_shared_tokens == 0


@pytest.mark.parametrize("background", [False, True])
def test_a_million_equal_tokens_are_not_quadratic(background: bool) -> None:
    cache = SuffixCache(background=background)
    cache.start("a", np.full(1_000_000, 3, np.int32))
    cache.drain()
    for _ in range(1_000):
        cache.commit(["a"], [[3] * 65])
        assert proposed(cache, "a") == [3] * 64
    cache.check()


def test_extreme_token_ids_are_kept_whole(cache: SuffixCache) -> None:
    largest = 2**31 - 1
    cache.start("a", [largest, 0, largest - 1, 5, largest])
    assert proposed(cache, "a", 3) == [0, largest - 1, 5]


def test_an_empty_prompt_proposes_nothing(cache: SuffixCache) -> None:
    cache.start("a", [])
    assert propose(cache, ["a"], 8) == [None]
    cache.commit(["a"], [[1, 2, 1]])
    assert proposed(cache, "a", 2) == [2, 1]


def test_empty_batches_are_fine(cache: SuffixCache) -> None:
    cache.commit([], [])
    assert propose(cache, [], 8) == []


def test_a_rid_can_be_used_again_after_finish(cache: SuffixCache) -> None:
    cache.start("a", PHRASE)
    cache.finish("a", keep=False)
    cache.start("a", [11])
    assert proposed(cache, "a") == []


def test_unknown_and_repeated_rids_are_refused(cache: SuffixCache) -> None:
    cache.start("a", PHRASE)
    with pytest.raises(ValueError, match="'a' is already active"):
        cache.start("a", PHRASE)
    for action in (
        lambda: propose(cache, ["a", "b"], 8),
        lambda: cache.commit(["a", "b"], [[1], [1]]),
        lambda: cache.finish("b", keep=True),
    ):
        with pytest.raises(KeyError, match="'b' is not active: start it first"):
            action()
    with pytest.raises(ValueError, match="only once"):
        cache.commit(["a", "a"], [[1], [1]])
    assert cache.stats().num_request_tokens == len(PHRASE)


def test_a_commit_that_is_refused_changes_nothing(cache: SuffixCache) -> None:
    for rid in "ab":
        cache.start(rid, PHRASE)
    with pytest.raises(ValueError, match="must not be negative, got -7"):
        cache.commit(["a", "b"], np.array([[1, 2], [3, -7]], np.int32), np.array([2, 2], np.int32))
    with pytest.raises(ValueError, match=r"lengths\[1\] is 3: must lie in 0\.\.2"):
        cache.commit(["a", "b"], np.array([[1, 2], [3, 4]], np.int32), np.array([2, 3], np.int32))
    assert cache.stats().num_request_tokens == 2 * len(PHRASE)


def test_what_is_not_committed_may_hold_anything(cache: SuffixCache) -> None:
    cache.start("a", [1])
    cache.commit(["a"], np.array([[2, -1, -1]], np.int32), np.array([1], np.int32))
    assert cache.stats().num_request_tokens == 2


@pytest.mark.parametrize(
    ("token_ids", "lengths", "error"),
    [
        (np.array([[1, 2]], np.int64), np.array([2], np.int32), TypeError),
        (np.array([1, 2], np.int32), np.array([2], np.int32), TypeError),
        (np.array([[1, 2]], np.int32), np.array([2], np.int64), TypeError),
        (np.array([[1, 2, 3, 4]], np.int32)[:, ::2], np.array([2], np.int32), TypeError),
        ([[1, 2]], np.array([2], np.int32), TypeError),
        (np.array([[1], [2]], np.int32), np.array([1], np.int32), ValueError),
        (np.array([[1]], np.int32), np.array([1, 1], np.int32), ValueError),
    ],
)
def test_arrays_of_another_kind_are_refused_not_converted(
    cache: SuffixCache, token_ids: object, lengths: object, error: type[Exception]
) -> None:
    cache.start("a", PHRASE)
    with pytest.raises(error):
        cache.commit(["a"], token_ids, lengths)
    assert cache.stats().num_request_tokens == len(PHRASE)


@pytest.mark.parametrize(
    "prompt", [np.array([1], np.int64), np.array([[1]], np.int32), [-1], [2**31]]
)
def test_a_prompt_that_is_no_token_ids_is_refused(cache: SuffixCache, prompt: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        cache.start("a", prompt)
    assert cache.num_requests == 0


def test_a_batch_with_too_few_rows_is_refused(cache: SuffixCache) -> None:
    for rid in "ab":
        cache.start(rid, PHRASE)
    with pytest.raises(ValueError, match="fewer rows than there are requests"):
        cache.propose_into(DraftBatch.of_size(1, 8), "ab", np.array([8, 8], np.int32))
    with pytest.raises(ValueError, match="one entry per request"):
        cache.propose_into(DraftBatch.of_size(2, 8), "ab", np.array([8], np.int32))


def test_budgets_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="shared_cache_tokens must lie in"):
        SuffixCache(shared_cache_tokens=-1)
    with pytest.raises(ValueError, match="namespace_tokens must lie in"):
        SuffixCache(namespace_tokens=2**40)


def test_proposing_releases_the_gil() -> None:
    cache = SuffixCache(background=False)
    rng = np.random.default_rng(0)
    rids = list(range(512))
    for rid in rids:
        cache.start(rid, rng.integers(0, 20, 1_000).astype(np.int32))
    batch = DraftBatch.of_size(len(rids), 64)
    limits = np.full(len(rids), 64, np.int32)
    is_done = threading.Event()
    num_turns = 0

    def count() -> None:
        nonlocal num_turns
        while not is_done.is_set():
            num_turns += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)  # only who gives the GIL away lets the other run
    thread = threading.Thread(target=count)
    try:
        thread.start()
        before = num_turns
        for _ in range(50):
            cache.propose_into(batch, rids, limits, is_tree=True)
        during = num_turns - before
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        thread.join()
    assert during > 0


def test_deterministic_drafts_do_not_depend_on_the_indexing_thread() -> None:
    rng = np.random.default_rng(5)
    caches = [SuffixCache(deterministic=True), SuffixCache(background=False)]
    batches = [DraftBatch.of_size(1, 32) for _ in caches]
    prompt = rng.integers(0, 30, 20_000, dtype=np.int32)
    for turn in range(4):
        prompt = np.concatenate([prompt, rng.integers(0, 30, 900, dtype=np.int32)])
        output = rng.integers(0, 30, 3_000, dtype=np.int32)
        for cache, batch in zip(caches, batches, strict=True):
            cache.start(turn, prompt)
            cache.propose_into(batch, [turn], np.array([32], np.int32), is_tree=True)
            cache.commit([turn], [output])
            cache.finish(turn, keep=True)
        for array in ("token_ids", "parents", "probs", "num_nodes", "matches"):
            first, second = (getattr(batch, array) for batch in batches)
            assert np.array_equal(first, second)


def test_what_a_request_brings_along_is_not_indexed_at_another_table_size() -> None:
    # A retracted request starts with its prompt and goes on with its output at once: the thread
    # may come to the prompt before that or after. How large the tables are decides what is found.
    rng = np.random.default_rng(6)
    for turn in range(60):
        drafts = []
        text = rng.integers(0, 1_000, 1_300, dtype=np.int32)
        passage = text[:30].copy()
        for place in rng.integers(30, 1_200, 12):
            text[place : place + 30] = passage
        text[-8:] = passage[10:18]
        for cache in (SuffixCache(deterministic=True), SuffixCache(background=False)):
            cache.start(turn, text[:900])
            cache.commit([turn], [text[900:]])
            batch = DraftBatch.of_size(1, 64)
            cache.propose_into(batch, [turn], np.array([64], np.int32), is_tree=True)
            num = int(batch.num_nodes[0])
            drafts.append((batch.token_ids[0, :num].tolist(), batch.probs[0, :num].tolist()))
        assert drafts[0] == drafts[1]


def test_namespaces_of_one_short_output_are_bounded() -> None:
    cache = SuffixCache(shared_cache_tokens=51_200, background=False)
    for number in range(2_000):
        cache.start(number, [1, 2, 3], namespace=f"salt {number}")
        cache.commit([number], [[4, 5]])
        cache.finish(number, keep=True)
        if number % 200 == 0:
            cache.check()
    stats = cache.stats()
    assert stats.num_shared_requests == 100  # one namespace for 512 tokens of the budget
    assert stats.num_bytes < 10_000_000
    cache.start("again", [4], namespace="salt 1999")
    assert propose(cache, ["again"], 4)[0] is not None  # the latest stayed


def test_a_flood_of_small_namespaces_displaces_its_own() -> None:
    cache = SuffixCache(shared_cache_tokens=51_200, background=False)
    for number in range(40):
        cache.start(number, [1], namespace="large")
        cache.finish(number, keep=True, output_ids=np.arange(1_000, dtype=np.int32))
    for number in range(2_000):
        cache.start(number, [1], namespace=f"salt {number}")
        cache.finish(number, keep=True, output_ids=[4, 5])
        if number % 200 == 0:
            cache.check()
    cache.check()
    assert cache.stats().num_shared_tokens == 40 * 1_000 + 99 * 2
    cache.start("again", [7, 8], namespace="large")
    assert proposed(cache, "again", 2) == [9, 10]


def test_of_too_many_small_namespaces_the_idle_ones_lose_what_they_have() -> None:
    cache = SuffixCache(shared_cache_tokens=32_768, background=False)
    for number in range(64):
        cache.start(number, [1], namespace=f"idle {number}")
        cache.finish(number, keep=True, output_ids=np.arange(300, dtype=np.int32))
    for number in range(10):
        for name in ("one", "other"):
            cache.start("again", [7, 8], namespace=name)
            assert proposed(cache, "again", 2) == ([9, 10] if number else [])
            cache.finish("again", keep=True, output_ids=np.arange(20, dtype=np.int32))
            cache.check()
    cache.start("again", [7, 8], namespace="idle 63")
    assert proposed(cache, "again", 2) == [9, 10]
    cache.start("gone", [7, 8], namespace="idle 1")
    assert proposed(cache, "gone", 2) == []


FILL_AND_EMPTY = """
import numpy as np
from sglang_hvd.suffix_cache import SuffixCache

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

cache, before = SuffixCache(shared_cache_tokens=0, session_tokens=0), resident_bytes()
draw = np.random.default_rng(0)
for _ in range(2):
    for rid in range(400):
        cache.start(rid, draw.integers(0, 5000, 600 + 130 * rid).astype(np.int32))
    cache.drain()
    at_most = resident_bytes() - before
    for rid in range(400):
        cache.finish(rid, keep=False)
    cache.drain()
print(at_most, resident_bytes() - before)
"""


def test_the_memory_of_finished_requests_goes_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL_AND_EMPTY], capture_output=True, text=True, check=True
    )
    at_most, left = map(int, done.stdout.split())
    assert at_most > 300_000_000
    assert left < 0.1 * at_most
