"""What is sampled at nodes where SGLang's own sampler would raise."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.sampler import Sampler

from sglang_hvd.plugin.device.host_transfer import all_to_device
from sglang_hvd.plugin.sampling import node_sampler
from sglang_hvd.plugin.sampling.node_sampler import NodeSampler, RowSampler


@dataclass
class Info:
    """SGLang's SamplingBatchInfo, as far as a sampler of one batch reads it."""

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor
    sampling_seed: torch.Tensor | None = None
    logit_bias: torch.Tensor | None = None
    is_all_greedy: bool = False
    has_custom_logit_processor: bool = False
    grammars: Any = None
    sampling_mask_batch_indices: Any = None
    sampling_support_logprobs_capture_indices: Any = None

    @classmethod
    def of(cls, num: int) -> Any:
        ones = torch.ones(num)
        return cls(ones[:, None], ones, ones.int(), torch.zeros(num))


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(node_sampler, "get_parallel", lambda: group)


def planned(are_greedy: list[bool]) -> Any:
    sampled_rows, none = np.flatnonzero(np.logical_not(are_greedy)), np.empty(0, np.int64)
    held = SimpleNamespace(sampled_rows=sampled_rows, penalised_rows=none, biased_rows=none)
    return SimpleNamespace(held=held)


def sampler(seen: list[int]) -> NodeSampler:
    """One whose target always samples the token 0, and notes how many rows it is given."""

    def sample(output: Any, *_: Any) -> torch.Tensor:
        seen.append(len(output.next_token_logits))
        return torch.zeros(seen[-1])

    target: Any = SimpleNamespace(sampler=sample)
    return NodeSampler(target)


@pytest.mark.parametrize(
    ("are_greedy", "num_sampled"),
    [([True, True], []), ([True, False, True], [2]), ([False, False], [4])],
)
def test_only_the_nodes_of_sampled_requests_are_sampled(
    are_greedy: list[bool], num_sampled: list[int]
) -> None:
    """Also where SGLang still believes that some request samples, which it does until the batch is
    empty: no kernel is started for no row."""
    num, seen = len(are_greedy), list[int]()
    verify_input: Any = SimpleNamespace(positions=torch.arange(2 * num))
    logits = torch.zeros(2 * num, 3)
    logits[:, 1] = 1.0
    batch: Any = SimpleNamespace(sampling_info=Info.of(num))
    of_sampler = sampler(seen)
    sent = all_to_device(of_sampler.arrays(planned(are_greedy), batch), "cpu")
    found = of_sampler._sampled(
        sent["sampled_rows"], verify_input, Info.of(num), logits.view(num, 2, 3)
    )
    assert seen == num_sampled
    assert found.view(num, 2)[:, 0].tolist() == [1 if greedy else 0 for greedy in are_greedy]


def test_a_row_without_a_token_gives_token_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(_sampler: Any, probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        return torch.multinomial(probs, 1).view(-1), None

    monkeypatch.setattr(Sampler, "_sample_from_probs", sample)
    probs = torch.tensor([[0.0, 1.0], [float("nan")] * 2, [float("inf"), 0.0]])
    row_sampler = RowSampler.__new__(RowSampler)
    found, _ = row_sampler._sample_from_probs(probs, Info.of(3), torch.arange(3), True)
    assert found.tolist() == [1, 0, 0]
