"""The places in SGLang that the plugin hooks into, and the function that runs at each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_hvd.plugin.hooks import (
    context_limits,
    openai_replies,
    proposed_drafts,
    reload,
    responses,
    scheduler_events,
    server_args,
    stop_strings,
    text_streams,
    verification,
    weight_updates,
)
from sglang_hvd.plugin.startup import flags

_ARGS = "sglang.srt.arg_groups.speculative_hook"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_ALGORITHM = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"
_EAGLE = "sglang.srt.speculative.eagle_worker_common"
_PENALTIES = "sglang.srt.sampling.penaltylib.orchestrator._BatchedPenalizer"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SIZES = "sglang.srt.mem_cache.allocation_sizing"
_MANAGERS = "sglang.srt.managers.utils"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_RESULTS = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
_LOGPROBS = f"{_COMPONENTS}.logprob_result_processor.SchedulerLogprobResultProcessor"
_STATE = f"{_COMPONENTS}.internal_state.SchedulerInternalStateController"
_WEIGHTS = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
_REPORTER = f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager.DetokenizerManager"
_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_OPENAI = "sglang.srt.entrypoints.openai"
_CHAT = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_COMPLETION = f"{_OPENAI}.serving_completions.OpenAIServingCompletion"

# Target in SGLang -> hook. tests/plugin/test_seams.py checks that each target exists.
_AROUND: dict[str, Callable[..., Any]] = {
    f"{_SERVER_ARGS}.from_cli_args": flags.keep_hvd_flags,
    f"{_SERVER_ARGS}.resolve_once": server_args.end_in_one_line,
    f"{_SERVER_ARGS}.check_server_args": server_args.check_launch,
    f"{_ARGS}.handle_speculative_decoding": server_args.resolve_hvd_config,
    f"{_ARGS}._resolve_speculative_algorithm_alias": server_args.resolve_hvd_alias,
    f"{_ARGS}._handle_eagle_family": server_args.resolve_verify_width,
    f"{_ALGORITHM}.resolve_max_speculative_num_draft_tokens": server_args.resolve_widest,
    f"{_ALGORITHM}.create_worker": server_args.create_hvd_worker,
    f"{_RUNNER}.max_decode_logits_rows": server_args.count_logits_rows,
    f"{_EAGLE}.move_accept_tokens_to_target_kvcache": verification.move_to_front,
    f"{_EAGLE}.eagle_sample": verification.sample_nodes,
    f"{_PENALTIES}.prepare_if_required": verification.leave_penalties_out,
    f"{_RUNNER}.init_attention_backends": context_limits.hold_positions_ahead,
    f"{_SIZES}.get_req_to_token_extra_context_len": context_limits.hold_slots_ahead,
    f"{_MANAGERS}.compute_num_reserved_tokens": context_limits.reserve_nothing,
    f"{_SCHEDULER}.get_output_streamer_class": responses.stream_hvd_figures,
    f"{_SCHEDULER}.run_batch": scheduler_events.launch_step,
    f"{_SCHEDULER}.handle_dumper_control": reload.answer_order,
    f"{_REPORTER}.report_decode_stats": proposed_drafts.count_of_report,
    f"{_REQ}.update_finish_state": stop_strings.end_as_plain_serving,
    "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments": (
        responses.check_fields
    ),
    "sglang.srt.layers.sampler.apply_custom_logit_processor": responses.apply_processors,
    f"{_TOKENIZER}._slice_streaming_output_meta_info": responses.keep_hvd_figures,
    f"{_TOKENIZER}.TokenizerManager._create_tokenized_object": responses.check_request,
    f"{_TOKENIZER}.TokenizerManager.configure_logging": server_args.refuse_log_level,
    f"{_TOKENIZER}.TokenizerManager.set_internal_state": server_args.refuse_update,
    f"{_TOKENIZER}.TokenizerManager.generate_request": openai_replies.note_figures,
    f"{_CHAT}._generate_chat_stream": openai_replies.stream_figures,
    f"{_COMPLETION}._generate_completion_stream": openai_replies.stream_figures,
    f"{_TOKENIZER}.TokenizerManager.update_weights_from_disk": reload.ask_schedulers,
    f"{_DETOKENIZER}._decode_batch_token_id_output": text_streams.send_stable_text,
    f"{_OLLAMA}._generate_chat_response": text_streams.answer_errors,
    f"{_OLLAMA}._generate_generate_response": text_streams.answer_errors,
    f"{_OLLAMA}._stream_chat_response": text_streams.stream_all_text,
    f"{_OLLAMA}._stream_generate_response": text_streams.stream_all_text,
    f"{_WEIGHTS}._select_runners": weight_updates.select_target,
    f"{_WEIGHTS}.update_weights_from_tensor": weight_updates.send_to_target,
    f"{_WEIGHTS}.update_weights_from_distributed": weight_updates.send_to_target,
}
_AFTER: dict[str, Callable[..., Any]] = {
    f"{_LOGPROBS}.add_logprob_return_values": responses.drop_unasked_logprob,
    f"{_TOKENIZER}.TokenizerManager._calculate_spec_decoding_metrics": (
        proposed_drafts.count_of_request
    ),
    f"{_SERVER_ARGS}.add_cli_args": flags.add_hvd_flags,
    f"{_SCHEDULER}.on_idle": scheduler_events.note_idle,
    f"{_SCHEDULER}.handle_shutdown": scheduler_events.note_shutdown,
    f"{_SCHEDULER}.pause_generation": scheduler_events.note_pause,
    f"{_SCHEDULER}._release_aborted_request": scheduler_events.note_aborted,
    f"{_RESULTS}._maybe_collect_routed_experts": scheduler_events.note_finished,
    f"{_STATE}.get_internal_state": scheduler_events.add_hvd_state,
    f"{_CHAT}._build_chat_response": openai_replies.add_to_metadata,
    f"{_COMPLETION}._build_completion_response": openai_replies.add_to_metadata,
    f"{_OPENAI}.protocol.ResponsesRequest.to_sampling_params": openai_replies.ask_in_metadata,
    f"{_OPENAI}.protocol.ResponsesResponse.from_request": openai_replies.report_in_metadata,
}
HOOKS: dict[str, tuple[HookType, Callable[..., Any]]] = {
    **{target: (HookType.AROUND, hook) for target, hook in _AROUND.items()},
    **{target: (HookType.AFTER, hook) for target, hook in _AFTER.items()},
}
