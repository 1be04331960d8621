"""How much of the device's memory is free for backends and graphs in addition to SGLang's own.

SGLang sizes the KV pool before these are built, so that they use what --mem-fraction-static leaves.
Where SGLang sizes the pool after them, from what they leave, only those that the settings name are
built.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.runtime_context import get_schedule
from sglang.srt.utils.common import get_available_gpu_memory, log_info_on_rank0

from sglang_hvd.plugin.device.rank_group import RankGroup

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Memory that stays free: a spare part for what is not counted here, and the larger of prefills and
# sampling, which never run at once. A prefill needs, for each token of a chunk, what the layers
# hold at a time if no graph runs it, as for log probabilities of a prompt. In 16 bits the arrays of
# an 8B model (MLP of 3 x 14,336, attention of 6,144, six of the hidden size of 4,096 for EAGLE3's
# inputs) take .15 MB, and those of a 32B model .25. Sampling holds so many arrays of logits.
_SPARE_GB, _GB_PER_PREFILL_TOKEN, _LOGIT_ARRAYS = 1.0, 0.3 / 1024, 3


class DeviceMemory:
    """The memory of the device that a target model is on.

    target: SGLang's model runner of the target model.
    device, gpu_id: the device that it is on, as SGLang names it.
    max_nodes: the most nodes that a step verifies, of all requests together.
    kept_gb: memory that decode steps keep for later steps.
    ranks: all of them build the same.
    """

    def __init__(
        self,
        target: Any,
        *,
        device: str,
        gpu_id: int,
        max_nodes: int,
        ranks: RankGroup,
        kept_gb: float = 0.0,
    ) -> None:
        self._target, self._ranks = target, ranks
        self._device, self._gpu_id = device, gpu_id
        schedule = get_schedule()
        logits = max_nodes * target.model_config.vocab_size * 4 / 2**30
        chunk = schedule.chunked_prefill_size or -1
        max_tokens = chunk if chunk > 0 else schedule.max_prefill_tokens or 0
        prefill = max_tokens * _GB_PER_PREFILL_TOKEN
        self._spare_gb = _SPARE_GB + kept_gb + max(prefill, _LOGIT_ARRAYS * logits)

    def has_room(self, needed_gb: float, *, name: str) -> bool:
        """Whether so much is free in addition to what prefills and sampling need. If not, the log
        says that this is left out, and whatever takes more. A CPU's memory is not counted."""
        if self._device == "cpu":
            return True
        if self._target.token_to_kv_pool.post_capture_active:
            log_info_on_rank0(
                logger,
                f"HVD: {name} is left out, and so is whatever takes more: SGLang sizes the KV pool "
                "from the memory that is left.",
            )
            return False
        free_gb, needed_gb = self._free_gb(), needed_gb + self._spare_gb
        if free_gb >= needed_gb:
            return True
        log_info_on_rank0(
            logger,
            f"HVD: {name} is left out, and so is whatever takes more: {needed_gb:.2f} GB are "
            f"needed and {free_gb:.2f} GB are free. A lower --mem-fraction-static makes room.",
        )
        return False

    def build(self, build: Callable[[], _T], *, name: str, remedy: str) -> tuple[_T, float]:
        """Returns what `build` makes, and the gigabytes that it took. Raises RuntimeError with the
        name and the remedy if no memory is left."""
        free_gb = self._free_gb()
        try:
            built = build()
        except Exception as error:
            # SGLang wraps errors that are raised while graphs are captured.
            if not any(
                isinstance(e, torch.cuda.OutOfMemoryError) for e in (error, error.__context__)
            ):
                raise
            raise RuntimeError(f"no memory is left for {name}: {remedy}") from error
        # Attention backends are in reference cycles; collect them so that discarded ones do not
        # count.
        gc.collect()
        # Not below 0: another process may have freed more in the meantime.
        return built, max(free_gb - self._free_gb(), 0.0)

    def _free_gb(self) -> float:
        """Free gigabytes on the rank that has the least."""
        return get_available_gpu_memory(
            self._device,
            self._gpu_id,
            distributed=self._ranks.process_group is not None,
            cpu_group=self._ranks.process_group,
        )
