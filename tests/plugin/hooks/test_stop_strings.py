"""Requests end where plain serving ends them, whatever the cycles that commit their tokens."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, FINISH_MATCHED_TOKEN, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from sglang_hvd.plugin.hooks.stop_strings import end_as_plain_serving
from sglang_hvd.plugin.requests.marks import mark_held

# Longer words are tokens too: a text may spell in three tokens what the tokenizer spells in one.
WORDS = ["<end>", "a", "b", "c", "d", "ab", "bc", "abcd", "cd"]
END = 0


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    merges = [("a", "b"), ("b", "c"), ("c", "d"), ("ab", "cd")]
    model = models.BPE({word: n for n, word in enumerate(WORDS)}, merges)
    made = Tokenizer(model)
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.additional_stop_token_ids = None
    return fast


def request(tokenizer: Any, *, is_held: bool = True, **params: Any) -> Req:
    sampling = SamplingParams(temperature=0, **params)
    sampling.normalize(tokenizer)
    req = Req("1", "", array("q", [1]), sampling, vocab_size=len(WORDS))
    req.tokenizer = tokenizer
    if is_held:
        mark_held(req, None)
    return req


def ended(
    req: Req, tokens: Sequence[int], cycles: Sequence[int], update: Callable[[Req, int], None]
) -> tuple[Any, ...]:
    """Why and where it ends when its tokens are committed in cycles of these lengths."""
    rest = list(tokens)
    for num in [*cycles, *[1] * len(tokens)]:
        committed, rest = rest[:num], rest[num:]
        if not committed or req.finished():
            break
        req.output_ids.extend(committed)
        update(req, len(committed))
    if not req.finished():
        return (None, req.output_ids.tolist())
    return (req.finished_reason.to_json(), req.output_ids_through_stop.tolist())


def by_itself(req: Req, num: int) -> None:
    """SGLang without our hook, which is in place where a test before has loaded the plugins."""
    inspect.unwrap(Req.update_finish_state)(req, num)


def hooked(req: Req, num: int) -> None:
    end_as_plain_serving(inspect.unwrap(Req.update_finish_state), req, num)


STOPS = st.lists(st.sampled_from(["abc", "bcd", "ca", "b", "abcda", "dd"]), max_size=2)
PATTERNS = st.lists(st.sampled_from(["c[ab]d", "d+c$", "^b.a"]), max_size=1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=14),
    st.lists(st.integers(1, 6), max_size=8),
    STOPS,
    PATTERNS,
    st.integers(1, 14),
)
def test_cycles_do_not_change_where_a_request_ends(
    tokenizer: Any,
    tokens: list[int],
    cycles: list[int],
    stops: list[str],
    patterns: list[str],
    limit: int,
) -> None:
    params = {"stop": stops, "stop_regex": patterns, "max_new_tokens": limit}
    one_by_one = ended(request(tokenizer, **params), tokens, [], by_itself)
    assert ended(request(tokenizer, **params), tokens, cycles, hooked) == one_by_one


def test_what_plain_serving_does_not_see_ends_nothing(tokenizer: Any) -> None:
    # "abcda" is two tokens to the tokenizer, four in this text.
    tokens = [1, 2, 3, 4, 1, 4]
    params = {"stop": ["abcda"], "max_new_tokens": 50}
    assert ended(request(tokenizer, **params), tokens, [], by_itself)[0] is None
    whole = ended(request(tokenizer, **params), tokens, [6], by_itself)
    assert whole[0] == FINISH_MATCHED_STR("abcda").to_json()  # SGLang by itself
    assert ended(request(tokenizer, **params), tokens, [6], hooked)[0] is None


def test_an_end_token_comes_before_a_stop_string_behind_it(tokenizer: Any) -> None:
    tokens = [4, END, 1, 2]
    params = {"stop": ["ab"], "max_new_tokens": 50}
    reason, output_ids = ended(request(tokenizer, **params), tokens, [4], hooked)
    assert (reason, output_ids) == (FINISH_MATCHED_TOKEN(END).to_json(), [4, END])
    alone = ended(request(tokenizer, **params), tokens, [4], by_itself)
    assert alone[1] == tokens


def test_requests_of_others_are_left_alone(tokenizer: Any) -> None:
    req = request(tokenizer, is_held=False, stop=["abcda"], max_new_tokens=50)
    assert ended(req, [1, 2, 3, 4, 1, 4], [6], hooked)[0] is not None
