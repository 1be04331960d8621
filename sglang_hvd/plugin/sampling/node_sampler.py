"""Samples a token at every node of a verification as plain serving would after the node's text, and
accepts the path whose tokens were sampled.

So the accepted tokens are a sample of the target model, whatever was drafted: a draft only decides
which of them are sampled in one step. With a seed SGLang samples a token as a function of the seed,
the position and the logits. Then a reply is that of plain serving, token for token.

SGLang's EAGLE3 draws a coin for each draft token instead. It accepts as often, but knows neither
min_p nor seeds nor custom logit processors, and applies the penalties of the root to all nodes.

Shapes: `n` requests, `w` the verify width, `v` logits of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, sampling_from_probs_torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_hvd.plugin.device.host_transfer import to_device
from sglang_hvd.plugin.requests.sampling import SamplingKind
from sglang_hvd.plugin.requests.step_plan import StepPlan
from sglang_hvd.plugin.sampling.penalties import NodePaths, penalty_tensors
from sglang_hvd.plugin.sampling.processors import process_nodes
from sglang_hvd.plugin.trees.draft_trees import DraftNodes
from sglang_hvd.plugin.trees.verify_input import Accepted, HvdVerifyInput

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


# Penalties, and sampling with seeds, take several arrays of so many numbers: .13 to .27 GB each.
_MAX_LOGITS = 2**25


class RowSampler(Sampler):
    """SGLang's sampler, where what a seed gives does not depend on the other rows of the batch.

    With filters (top_k, top_p, min_p) SGLang numbers the tokens of a row by their probability, else
    as the vocabulary does. The noise of a seed goes by this number. SGLang uses the former for all
    rows if one of them has a filter.

    A row that leaves no token, for example because a grammar allows only what min_new_tokens
    forbids, gives token 0, as the largest of its logits does. SGLang's sampling would raise.
    """

    def _sample_from_probs(
        self, probs: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, simple: bool
    ) -> tuple[torch.Tensor, Any]:
        is_empty = ~probs.sum(dim=-1).isfinite()
        probs.masked_fill_(is_empty[:, None], 0.0)
        probs[:, 0] += is_empty
        if simple or info.sampling_seed is None:
            return super()._sample_from_probs(probs, info, positions, simple)
        unfiltered = sampling_from_probs_torch(probs, info.sampling_seed, positions)
        filtered, capture = super()._sample_from_probs(probs, info, positions, simple)
        has_filter = (info.top_ks != TOP_K_ALL) | (info.top_ps != 1) | (info.min_ps > 0)
        return torch.where(has_filter, filtered, unfiltered), capture


class NodeSampler:
    """Samples and accepts for the verifications of one target model.

    Sets up the model's sampler for its prefills, too.
    """

    def __init__(self, target: ModelRunner) -> None:
        if type(target.sampler) is Sampler:  # else a plugin's own
            target.sampler = RowSampler()
        self._target = target

    def penalise_prefill(self, batch: ScheduleBatch) -> None:
        """Gives SGLang's sampler the penalties of a prefill's requests: those with min_new_tokens,
        and those that come back from a retraction with output."""
        rows, kinds = [], []
        for row, req in enumerate(batch.reqs):
            kind = SamplingKind.of(req)
            if kind.penalties is not None and (kind.penalties.min_new_tokens or req.output_ids):
                rows.append(row)
                kinds.append(kind.penalties)
        if not rows:
            return
        info = batch.sampling_info
        outputs = [np.array(batch.reqs[row].output_ids, np.int64) for row in rows]
        found = penalty_tensors(
            kinds, outputs, None, vocab_size=info.vocab_size, device=batch.device
        )
        at = to_device(np.array(rows, np.int64), batch.device)
        additive = found.additive.new_zeros(len(batch.reqs), info.vocab_size)
        info.acc_additive_penalties = additive.index_copy(0, at, found.additive[:, 0])
        if found.scaling is not None:
            scaling = torch.ones_like(additive)
            info.acc_scaling_penalties = scaling.index_copy(0, at, found.scaling[:, 0])

    def arrays(self, plan: StepPlan, batch: ScheduleBatch) -> dict[str, npt.NDArray[np.int64]]:
        """The arrays that go to the device, by name: the rows of the requests that ask for
        something."""
        info, held, none = batch.sampling_info, plan.held, np.empty(0, np.int64)
        return {
            # is_all_greedy may stay False when the last request that samples ends.
            "sampled_rows": none if info.is_all_greedy else held.sampled_rows,
            "penalised_rows": held.penalised_rows,
            "biased_rows": none if info.logit_bias is None else held.biased_rows,
        }

    def sample(
        self,
        plan: StepPlan,
        batch: ScheduleBatch,
        sent: Mapping[str, torch.Tensor],
        verify_input: HvdVerifyInput,
        logits_output: LogitsProcessorOutput,
        grammar_mask: GrammarMask | None,
    ) -> Accepted:
        """What SGLang's eagle_sample returns, by plain serving's rules.

        Args:
            sent: `arrays` on the device.
            logits_output: the logits of all nodes, float[n * w, v]. They are changed in place as
                the requests ask: log probabilities are of the changed ones.

        Returns:
            predict: int32[n * w]; the token that follows each accepted node.
            accept_lens: int32[n]; accepted nodes, root included.
            accept_index: int32[n, w]; their slots, numbered across all requests; -1 after them.
        """
        info, logits = batch.sampling_info, logits_output.next_token_logits
        n, w = len(plan.held), plan.width
        if len(sent["penalised_rows"]):
            self._penalise(plan, sent["penalised_rows"], verify_input, logits.view(n, w, -1))
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        at = sent["biased_rows"]
        if len(at):
            bias = info.logit_bias[at, None].expand(-1, w, -1).to(logits.dtype)
            logits.view(n, w, -1).index_add_(0, at, bias)
        candidates = verify_input.draft_token.reshape(n, w)
        if info.has_custom_logit_processor:
            held = plan.held.requests
            failed = process_nodes(logits, info, batch.reqs, held, _nodes_of(verify_input))
            if failed:
                at = to_device(np.array(failed, np.int64), batch.device)
                candidates = candidates.flatten().index_fill(0, at, -1).view(n, w)
            group = get_parallel().tp_group
            if group.world_size > 1:  # a processor may fail on one rank alone
                candidates = group.broadcast(candidates.contiguous(), src=0)
        sanitize_nan_logits(logits, "verification: logits of the target model")
        sampled = self._sampled(sent["sampled_rows"], verify_input, info, logits.view(n, w, -1))

        predict = torch.zeros(n * w, dtype=torch.int32, device=logits.device)
        accept_index = torch.full((n, w), -1, dtype=torch.int32, device=logits.device)
        num_accepted = torch.empty(n, dtype=torch.int32, device=logits.device)
        predict, accept_index, num_accepted = verify_tree_greedy_func(
            predicts=predict,
            accept_index=accept_index,
            accept_token_num=num_accepted,
            candidates=candidates,
            retrieve_index=verify_input.retrieve_index,
            retrieve_next_token=verify_input.retrieve_next_token,
            retrieve_next_sibling=verify_input.retrieve_next_sibling,
            target_predict=sampled.view(n, w),
            topk=verify_input.tree_topk,
        )
        return predict, num_accepted + 1, accept_index

    def _penalise(
        self,
        plan: StepPlan,
        on_device: torch.Tensor,
        verify_input: HvdVerifyInput,
        logits: torch.Tensor,
    ) -> None:
        """on_device: int64[k]; the requests with penalties. logits: float[n, w, v]."""
        rows = plan.held.penalised_rows
        num = max(1, _MAX_LOGITS // logits[0].numel())
        for start in range(0, len(rows), num):
            some = rows[start : start + num]
            penalties, outputs = [], []
            for held in (plan.held.requests[row] for row in some):
                assert held.kind.penalties is not None
                assert held.output_ids is not None, "penalties need the output"
                penalties.append(held.kind.penalties)
                outputs.append(np.array(held.output_ids, np.int64))
            at, paths = on_device[start : start + num], None
            if plan.width > 1:
                nodes, depth = _nodes_of(verify_input), max(plan.max_depth(some), 1)
                paths = NodePaths.of(nodes.token_ids[at], nodes.parents[at], depth)
            found = penalty_tensors(
                penalties,
                outputs,
                paths,
                vocab_size=logits.shape[2],
                device=str(logits.device),
            )
            logits.index_copy_(0, at, found.apply(logits[at]).to(logits.dtype))

    def _sampled(
        self,
        rows: torch.Tensor,
        verify_input: HvdVerifyInput,
        info: SamplingBatchInfo,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """int64[n * w]: the token after each node.

        rows: int64[k]; the requests that do not decode greedily.
        logits: float[n, w, v].
        """
        n, w, _ = logits.shape
        of_nodes = logits.view(n * w, -1)
        if not len(rows):
            sampled = torch.argmax(of_nodes, dim=-1)
        elif len(rows) == n:
            infos = _repeated(info, None, w)
            sampled = self._sample(infos, of_nodes.clone(), verify_input.positions)
        else:
            sampled = torch.argmax(of_nodes, dim=-1)
            slots = (rows[:, None] * w + torch.arange(w, device=rows.device)).view(-1)
            positions = verify_input.positions[slots]
            sampled[slots] = self._sample(_repeated(info, rows, w), of_nodes[slots], positions)
        group = get_parallel().tp_group
        if group.world_size > 1 and (len(rows) or info.has_custom_logit_processor):
            # Ranks may differ in the last bit of a probability, and processors may do anything.
            group.broadcast(sampled, src=0)
        return sampled

    def _sample(
        self, info: SamplingBatchInfo, logits: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """logits: float[nodes, v], overwritten."""
        num = len(logits)
        if info.sampling_seed is not None:
            num = max(1, _MAX_LOGITS // logits.shape[1])
        found = []
        for start in range(0, len(logits), num):
            part = slice(start, start + num)
            output = LogitsProcessorOutput(next_token_logits=logits[part])
            some = info if num >= len(logits) else _part_of(info, part)
            found.append(self._target.sampler(output, some, False, [], [], positions[part]))
        return torch.cat(found).to(torch.int64)


def _nodes_of(verify_input: HvdVerifyInput) -> DraftNodes:
    assert verify_input.nodes is not None, "build_verify_input keeps the trees"
    return verify_input.nodes


def _part_of(info: SamplingBatchInfo, part: slice) -> SamplingBatchInfo:
    names = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    return replace(info, **{name: getattr(info, name)[part] for name in names})


def _repeated(info: SamplingBatchInfo, rows: torch.Tensor | None, w: int) -> SamplingBatchInfo:
    """How SGLang's sampler samples the nodes of these requests, w of each.

    rows: int64[num]; None: all requests.
    """

    def repeat(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return (values if rows is None else values[rows]).repeat_interleave(w, dim=0)

    return replace(
        info,
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=repeat(info.sampling_seed),
        # Already applied, or never used in a verification.
        has_custom_logit_processor=False,
        grammars=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )
