"""A cost table derived from a GPU's memory bandwidth and arithmetic instead of measurements.

    python -m benchmarks.roofline > configs/costs/llama-3.1-8b-h100.yaml

An 8B model with grouped-query attention (32 layers, 8 of 32 heads for keys and values, each 128
wide) in bfloat16, and an EAGLE3 drafter of one layer with a vocabulary of 32,000, on an H100 SXM:
3.35 TB/s and 989 Tflop/s (NVIDIA's data sheet), of which a step reaches 85 % and 60 %. Each request
has 2,048 tokens in the KV cache. Reading and computing overlap: together they take
(reading^4 + computing^4)^(1/4). A target step and a drafter round also have a fixed time for
launches, sampling and selection.

Two published figures confirm the table (LMSYS, SGLang with Llama-3.1-8B on an H100, MT-Bench, batch
size 1): 158 tokens/s, or 6.3 ms a step, without speculation, and 373 tokens/s with EAGLE3.
"""

from collections.abc import Sequence

from benchmarks.command import parser_of, run
from sglang_hvd.costs import StepCosts

_BYTES_PER_MS = 3.35e12 * 0.85 / 1e3
_FLOPS_PER_MS = 989e12 * 0.60 / 1e3
_CONTEXT = 2048

_TARGET_PARAMETERS = 8.03e9
_KV_BYTES = 2 * 32 * 8 * 128 * 2  # per token
_ATTENTION_FLOPS = 4 * 32 * 32 * 128  # per token and token of the context
_TARGET_LAUNCH = 0.6  # ms

_ROUND_PARAMETERS = 0.374e9  # the drafter's layer and its vocabulary
_EXTEND_PARAMETERS = 0.293e9  # its layer and the fusion of the target's hidden states
_HEAD_PARAMETERS = 0.131e9
_ROUND_LAUNCH = 0.15  # ms
_TOPK = 8

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)


def main(arguments: Sequence[str] | None = None) -> int:
    parser_of("roofline", "Print a derived table of step costs.").parse_args(arguments)
    print("# Written by `python -m benchmarks.roofline`.")
    print(h100().to_yaml(), end="")
    return 0


def h100() -> StepCosts:
    """The table of the model and the GPU above."""
    return StepCosts(
        about="Llama-3.1-8B bf16 with EAGLE3 on an H100, 2048 tokens of context; derived from "
        "bandwidth and arithmetic, not measured",
        batch_sizes=_BATCH_SIZES,
        widths=_WIDTHS,
        verify=tuple(tuple(round(_verify(b, w), 3) for w in _WIDTHS) for b in _BATCH_SIZES),
        draft_round=tuple(round(_draft_round(b), 3) for b in _BATCH_SIZES),
        draft_extend=tuple(
            tuple(round(_draft_extend(b, w), 3) for w in _WIDTHS) for b in _BATCH_SIZES
        ),
    )


def _verify(batch_size: int, width: int) -> float:
    num_tokens = batch_size * width
    reading = (2 * _TARGET_PARAMETERS + batch_size * _CONTEXT * _KV_BYTES) / _BYTES_PER_MS
    flops_per_token = 2 * _TARGET_PARAMETERS + _CONTEXT * _ATTENTION_FLOPS
    return _TARGET_LAUNCH + _overlapped(reading, num_tokens * flops_per_token / _FLOPS_PER_MS)


def _draft_round(batch_size: int) -> float:
    reading = (2 * _ROUND_PARAMETERS + batch_size * _CONTEXT * _KV_BYTES / 32) / _BYTES_PER_MS
    computing = batch_size * _TOPK * 2 * _ROUND_PARAMETERS / _FLOPS_PER_MS
    return _ROUND_LAUNCH + _overlapped(reading, computing)


def _draft_extend(batch_size: int, width: int) -> float:
    parameters = _EXTEND_PARAMETERS + _HEAD_PARAMETERS
    reading = (2 * parameters + batch_size * _CONTEXT * _KV_BYTES / 32) / _BYTES_PER_MS
    flops = batch_size * (width * 2 * _EXTEND_PARAMETERS + 2 * _HEAD_PARAMETERS)
    return _ROUND_LAUNCH + _overlapped(reading, flops / _FLOPS_PER_MS)


def _overlapped(reading: float, computing: float) -> float:
    return float((reading**4 + computing**4) ** 0.25)


if __name__ == "__main__":
    run(main)
