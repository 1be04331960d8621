"""What the suffix cache costs on the host: time per committed token and per proposal.

The text is an edited document: each output repeats the prompt with a few tokens changed, so that
most positions have a match. Times are the best of several runs, on one core.
"""

import random
import time
from collections.abc import Callable

import numpy as np

from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.suffix_cache._native import accepted_lengths

VOCABULARY = 32_000
PROMPT_TOKENS = 4_000
TOKENS_PER_CYCLE = 4
NUM_REQUESTS = 16
NUM_RUNS = 5
MAX_DRAFT_TOKENS = 32


def edited_document(rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt and an output that repeats it with one token in fifty changed."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
    output = [rng.randrange(VOCABULARY) if rng.random() < 0.02 else token for token in prompt]
    return prompt, output


def best_seconds(action: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return min(once() for _ in range(NUM_RUNS))


def cache_costs(num_shared_tokens: int) -> tuple[float, float]:
    """Microseconds per committed token and per proposal of a batch, behind a warm shared cache."""
    rng = random.Random(0)
    cache = SuffixCache(shared_cache_tokens=num_shared_tokens)
    for finished in range(num_shared_tokens // PROMPT_TOKENS):
        prompt, output = edited_document(rng)
        cache.start(finished, prompt)
        cache.finish(finished, keep=True, output_ids=output)
    documents = {f"active-{row}": edited_document(rng) for row in range(NUM_REQUESTS)}
    for rid, (prompt, _) in documents.items():
        cache.start(rid, prompt)
    rids = list(documents)
    position = MAX_DRAFT_TOKENS  # long enough a match for a draft of full length
    cache.commit(rids, [documents[rid][1][:position] for rid in rids])

    def commit() -> None:
        nonlocal position
        position += TOKENS_PER_CYCLE
        committed = slice(position - TOKENS_PER_CYCLE, position)
        cache.commit(rids, [documents[rid][1][committed] for rid in rids])

    per_token = best_seconds(commit) / (NUM_REQUESTS * TOKENS_PER_CYCLE)
    per_proposal = best_seconds(lambda: cache.propose(rids, MAX_DRAFT_TOKENS)) / NUM_REQUESTS
    return per_token * 1e6, per_proposal * 1e6


def label_cost() -> float:
    """Nanoseconds per replay label, for a draft at every position of one output."""
    rng = random.Random(0)
    prompt, output = edited_document(rng)
    sequence = np.array(output + [0] * MAX_DRAFT_TOKENS, np.int32)
    source = np.array(prompt + [0] * MAX_DRAFT_TOKENS, np.int32)
    positions = np.arange(PROMPT_TOKENS, dtype=np.int64)
    drafts = np.lib.stride_tricks.sliding_window_view(source, MAX_DRAFT_TOKENS)[:PROMPT_TOKENS]
    draft_tokens = np.ascontiguousarray(drafts)
    draft_lengths = np.full(PROMPT_TOKENS, MAX_DRAFT_TOKENS, np.int32)
    seconds = best_seconds(
        lambda: accepted_lengths(draft_tokens, draft_lengths, positions, sequence)
    )
    return seconds / PROMPT_TOKENS * 1e9


def main() -> None:
    print(f"{NUM_REQUESTS} requests with prompts of {PROMPT_TOKENS} tokens")
    for num_shared_tokens in (0, 100_000):
        per_token, per_proposal = cache_costs(num_shared_tokens)
        print(
            f"shared cache of {num_shared_tokens:>7,} tokens: "
            f"commit {per_token:6.2f} us/token, propose {per_proposal:8.1f} us/request"
        )
    print(f"replay label (native): {label_cost():.0f} ns/draft")


if __name__ == "__main__":
    main()
