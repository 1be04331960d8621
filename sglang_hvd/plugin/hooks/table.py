"""The places in SGLang where the plugin hooks in."""

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

# target in SGLang -> (kind, hook). tests/plugin/test_seams.py checks that each target exists.
HOOKS: dict[str, tuple[HookType, Callable[..., Any]]] = {
    "sglang.srt.server_args.ServerArgs.add_cli_args": (HookType.AFTER, flags.add_hvd_flags),
    "sglang.srt.server_args.ServerArgs.from_cli_args": (HookType.AROUND, flags.keep_hvd_flags),
    "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding": (
        HookType.AROUND,
        server_args.resolve_hvd_config,
    ),
    "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias": (
        HookType.AROUND,
        server_args.resolve_hvd_alias,
    ),
    "sglang.srt.arg_groups.speculative_hook._handle_eagle_family": (
        HookType.AROUND,
        server_args.resolve_verify_width,
    ),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm."
    "resolve_max_speculative_num_draft_tokens": (
        HookType.AROUND,
        server_args.resolve_widest,
    ),
    "sglang.srt.model_executor.model_runner.ModelRunner.max_decode_logits_rows": (
        HookType.AROUND,
        server_args.count_logits_rows,
    ),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": (
        HookType.AROUND,
        server_args.create_hvd_worker,
    ),
    "sglang.srt.speculative.eagle_worker_common.move_accept_tokens_to_target_kvcache": (
        HookType.AROUND,
        accepted_kv.move_to_front,
    ),
    "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class": (
        HookType.AROUND,
        responses.stream_hvd_figures,
    ),
    "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens": (
        HookType.AFTER,
        context_limits.limit_new_tokens,
    ),
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len": (
        HookType.AROUND,
        context_limits.hold_slots_ahead,
    ),
    "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info": (
        HookType.AROUND,
        responses.keep_hvd_figures,
    ),
    "sglang.srt.managers.schedule_batch.Req.update_finish_state": (
        HookType.AROUND,
        stop_strings.end_as_plain_serving,
    ),
    "sglang.srt.managers.scheduler.Scheduler.run_batch": (
        HookType.AROUND,
        scheduler_events.launch_step,
    ),
    "sglang.srt.managers.scheduler.Scheduler.on_idle": (
        HookType.AFTER,
        scheduler_events.note_idle,
    ),
    "sglang.srt.managers.scheduler.Scheduler.pause_generation": (
        HookType.AFTER,
        scheduler_events.note_pause,
    ),
    "sglang.srt.managers.scheduler.Scheduler._release_aborted_request": (
        HookType.AFTER,
        scheduler_events.note_aborted,
    ),
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts": (
        HookType.AFTER,
        scheduler_events.note_finished,
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk": (
        HookType.AROUND,
        reload.ask_for_predictor,
    ),
    "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control": (
        HookType.AROUND,
        reload.answer_for_predictor,
    ),
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager._select_runners": (
        HookType.AROUND,
        weight_updates.select_target,
    ),
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.update_weights_from_tensor": (
        HookType.AROUND,
        weight_updates.send_to_target,
    ),
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.update_weights_from_distributed": (
        HookType.AROUND,
        weight_updates.send_to_target,
    ),
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController.get_internal_state": (
        HookType.AFTER,
        scheduler_events.add_hvd_state,
    ),
}
