"""Drafts and scores are those of ArcticInference 0.3.0, bit for bit: the oracle's and the native
cache's. Its suffix tree is built for the test, as for the benchmark."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.suffix_cache import peer
from sglang_hvd.replay.core.single_cycles import CacheDraft
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.traces.text_traces import read_text_traces, tokenize
from sglang_hvd.traces.tokenizer_json import load_tokenizer
from sglang_hvd.types import TokenIds
from tests.suffix_cache.oracle.cache import OracleCache
from tests.suffix_cache.proposed_drafts import propose

pytestmark = (
    pytest.mark.slow
)  # it builds ArcticInference; the oracle is what every run compares with


@pytest.fixture(scope="module")
def arctic(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    try:
        return peer.load(tmp_path_factory.mktemp("arctic"))._C
    except peer.PeerUnavailableError as reason:
        pytest.skip(f"ArcticInference {peer.VERSION} cannot be built: {reason}")


class Peer:
    """ArcticInference's two trees for one request, used as its cache.py does."""

    def __init__(self, arctic: ModuleType, shared: Any, max_depth: int, prompt: TokenIds) -> None:
        self.own, self.shared, self.max_depth = arctic.SuffixTree(max_depth), shared, max_depth
        self.tokens: list[int] = []
        self.commit(prompt)

    def commit(self, token_ids: TokenIds) -> None:
        self.own.extend_ndarray(0, np.ascontiguousarray(token_ids))
        self.tokens = [*self.tokens[-self.max_depth :], *token_ids.tolist()]

    def propose(self, *limits: float) -> tuple[list[int], int, float, str] | None:
        context = np.array(self.tokens[-self.max_depth :], dtype=np.int32)
        own = self.own.speculate_ndarray(context, *limits, False)
        shared = self.shared.speculate_ndarray(context, *limits, False)
        draft, source = (own, "request") if own.score >= shared.score else (shared, "shared")
        if not draft.token_ids:
            return None
        return draft.token_ids, draft.match_len, draft.score, source


def as_tuple(draft: CacheDraft | None) -> tuple[list[int], int, float, str] | None:
    if draft is None:
        return None
    return draft.token_ids.tolist(), draft.match_len, draft.score, draft.source


@pytest.mark.parametrize("seed", range(60))
def test_drafts_on_random_streams_are_arctics(arctic: ModuleType, seed: int) -> None:
    random = np.random.default_rng(seed)
    max_depth, vocab = int(random.choice([2, 3, 8, 64])), int(random.choice([1, 2, 3, 8, 30]))
    max_tokens, factor, offset, min_prob = (
        int(random.choice([64, 8, 3])),
        float(random.choice([0.3, 1.0, 4.0])),
        float(random.choice([0, -1, 1.5])),
        float(random.choice([0, 0.1, 0.4])),
    )
    limits = {
        "max_depth": max_depth,
        "max_draft_tokens": max_tokens,
        "max_spec_factor": factor,
        "max_spec_offset": offset,
        "min_token_prob": min_prob,
    }
    caches = [OracleCache(**limits), SuffixCache.as_in_paper(**limits)]
    shared = arctic.SuffixTree(max_depth)

    def stream(max_len: int) -> TokenIds:
        return random.integers(0, vocab, int(random.integers(1, max_len)), dtype=np.int32)

    for finished in range(int(random.integers(0, 4))):
        output = stream(60)
        for cache in caches:
            cache.start(finished, [])
            cache.finish(finished, keep=True, output_ids=output)
        shared.extend_ndarray(finished, output)
    prompt = stream(150)
    for cache in caches:
        cache.start("r", prompt)
    arctics = Peer(arctic, shared, max_depth, prompt)
    for _ in range(15):
        expected = arctics.propose(max_tokens, factor, offset, min_prob)
        committed = stream(4)
        for cache in caches:
            assert as_tuple(propose(cache, ["r"], 64)[0]) == expected
            cache.commit(["r"], [committed])
        arctics.commit(committed)


@pytest.mark.parametrize(
    "name", ["structured_tool__spider_intercode_gpt4", "open_chat__mtbench_specbench_vicuna"]
)
def test_drafts_on_recorded_generations_are_arctics(
    arctic: ModuleType, traces_dir: Path, tokenizer_file: Path, name: str
) -> None:
    lines = list(read_text_traces(traces_dir / f"{name}.jsonl"))[:60]
    caches, shared = [OracleCache(), SuffixCache.as_in_paper()], arctic.SuffixTree(64)
    tokenizer = load_tokenizer(tokenizer_file)
    num_drafts = 0
    for index, trace in enumerate(tokenize(iter(lines), tokenizer, eos_token_id=None)):
        for cache in caches:
            cache.start("r", trace.prompt_ids)
        arctics = Peer(arctic, shared, 64, trace.prompt_ids)
        for position in range(0, len(trace.output_ids), 4):
            expected = arctics.propose(64, 1.0, 0.0, 0.1)
            num_drafts += expected is not None
            committed = trace.output_ids[position : position + 4]
            for cache in caches:
                assert as_tuple(propose(cache, ["r"], 64)[0]) == expected
                cache.commit(["r"], [committed])
            arctics.commit(committed)
        for cache in caches:
            cache.finish("r", keep=True)
        shared.extend_ndarray(index, trace.output_ids)
    assert num_drafts > 100
