"""Penalties and min_new_tokens, as plain serving has them after each node's own text.

SGLang accumulates them in the batch, one token per step, and so knows no text between two steps.
Here each step works them out from the output so far and the node's path. Nothing has to be kept
when requests come, leave, or come back from a retraction.

Shapes: `k` requests with penalties, `w` nodes of each, `v` logits of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_hvd.plugin.device.host_transfer import to_device
from sglang_hvd.plugin.requests.sampling import Penalties


@dataclass(frozen=True, slots=True)
class NodePaths:
    """The tokens of each node's path: the node and its ancestors, without the root, which is the
    last token of the output.

    Attributes:
        token_ids: int64[k, w, depth]; where a path is shorter, the root's token.
        is_token: bool[k, w, depth]; whether the path has this token.
    """

    token_ids: torch.Tensor
    is_token: torch.Tensor

    @classmethod
    def of(cls, token_ids: torch.Tensor, parents: torch.Tensor, max_depth: int) -> NodePaths:
        """
        Args:
            token_ids: int64[k, w]; see DraftNodes.
            parents: int64[k, w].
            max_depth: no path has more tokens.
        """
        k, w = token_ids.shape
        node = torch.arange(w, device=token_ids.device).expand(k, w)
        # The root is its own parent. Slots without a node have any path.
        parents = parents.clamp(0, w - 1)
        parents[:, 0] = 0
        nodes = [node]
        for _ in range(max_depth - 1):
            nodes.append(parents.gather(1, nodes[-1]))
        path = torch.stack(nodes, dim=2)
        return cls(token_ids.gather(1, path.view(k, -1)).view_as(path), path > 0)


@dataclass(frozen=True, slots=True)
class PenaltyTensors:
    """What penalties do to logits: they become scaled(logits + additive).

    Attributes:
        additive: float32[k, w, v].
        scaling: float32[k, w, v]; positive logits are divided by it, negative ones multiplied.
            None: all are 1.
    """

    additive: torch.Tensor
    scaling: torch.Tensor | None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with these penalties, in the order of SGLang's accumulated penalties.

        logits: float[k, w, v].
        """
        logits = logits + self.additive
        if self.scaling is None:
            return logits
        return torch.where(logits < 0, logits * self.scaling, logits / self.scaling)


def penalty_tensors(
    penalties: Sequence[Penalties],
    outputs: Sequence[npt.NDArray[np.int64]],
    paths: NodePaths | None,
    *,
    vocab_size: int,
    device: str,
) -> PenaltyTensors:
    """The penalties of `k` requests at each of their nodes.

    Args:
        outputs: the tokens of each output so far.
        paths: what follows at each node; None: one node for each request, where nothing follows.
        vocab_size: `v`.
    """
    k, w = len(penalties), 1 if paths is None else paths.token_ids.shape[1]
    output = _OutputTokens.of(outputs, device)
    values = np.array([(p.frequency, p.presence, p.repetition) for p in penalties], np.float32)
    frequency, presence, repetition = to_device(values, device)[:, :, None].unbind(1)
    additive = torch.zeros((k, w, vocab_size), dtype=torch.float32, device=device)
    scaling = None
    if values[:, 0].any():  # as often as a token occurs
        total = additive.new_zeros(k, vocab_size)
        total.scatter_add_(1, output.token_ids, frequency * output.is_token)
        total = total[:, None].repeat(1, w, 1)
        if paths is not None:
            total.scatter_add_(2, paths.token_ids, frequency[:, :, None] * paths.is_token)
        additive -= total
        del total
    if values[:, 1].any():  # once for each token that occurs
        additive -= _where_present(presence, 0.0, output, paths, vocab_size)
    shorter = [place for place, p in enumerate(penalties) if len(outputs[place]) < p.min_new_tokens]
    if shorter:
        _forbid_ends(additive, shorter, penalties, outputs, paths)
    if (values[:, 2] != 1).any():
        scaling = _where_present(repetition, 1.0, output, paths, vocab_size)
    return PenaltyTensors(additive, scaling)


@dataclass(frozen=True, slots=True)
class _OutputTokens:
    """token_ids: int64[k, longest]; is_token: bool, whether the output has this token. A shorter
    output is filled up with its first token."""

    token_ids: torch.Tensor
    is_token: torch.Tensor

    @classmethod
    def of(cls, outputs: Sequence[npt.NDArray[np.int64]], device: str) -> _OutputTokens:
        longest = max(len(output) for output in outputs)
        rows = np.zeros((len(outputs), longest + 1), np.int32)  # the length comes last
        for row, output in zip(rows, outputs, strict=True):
            row[: len(output)] = output
            row[len(output) : longest] = output[0] if len(output) else 0
            row[longest] = len(output)
        on_device = to_device(rows, device).to(torch.int64)
        token_ids, lengths = on_device[:, :longest], on_device[:, longest:]
        return cls(token_ids, torch.arange(longest, device=device) < lengths)


def _where_present(
    values: torch.Tensor,
    neutral: float,
    output: _OutputTokens,
    paths: NodePaths | None,
    vocab_size: int,
) -> torch.Tensor:
    """float32[k, w, v]: a request's value at the tokens that its output or the path has."""
    present = values.new_full((len(values), vocab_size), neutral)
    if output.token_ids.shape[1]:
        # An empty output among longer ones has no token. Token 0 stands in its place.
        is_empty = ~output.is_token[:, :1]
        present.scatter_(
            1,
            output.token_ids,
            torch.where(is_empty, neutral, values).expand_as(output.token_ids).contiguous(),
        )
    present = present[:, None]
    if paths is None:
        return present
    present = present.repeat(1, paths.token_ids.shape[1], 1)
    # A shorter path has the root's token instead, which is in the output.
    return present.scatter_(2, paths.token_ids, values[:, :, None].expand_as(paths.token_ids))


def _forbid_ends(
    additive: torch.Tensor,
    places: Sequence[int],
    penalties: Sequence[Penalties],
    outputs: Sequence[npt.NDArray[np.int64]],
    paths: NodePaths | None,
) -> None:
    """Forbids the tokens that end a text at nodes whose output is shorter than min_new_tokens.

    places: the requests whose output is shorter at the root.
    """
    device, vocab_size = additive.device, additive.shape[2]
    ends = [
        (row, t) for row, i in enumerate(places) for t in penalties[i].end_ids if t < vocab_size
    ]
    missing = [penalties[i].min_new_tokens - len(outputs[i]) for i in places]
    cells = np.array([row * vocab_size + token_id for row, token_id in ends], np.int64)
    numbers = to_device(np.concatenate([places, missing, cells]).astype(np.int64), str(device))
    rows, missing_tokens, at = numbers.split([len(places), len(places), len(cells)])
    forbidden = additive.new_zeros(len(places), vocab_size)
    forbidden.view(-1)[at] = float("-inf")
    depths = missing_tokens.new_zeros(len(places), additive.shape[1])
    if paths is not None:
        depths = paths.is_token[rows].sum(dim=2)
    is_short = (depths < missing_tokens[:, None])[:, :, None]
    additive[rows] += torch.where(is_short, forbidden[:, None], 0.0)
