"""The places in SGLang that the plugin hooks into, and the function that runs at each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_hvd.plugin.hooks import (
    context_limits,
    reload,
    responses,
    scheduler_events,
    server_args,
    stop_strings,
    weight_updates,
)
from sglang_hvd.plugin.startup import flags
from sglang_hvd.plugin.trees import accepted_kv

_AROUND, _AFTER = HookType.AROUND, HookType.AFTER
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_SPECULATIVE = "sglang.srt.arg_groups.speculative_hook"
_ALGORITHM = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_RESULTS = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
_STATE = f"{_COMPONENTS}.internal_state.SchedulerInternalStateController"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_WEIGHTS = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"

# Target in SGLang -> (kind, hook). tests/plugin/test_seams.py checks that each target exists.
HOOKS: dict[str, tuple[HookType, Callable[..., Any]]] = {
    f"{_SERVER_ARGS}.add_cli_args": (_AFTER, flags.add_hvd_flags),
    f"{_SERVER_ARGS}.from_cli_args": (_AROUND, flags.keep_hvd_flags),
    f"{_SPECULATIVE}.handle_speculative_decoding": (_AROUND, server_args.resolve_hvd_config),
    f"{_SPECULATIVE}._resolve_speculative_algorithm_alias": (
        _AROUND,
        server_args.resolve_hvd_alias,
    ),
    f"{_SPECULATIVE}._handle_eagle_family": (_AROUND, server_args.resolve_verify_width),
    f"{_ALGORITHM}.resolve_max_speculative_num_draft_tokens": (_AROUND, server_args.resolve_widest),
    "sglang.srt.model_executor.model_runner.ModelRunner.max_decode_logits_rows": (
        _AROUND,
        server_args.count_logits_rows,
    ),
    f"{_ALGORITHM}.create_worker": (_AROUND, server_args.create_hvd_worker),
    "sglang.srt.speculative.eagle_worker_common.move_accept_tokens_to_target_kvcache": (
        _AROUND,
        accepted_kv.move_to_front,
    ),
    f"{_SCHEDULER}.get_output_streamer_class": (_AROUND, responses.stream_hvd_figures),
    f"{_SCHEDULER}.init_req_max_new_tokens": (_AFTER, context_limits.limit_new_tokens),
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": (
        _AROUND,
        context_limits.hold_slots_ahead,
    ),
    f"{_TOKENIZER}._slice_streaming_output_meta_info": (_AROUND, responses.keep_hvd_figures),
    "sglang.srt.managers.schedule_batch.Req.update_finish_state": (
        _AROUND,
        stop_strings.end_as_plain_serving,
    ),
    f"{_SCHEDULER}.run_batch": (_AROUND, scheduler_events.launch_step),
    f"{_SCHEDULER}.on_idle": (_AFTER, scheduler_events.note_idle),
    f"{_SCHEDULER}.pause_generation": (_AFTER, scheduler_events.note_pause),
    f"{_SCHEDULER}._release_aborted_request": (_AFTER, scheduler_events.note_aborted),
    f"{_RESULTS}._maybe_collect_routed_experts": (
        _AFTER,
        scheduler_events.note_finished,
    ),
    f"{_TOKENIZER}.TokenizerManager.update_weights_from_disk": (_AROUND, reload.ask_for_predictor),
    f"{_SCHEDULER}.handle_dumper_control": (_AROUND, reload.answer_for_predictor),
    f"{_WEIGHTS}._select_runners": (_AROUND, weight_updates.select_target),
    f"{_WEIGHTS}.update_weights_from_tensor": (_AROUND, weight_updates.send_to_target),
    f"{_WEIGHTS}.update_weights_from_distributed": (_AROUND, weight_updates.send_to_target),
    f"{_STATE}.get_internal_state": (
        _AFTER,
        scheduler_events.add_hvd_state,
    ),
}
