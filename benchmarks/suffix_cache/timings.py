"""Time and memory of a cache under synthetic load."""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.suffix_cache import peer
from benchmarks.suffix_cache.contestants import Arctic, Contestant, Ours
from sglang_hvd.types import TokenIds

NUM_REQUESTS = 64
RESPONSE_TOKENS = 8_000
TOKENS_PER_STEP = 3
_VOCABULARY = 150_000


def text(num_tokens: int, seed: int) -> TokenIds:
    """Text that repeats itself: runs of earlier text between new runs of Zipf tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.zipf(1.3, num_tokens), _VOCABULARY).astype(np.int32)
    at = 64
    while at < num_tokens:
        run = min(int(rng.geometric(1 / 24)), num_tokens - at)
        if rng.random() < 0.6:
            source = int(rng.integers(0, max(at - run, 1)))
            tokens[at : at + run] = tokens[source : source + run]
        at += run
    return tokens


def append_us_per_token(cache: Contestant) -> float:
    tokens = text(100_000, seed=1).reshape(-1, 1, 1_000)
    lengths = np.array([1_000], np.int32)
    # A longer prompt would still be indexed in the background, and the commits with it.
    cache.start(0, tokens[0, 0, :1])
    cache.drain()

    def append() -> None:
        for piece in tokens:
            cache.commit([0], piece, lengths)

    return _seconds(append) / tokens.size * 1e6


class Batch:
    """64 requests with prompts of 4,000 tokens and a warm shared cache. Step by step they continue
    text that the cache has partly seen."""

    def __init__(self, cache: Contestant, num_warm_tokens: int) -> None:
        self.cache = cache
        warm = text(num_warm_tokens, seed=2)
        for rid, response in enumerate(warm.reshape(-1, RESPONSE_TOKENS)):
            cache.start(-1 - rid, warm[:1])
            cache.commit([-1 - rid], response[None], np.array([RESPONSE_TOKENS], np.int32))
            cache.finish(-1 - rid)
        self.rids = list(range(NUM_REQUESTS))
        rng = np.random.default_rng(3)
        starts = rng.integers(0, num_warm_tokens - 6_000, NUM_REQUESTS)
        self._rows = np.stack([warm[start : start + 6_000] for start in starts])
        # One token in ten differs from what the cache has seen.
        changed = rng.random(self._rows.shape) < 0.1
        self._rows[changed] = rng.integers(0, _VOCABULARY, int(changed.sum()))
        for rid in self.rids:
            cache.start(rid, np.ascontiguousarray(self._rows[rid, :4_000]))
        cache.drain()
        self._at = 4_000
        self._lengths = np.full(NUM_REQUESTS, TOKENS_PER_STEP, np.int32)

    def propose(self) -> None:
        self.cache.propose(self.rids)

    def commit(self) -> None:
        step = self._rows[:, self._at : self._at + TOKENS_PER_STEP]
        self.cache.commit(self.rids, np.ascontiguousarray(step), self._lengths)
        self._at += TOKENS_PER_STEP

    def measure(self, num_steps: int) -> tuple[float, float]:
        """Medians: microseconds of a proposal per request, and milliseconds of a whole step."""
        proposals, steps = [], []
        for _ in range(num_steps):
            proposals.append(_seconds(self.propose))
            steps.append(proposals[-1] + _seconds(self.commit))
        per_request = statistics.median(proposals) / NUM_REQUESTS
        return per_request * 1e6, statistics.median(steps) * 1e3


def start_128k_ms(new_cache: Callable[[], Contestant]) -> tuple[float, float]:
    """Medians in milliseconds: of the call, and until the whole prompt is indexed."""
    prompt = text(128_000, seed=4)
    cache = new_cache()
    calls, ready = [], []
    for rid in range(7):
        begin = time.perf_counter()
        cache.start(rid, prompt)
        calls.append(time.perf_counter() - begin)
        cache.drain()
        ready.append(time.perf_counter() - begin)
    return statistics.median(calls) * 1e3, statistics.median(ready) * 1e3


def next_turn_128k_ms(new_cache: Callable[[], Contestant]) -> tuple[float, float]:
    """Like start_128k_ms for a session's next turn, whose prompt begins with the last prompt."""
    prompt = text(128_000, seed=4)
    longer = np.concatenate([prompt, text(400, seed=5)])
    cache = new_cache()
    calls, ready = [], []
    for rid in range(0, 14, 2):
        cache.start(rid, prompt)
        cache.finish(rid)
        cache.drain()
        begin = time.perf_counter()
        cache.start(rid + 1, longer)
        calls.append(time.perf_counter() - begin)
        cache.drain()
        ready.append(time.perf_counter() - begin)
    return statistics.median(calls) * 1e3, statistics.median(ready) * 1e3


def evict_8k_ms(cache: Contestant) -> float:
    """Median time to evict one response of 8,000 tokens from 512,000."""
    num_responses = 64
    for rid in range(num_responses):
        _finish_response(cache, rid)
    cache.drain()
    times = []
    for num_left in range(num_responses - 1, num_responses - 12, -1):
        num_tokens = num_left * RESPONSE_TOKENS
        times.append(_seconds(partial(cache.evict_to, num_tokens)))
    return statistics.median(times) * 1e3


def memory(peer_folder: Path | None) -> tuple[float, float]:
    """Resident bytes per token with 1,000,000 tokens of responses, and after evicting half of them.

    Measured in a process of its own. peer_folder: folder of the peer's build; None: ours.
    """
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_memory, (peer_folder,))


def _memory(peer_folder: Path | None) -> tuple[float, float]:
    num_responses = 125
    cache: Contestant = Ours() if peer_folder is None else Arctic(peer.load(peer_folder))
    _finish_response(cache, -1)
    cache.drain()
    before = _resident_bytes()
    for rid in range(num_responses):
        _finish_response(cache, rid)
    cache.drain()
    full = _resident_bytes() - before
    num_tokens = num_responses * RESPONSE_TOKENS
    cache.evict_to(num_tokens // 2)
    half = _resident_bytes() - before
    return full / num_tokens, half / (num_tokens // 2)


def _finish_response(cache: Contestant, rid: int) -> None:
    response = text(RESPONSE_TOKENS, seed=1_000 + rid)
    cache.start(rid, response[:1])
    cache.commit([rid], response[None], np.array([RESPONSE_TOKENS], np.int32))
    cache.finish(rid)


def _resident_bytes() -> int:
    gc.collect()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
