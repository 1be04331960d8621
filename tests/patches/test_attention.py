"""The attention output of a token does not depend on what is computed with it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel.attention import attend, extend_attention_cpu, plan_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
POOL, LENGTH = 12, 700


class Requests:
    """POOL requests of LENGTH tokens: queries float[POOL, LENGTH, H, D], and their KV cache."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        num_slots = POOL * LENGTH
        self.q = torch.randn(POOL, LENGTH, NUM_HEADS, HEAD_DIM)
        self.keys, self.values = torch.randn(2, num_slots, NUM_KV_HEADS, HEAD_DIM).unbind()
        self.table = torch.randperm(num_slots).int().view(POOL, LENGTH)

    def last_tokens(self, *spans: tuple[int, int, int]) -> list[torch.Tensor]:
        """Outputs of tokens [start, end) of each (request, start, end), in one call."""
        plan = plan_attention(
            req_to_token=self.table,
            req_pool_indices=torch.tensor([r for r, _, _ in spans]),
            seq_lens=torch.tensor([end for _, _, end in spans]),
            query_lens=torch.tensor([end - start for _, start, end in spans]),
            tree_mask=None,
        )
        out = self._attend(plan, torch.cat([self.q[r, start:end] for r, start, end in spans]))
        return list(out.split([end - start for _, start, end in spans]))

    def tree(self, request: int, prefix: int, mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Outputs of tree nodes whose keys lie after the prefix. mask: bool[W, W]."""
        width = mask.shape[0]
        plan = plan_attention(
            req_to_token=self.table,
            req_pool_indices=torch.tensor([request]),
            seq_lens=torch.tensor([prefix + width]),
            query_lens=torch.tensor([width]),
            tree_mask=mask.flatten(),
        )
        return self._attend(plan, q)

    def _attend(self, plan: list, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        attend(plan, q=q, k_buffer=self.keys, v_buffer=self.values, o=out, sm_scale=HEAD_DIM**-0.5)
        return out


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_decode_verify_and_prefill_agree_to_the_last_bit(data: st.DataObject) -> None:
    requests = Requests(data.draw(st.integers(0, 1000)))
    ends = data.draw(st.lists(st.integers(1, LENGTH), min_size=POOL, max_size=POOL))
    width = data.draw(st.integers(1, 33))
    together = requests.last_tokens(*((r, max(0, end - width), end) for r, end in enumerate(ends)))
    for r, end in enumerate(ends):
        (decoded,) = requests.last_tokens((r, end - 1, end))
        assert torch.equal(together[r][-1], decoded[0])
        (prefilled,) = requests.last_tokens((r, 0, end))
        assert torch.equal(prefilled[-together[r].shape[0] :], together[r])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), prefix=st.integers(0, 600), width=st.integers(2, 16))
def test_a_path_of_a_tree_equals_the_same_tokens_in_a_chain(
    seed: int, prefix: int, width: int
) -> None:
    requests = Requests(seed)
    path = torch.arange(0, width, 2)  # the nodes between hang from the node before them
    mask = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        mask[node] |= mask[path[(node - 1) // 2]]
    q = requests.q[0, prefix : prefix + width]
    in_tree = requests.tree(0, prefix, mask, q)[path]

    # The accepted path, moved to consecutive slots as SGLang does after verification.
    slots = requests.table[0, prefix : prefix + width].long()
    moved_keys, moved_values = requests.keys[slots[path]], requests.values[slots[path]]
    requests.keys[slots[: len(path)]] = moved_keys
    requests.values[slots[: len(path)]] = moved_values
    chain = torch.ones(len(path), len(path), dtype=torch.bool).tril()
    assert torch.equal(requests.tree(0, prefix, chain, q[path]), in_tree)


def test_requests_of_length_zero_are_skipped() -> None:
    requests = Requests(0)
    (alone,) = requests.last_tokens((1, 3, 9))
    empty, filled = requests.last_tokens((0, 5, 5), (1, 3, 9))
    assert empty.numel() == 0
    assert torch.equal(filled, alone)


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("logit capping", {"logit_cap": 30.0}),
        ("sliding-window attention", {"sliding_window": 128}),
        ("cross attention", {"is_cross_attention": True}),
        ("attention sinks", {"sinks": torch.zeros(NUM_HEADS)}),
        ("a scaled KV cache", {"v_scale": 0.5}),
        ("encoders", {"is_causal": False}),
    ],
)
def test_attention_that_is_not_implemented_is_refused(feature: str, change: dict) -> None:
    requests = Requests(0)
    arguments = {
        "q": requests.q[0, :1],
        "k_extend": None,
        "v_extend": None,
        "o": torch.empty(1, NUM_HEADS, HEAD_DIM),
        "k_buffer": requests.keys,
        "v_buffer": requests.values,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "req_to_token": requests.table,
        "req_pool_indices": torch.tensor([0]),
        "seq_lens": torch.tensor([1]),
        "extend_seq_lens": torch.tensor([1]),
        "extend_start_loc": torch.tensor([0]),
        "max_len_extend": 1,
        "sm_scale": 1.0,
        "logit_cap": 0.0,
        "is_cross_attention": False,
        "sliding_window": 0,
        "encoder_lens": None,
        "sinks": None,
        "tree_mask": None,
        "is_causal": True,
    }
    with pytest.raises(NotImplementedError, match=feature):
        extend_attention_cpu(**(arguments | change))
