"""Every feature has exactly its documented value."""

import numpy as np

from sglang_hvd.payoff import (
    FEATURE_NAMES,
    DecodeState,
    RequestHistory,
    TokenClasses,
    build_features,
)
from sglang_hvd.types import CacheDraft

CLASSES = TokenClasses.from_strings(["word", " ", "\n", "(", ",", "."])


def draft(*token_ids: int, match_len: int = 3, score: float = 1.25) -> CacheDraft:
    return CacheDraft(np.array(token_ids, dtype=np.int32), match_len, score, "request")


def state(prompt_len: int, generated_len: int, *cycles: int | None) -> DecodeState:
    history = RequestHistory(4)
    for cycle in cycles:
        history.record(cycle)
    return DecodeState(prompt_len, generated_len, history)


def named(row: np.ndarray) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, row.tolist(), strict=True))


def test_the_names_and_their_order_are_fixed() -> None:
    # Predictor files state them: a change here makes every trained predictor useless.
    assert FEATURE_NAMES == (
        "score",
        "match_len",
        "draft_len",
        "log_prompt_len",
        "log_generated_len",
        "relative_position",
        "recent_cache_rate",
        "recent_mean_accepted",
        "recent_last_accepted",
        "whitespace",
        "punctuation",
        "line_break",
        "bracket",
        "delimiter",
    )


def test_values_are_those_of_the_definitions() -> None:
    [row] = build_features([draft(0, 2, 3, 4)], [state(30, 10, None, 6, 3, None)], CLASSES)
    assert named(row) == {
        "score": 1.25,
        "match_len": 3,
        "draft_len": 4,
        "log_prompt_len": np.float32(np.log(31)),
        "log_generated_len": np.float32(np.log(11)),
        "relative_position": 0.25,
        "recent_cache_rate": 0.5,
        "recent_mean_accepted": 4.5,
        "recent_last_accepted": 3,
        "whitespace": 0.25,
        "punctuation": 0.5,
        "line_break": 0.25,
        "bracket": 0.25,
        "delimiter": 0.25,
    }


def test_a_request_without_prompt_or_output_has_finite_features() -> None:
    features = build_features([draft(5), draft(5)], [state(0, 2), state(2, 0)], CLASSES)
    assert np.isfinite(features).all()


def test_a_row_does_not_depend_on_the_batch() -> None:
    drafts = [draft(*range(1 + n % 5), match_len=n, score=n / 7) for n in range(1, 20)]
    states = [state(n, 3 * n, n, None) for n in range(1, 20)]
    features = build_features(drafts, states, CLASSES)
    assert features.dtype == np.float32
    for row, one_draft, one_state in zip(features, drafts, states, strict=True):
        assert (build_features([one_draft], [one_state], CLASSES)[0] == row).all()


def test_no_drafts_give_no_rows() -> None:
    assert build_features([], [], CLASSES).shape == (0, len(FEATURE_NAMES))
