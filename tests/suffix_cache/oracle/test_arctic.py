"""Drafts and scores are those of ArcticInference 0.3.0, bit for bit.

HVD_ARCTIC_SDIST names its sdist (`pip download --no-deps --no-binary :all:
arctic-inference==0.3.0`); only the suffix tree is built, into a temporary folder.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sglang_hvd.replay.traces import load_tokenizer, read_text_traces, tokenize
from sglang_hvd.types import CacheDraft, TokenIds
from tests.suffix_cache.oracle.cache import OracleCache


@pytest.fixture(scope="module")
def arctic(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    sdist = os.environ.get("HVD_ARCTIC_SDIST")
    if not sdist:
        pytest.skip("HVD_ARCTIC_SDIST is not set: it names the sdist of arctic-inference 0.3.0")
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not there to build arctic-inference's suffix tree")
    folder = tmp_path_factory.mktemp("arctic")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.glob("*/csrc/suffix_decoding")
    build = folder / "build"
    for command in (
        ["cmake", "-S", source, "-B", build, f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", build, "--parallel"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    [library] = build.glob("_C.*.so")
    spec = importlib.util.spec_from_file_location("_C", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    cache = OracleCache(
        max_depth=max_depth,
        max_draft_tokens=max_tokens,
        max_spec_factor=factor,
        max_spec_offset=offset,
        min_token_prob=min_prob,
    )
    shared = arctic.SuffixTree(max_depth)

    def stream(max_len: int) -> TokenIds:
        return random.integers(0, vocab, int(random.integers(1, max_len)), dtype=np.int32)

    for finished in range(int(random.integers(0, 4))):
        output = stream(60)
        cache.start(finished, [])
        cache.finish(finished, keep=True, output_ids=output)
        shared.extend_ndarray(finished, output)
    prompt = stream(150)
    cache.start("r", prompt)
    peer = Peer(arctic, shared, max_depth, prompt)
    for _ in range(15):
        assert as_tuple(cache.propose(["r"], 64)[0]) == peer.propose(
            max_tokens, factor, offset, min_prob
        )
        committed = stream(4)
        cache.commit(["r"], [committed])
        peer.commit(committed)


@pytest.mark.parametrize(
    "name", ["structured_tool__spider_intercode_gpt4", "open_chat__mtbench_specbench_vicuna"]
)
def test_drafts_on_recorded_generations_are_arctics(
    arctic: ModuleType, traces_dir: Path, tokenizer_file: Path, name: str
) -> None:
    lines = list(read_text_traces(traces_dir / f"{name}.jsonl"))[:60]
    cache, shared = OracleCache(), arctic.SuffixTree(64)
    tokenizer = load_tokenizer(tokenizer_file)
    num_drafts = 0
    for index, trace in enumerate(tokenize(iter(lines), tokenizer, eos_token_id=None)):
        cache.start("r", trace.prompt_ids)
        peer = Peer(arctic, shared, 64, trace.prompt_ids)
        for position in range(0, len(trace.output_ids), 4):
            draft = as_tuple(cache.propose(["r"], 64)[0])
            assert draft == peer.propose(64, 1.0, 0.0, 0.1)
            num_drafts += draft is not None
            committed = trace.output_ids[position : position + 4]
            cache.commit(["r"], [committed])
            peer.commit(committed)
        cache.finish("r", keep=True)
        shared.extend_ndarray(index, trace.output_ids)
    assert num_drafts > 100
