"""The table of tokens in the native core, by itself."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VOCABULARY = np.arange(1, 151_936)
NUM_TOKENS = 20_000


@pytest.fixture(scope="module")
def num_looks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[np.ndarray], int]:
    """How many entries are looked at to put these different tokens into a table, one by one."""
    program = tmp_path_factory.mktemp("token_table") / "looks"
    includes = [f"-I{ROOT / 'sglang_hvd' / at}" for at in ("suffix_cache/native", "native")]
    source = HERE / "token_table_looks.cpp"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++20", "-O1", *includes, source, "-o", program], check=True)

    def count(tokens: np.ndarray) -> int:
        text = "\n".join(map(str, tokens.tolist()))
        return int(
            subprocess.run([program], input=text, text=True, capture_output=True, check=True).stdout
        )

    return count


def test_tokens_that_others_did_not_choose_are_found_at_once(
    num_looks: Callable[[np.ndarray], int],
) -> None:
    tokens = np.random.default_rng(0).permutation(VOCABULARY)[:NUM_TOKENS]
    assert num_looks(tokens) < 2 * NUM_TOKENS


def test_tokens_chosen_for_their_places_are_found_soon(
    num_looks: Callable[[np.ndarray], int],
) -> None:
    """A prompt may be made of tokens whose places lie side by side. By steps of one each passes
    all before it, 5,700 on average; by growing ones it is 101."""
    places = (VOCABULARY.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)
    chosen = VOCABULARY[np.argsort(places)[:NUM_TOKENS]]
    assert num_looks(chosen) < 500 * NUM_TOKENS
