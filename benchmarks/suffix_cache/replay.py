"""Tokens per step on recorded text: greedy decoding in which every step verifies a draft."""

from collections.abc import Iterable

import numpy as np

from benchmarks.suffix_cache.contestants import Contestant
from sglang_hvd.traces.trace import Trace


def tokens_per_step(cache: Contestant, traces: Iterable[Trace]) -> float:
    """Generated tokens per verification step, bonus token included. Traces run one by one."""
    num_tokens = num_steps = 0
    for rid, trace in enumerate(traces):
        output = trace.output_ids
        cache.start(rid, trace.prompt_ids)
        cache.drain()
        position = 0
        while position < len(output):
            cache.propose([rid])
            accepted = cache.accepted(0, output[position : position + 64])
            step = output[position : position + accepted + 1]
            cache.commit([rid], step[None], np.array([len(step)], np.int32))
            position += len(step)
            num_steps += 1
        num_tokens += len(output)
        cache.finish(rid)
        cache.drain()
    return num_tokens / num_steps
