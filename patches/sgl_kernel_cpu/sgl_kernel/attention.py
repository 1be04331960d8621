"""Attention over the paged KV cache: decode, and extend with an optional verify-tree mask.

Attention is computed in float64 and rounded once. Rounding hides the order of the keys and the
number of queries and requests that are computed together, except for about one value in 1e8. So a
token has the same attention output, to the last bit, in a decode step, a verify step (chain or
tree) and a prefill, alone or in a batch. In float32, logits would differ by about 1e-6, and near
ties would break greedy decoding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Keys: contexts that need equally many blocks are padded to the longest of them and share a call.
# Queries: a longer prefill is cut, so that the mask stays small.
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Queries that one attention call serves: T of each request, contexts padded to L keys.

    A long prefill appears as several requests of up to _BLOCK queries.

    query_rows: int64[num_requests * T], their rows of the query tensor. slots: int32[num_requests *
    L], KV slots of the contexts; what lies past the end is masked. bias: float[num_requests, 1, T,
    L], 0 where a query sees a key, -inf where not; its dtype is the one attention is computed in.
    """

    num_requests: int
    query_rows: Tensor
    slots: Tensor
    bias: Tensor


def plan_attention(
    *,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor,
    tree_mask: Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> list[RequestGroup]:
    """Group the requests of a batch; all layers of a forward pass can share the result.

    req_to_token, req_pool_indices: as in `sgl_kernel.kv_cache`. seq_lens: int[B], tokens of each
    request, its query_lens[b] queries included; they are its last ones. tree_mask: flat
    bool[>= B * W * W], which of the W queries each one sees, if all query_lens are W; None for
    causal order.
    """
    spans: dict[tuple[int, int], list[_Span]] = {}
    num_rows = 0
    for b, (context_len, length) in enumerate(
        zip(seq_lens.tolist(), query_lens.tolist(), strict=True)
    ):
        step = _BLOCK if tree_mask is None else max(1, length)
        for done in range(0, length, step):
            num_queries = min(step, length - done)
            num_keys = context_len - length + done + num_queries
            span = _Span(b, num_rows + done, num_queries, num_keys)
            spans.setdefault((num_queries, -(-num_keys // _BLOCK)), []).append(span)
        num_rows += length

    groups = []
    for (num_queries, _), group in spans.items():
        num_keys = max(span.num_keys for span in group)
        requests = [span.request for span in group]
        query, key = torch.arange(num_queries), torch.arange(num_keys)
        prefix = torch.tensor([span.num_keys - num_queries for span in group])[:, None, None]
        if tree_mask is None:
            visible = key <= prefix + query[:, None]
        else:
            cells = query_lens.numel() * num_queries**2
            trees = tree_mask[:cells].view(-1, num_queries, num_queries)
            visible = (key < prefix).repeat(1, num_queries, 1)
            new_keys = (prefix + query).expand(-1, num_queries, -1)
            visible.scatter_(2, new_keys, trees[requests])
        first = torch.tensor([span.first_row for span in group])[:, None]
        groups.append(
            RequestGroup(
                num_requests=len(group),
                query_rows=(first + query).flatten(),
                slots=req_to_token[req_pool_indices[requests], :num_keys].flatten(),
                bias=torch.zeros(visible.shape, dtype=dtype)
                .masked_fill_(~visible, -torch.inf)
                .unsqueeze(1),
            )
        )
    return groups


def attend(
    plan: Sequence[RequestGroup],
    *,
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    sm_scale: float,
) -> None:
    """Attention of one layer.

    q, o: float[num_rows, num_heads, head_dim], o written. k_buffer, v_buffer: float[num_slots,
    num_kv_heads, head_dim].
    """
    for group in plan:
        dtype = group.bias.dtype
        out = F.scaled_dot_product_attention(
            _heads_first(q.index_select(0, group.query_rows).to(dtype), group),
            _heads_first(_KEYS.gather(k_buffer, group.slots, dtype), group),
            _heads_first(_VALUES.gather(v_buffer, group.slots, dtype), group),
            attn_mask=group.bias,
            scale=sm_scale,
            enable_gqa=q.shape[1] != k_buffer.shape[1],
        )
        o.index_copy_(0, group.query_rows, out.transpose(1, 2).flatten(0, 1).to(o.dtype))


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    *,
    planner: Callable[..., Sequence[RequestGroup]] = plan_attention,
) -> None:
    """Store one new key and value per request, then attend one query per request to its context.

    q, o: float[B, num_heads, head_dim], o written. k_buffer, v_buffer: float[num_slots,
    num_kv_heads, head_dim]. key, value: float[B, num_kv_heads, head_dim] or None, stored at slots
    loc int64[B]. seq_lens: int64[B], the new token included. attn_logits: scratch space of the
    compiled operator, not used. planner: `plan_attention`, or something that keeps its result.
    """
    _refuse_unsupported(k_scale, v_scale, logit_cap, is_cross_attention, sliding_window, sinks)
    _store(k_buffer, loc, key)
    _store(v_buffer, loc, value)
    plan = planner(
        req_to_token=req_to_token,
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        query_lens=torch.ones_like(seq_lens),
        tree_mask=None,
    )
    attend(plan, q=q, k_buffer=k_buffer, v_buffer=v_buffer, o=o, sm_scale=sm_scale)


def extend_attention_cpu(
    q: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
    *,
    planner: Callable[..., Sequence[RequestGroup]] = plan_attention,
) -> None:
    """Attend the last extend_seq_lens[b] tokens of each request to its context and to one another.

    q, o: float[sum of extend_seq_lens, num_heads, head_dim], request after request, o written. Keys
    and values are read from the buffers, where the caller has stored the new ones too. seq_lens:
    int64[B], the new tokens included. tree_mask: as in `plan_attention`.
    """
    _refuse_unsupported(k_scale, v_scale, logit_cap, is_cross_attention, sliding_window, sinks)
    if not is_causal:
        raise NotImplementedError("sgl_kernel (CPU): encoders are not supported without a GPU")
    plan = planner(
        req_to_token=req_to_token,
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        query_lens=extend_seq_lens,
        tree_mask=tree_mask,
    )
    attend(plan, q=q, k_buffer=k_buffer, v_buffer=v_buffer, o=o, sm_scale=sm_scale)


def _store(buffer: Tensor, loc: Tensor, new: Tensor | None) -> None:
    """Write new: float[B, ...] to slots loc: int64[B] of buffer, if there is anything new."""
    if new is not None:
        buffer.index_copy_(0, loc, new.view(-1, *buffer.shape[1:]))


def _refuse_unsupported(
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    sinks: Tensor | None,
) -> None:
    """Raises NotImplementedError for a model whose attention is not implemented here."""
    for feature, is_asked in (
        ("a scaled KV cache", k_scale != 1.0 or v_scale != 1.0),
        ("logit capping", logit_cap > 0),
        ("cross attention", is_cross_attention),
        ("sliding-window attention", sliding_window > 0),
        ("attention sinks", sinks is not None),
    ):
        if is_asked:
            raise NotImplementedError(f"sgl_kernel (CPU): {feature} is not supported without a GPU")


class _Span(NamedTuple):
    """Consecutive queries of one request, and the keys up to the last of them."""

    request: int
    first_row: int
    num_queries: int
    num_keys: int


def _heads_first(rows: Tensor, group: RequestGroup) -> Tensor:
    """float[num_requests * N, H, D] as float[num_requests, H, N, D]."""
    return rows.view(group.num_requests, -1, *rows.shape[1:]).transpose(1, 2)


class _Gathered:
    """Memory for gathered keys or values, kept between calls.

    Allocating it each time costs ten times the copy, because the system gives and takes back
    megabytes.
    """

    def __init__(self) -> None:
        self._stored = self._converted = torch.empty(0)

    def gather(self, buffer: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """buffer: [num_slots, H, D], slots: int[N]. Returns dtype[N, H, D], good until the next
        call.
        """
        shape = (slots.numel(), *buffer.shape[1:])
        self._stored = _at_least(self._stored, shape, buffer.dtype)
        stored = self._stored[: math.prod(shape)].view(slots.numel(), -1)
        torch.index_select(buffer.view(buffer.shape[0], -1), 0, slots, out=stored)
        if dtype == buffer.dtype:
            return stored.view(shape)
        self._converted = _at_least(self._converted, shape, dtype)
        return self._converted[: math.prod(shape)].view(shape).copy_(stored.view(shape))


def _at_least(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if memory.dtype == dtype and memory.numel() >= math.prod(shape):
        return memory
    with torch.inference_mode(False):  # usable in either mode
        return torch.empty(math.prod(shape), dtype=dtype)


_KEYS, _VALUES = _Gathered(), _Gathered()

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, "
    "float v_scale, Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, "
    "Tensor(d!) attn_logits, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
    "Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_LIBRARY.define(
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, "
    "Tensor(a!) o_extend, Tensor k_buffer, Tensor v_buffer, float k_scale, float v_scale, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, "
    "Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, "
    "Tensor? tree_mask, bool is_causal) -> ()"
)
_LIBRARY.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
_LIBRARY.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
