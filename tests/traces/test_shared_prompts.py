"""Traces that share memory hold what they held."""

from hypothesis import given

from sglang_hvd.traces.trace import Trace, share_prompts
from tests.traces.made_up import some_traces, trace, values_of


@given(some_traces())
def test_traces_stay_the_same(made: list[Trace]) -> None:
    assert values_of(list(share_prompts(made))) == values_of(made)


def test_a_long_session_takes_memory_by_its_length() -> None:
    prompts = [list(range(10 * turn)) for turn in range(1, 101)]
    shared = list(share_prompts(trace(prompt, [1]) for prompt in prompts))
    buffers = {id(one.prompt_ids.base): one.prompt_ids.base for one in shared}
    assert sum(len(buffer) for buffer in buffers.values() if buffer is not None) <= 4 * 1000


def test_a_prompt_that_goes_on_otherwise_leaves_earlier_ones_alone() -> None:
    prompts = [[1, 2], [1, 2, 3, 4], [1, 2, 9], [1, 2, 9, 5]]
    shared = list(share_prompts([trace(prompt, [7]) for prompt in prompts]))
    assert [one.prompt_ids.tolist() for one in shared] == prompts
