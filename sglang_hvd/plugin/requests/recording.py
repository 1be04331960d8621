"""Recording of finished requests (--hvd-record)."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.runtime_context import get_serving

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.requests.sampling import recorded
from sglang_hvd.plugin.startup.token_strings import served_fingerprint
from sglang_hvd.traces.recorder import Recorder, RecorderStats
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import TokenIds

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_FAMILY = "recorded"


class RequestRecorder:
    """Hands SGLang's finished requests to a recorder, which closes when the process ends."""

    def __init__(self, config: HvdConfig) -> None:
        assert config.record is not None, "nothing is to be recorded"
        self._recorder = Recorder(
            config.record,
            max_file_bytes=config.record_file_mb << 20,
            max_total_bytes=config.record_total_mb << 20,
            with_prompts=config.record_prompts,
        )
        self._model: str = get_serving().served_model_name
        self._tokenizer_fingerprint = served_fingerprint()
        # If the server is killed, nobody closes it; the next server salvages the recording.
        atexit.register(self._recorder.close)

    def record(self, req: Req, prompt_ids: TokenIds, *, namespace: str) -> None:
        """Records a request that ended, unless it was aborted or asked for no output.

        Args:
            prompt_ids: int32[num_tokens]; nobody writes into it from now on.
            namespace: a digest, of which the beginning is recorded; empty for the common namespace.
        """
        output_ids = np.array(req.output_ids_through_stop, dtype=np.int32)
        if (
            isinstance(req.finished_reason, FINISH_ABORT)
            or req.sampling_params.max_new_tokens == 0  # fills the prefix cache for n > 1
            or req.rid.startswith(HEALTH_CHECK_RID_PREFIX)
            or not len(output_ids)
        ):
            return
        trace = Trace(
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            session="",  # found by the recorder
            turn=0,
            family=_FAMILY,
            sampling=recorded(req.sampling_params),
            model=self._model,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            namespace=namespace[:16],
            is_cut=isinstance(req.finished_reason, FINISH_LENGTH),
        )
        self._recorder.record(trace)

    def stats(self) -> RecorderStats:
        """Counts of the requests so far, by what became of them."""
        return self._recorder.stats()
