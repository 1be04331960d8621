"""Cycles of a reply, as SGLang's responses tell them."""

from typing import Any

import pytest

from sglang_hvd.demo.reply_cycles import ReplyCycles


@pytest.mark.parametrize(
    ("meta_info", "num_tokens", "found"),
    [
        ({"hvd": None}, 5, ReplyCycles(4, 0, 0)),
        ({}, 1, ReplyCycles(0, 0, 0)),
        ({"spec_verify_ct": 2, "spec_num_correct_drafts": 3}, 6, ReplyCycles(2, 3, 0)),
        # Of four tokens of the last cycle two are the reply's; the first cycle had three and a
        # bonus token.
        ({"spec_verify_ct": 2, "spec_num_correct_drafts": 7}, 7, ReplyCycles(2, 5, 0)),
        (
            {"spec_verify_ct": 3, "hvd": [{"num_cache_cycles": 1, "num_both_cycles": 2}]},
            9,
            ReplyCycles(3, 0, 3),
        ),
    ],
)
def test_draft_tokens_behind_the_end_are_not_accepted(
    meta_info: dict[str, Any], num_tokens: int, found: ReplyCycles
) -> None:
    assert ReplyCycles.of(meta_info, num_tokens) == found
