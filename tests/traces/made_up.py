"""Traces made up for tests, and what they hold as plain values."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sglang_hvd.traces.trace import Trace

HEADER = {"model": "a model", "tokenizer_fingerprint": "0123456789abcdef"}


def trace(prompt: Sequence[int], output: Sequence[int], **others: Any) -> Trace:
    """A trace of these token ids; the rest is made up unless given."""
    values = {"session": "s", "turn": 0, "family": "chat", **HEADER, **others}
    return Trace(np.array(prompt, np.int32), np.array(output, np.int32), **values)


def values_of(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """What can be compared; arrays must be int32."""
    rows = []
    for one in traces:
        assert one.prompt_ids.dtype == one.output_ids.dtype == np.int32
        row = {field.name: getattr(one, field.name) for field in fields(Trace)}
        rows.append(
            {**row, "prompt_ids": one.prompt_ids.tolist(), "output_ids": one.output_ids.tolist()}
        )
    return rows


_token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@st.composite
def some_traces(draw: st.DrawFn) -> list[Trace]:
    """Sessions side by side: turns that go on with all, some or nothing of their session."""
    texts: dict[str, list[int]] = {}
    made = []
    for _ in range(draw(st.integers(0, 12))):
        session = draw(st.sampled_from(["x", "y", "\u00e9\n"]))
        before = texts.get(session, [])
        kept = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        prompt, output = kept + draw(_token_ids), draw(_token_ids)
        has_prompt = draw(st.integers(0, 4)) > 0
        texts[session] = prompt + output
        sampling = draw(st.sampled_from([{}, {"temperature": 0.7, "top_p": 0.95, "top_k": 20}]))
        made.append(
            trace(
                prompt if has_prompt else [],
                output,
                session=session,
                turn=len(made),
                family=draw(st.sampled_from(["chat", "recorded"])),
                sampling=sampling,
                namespace=draw(st.sampled_from(["", "a tenant"])),
                is_cut=draw(st.booleans()),
                has_prompt=has_prompt,
            )
        )
    return made
