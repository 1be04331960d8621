"""Every place in SGLang that the plugin relies on, by name: what to read first after an upgrade."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import pickle
import pkgutil
import textwrap
from importlib.metadata import entry_points, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.managers.io_struct import (
    DumperControlReqInput,
    DumperControlReqOutput,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_len_per_decode,
    get_req_to_token_extra_context_len,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_utils, eagle_worker_common, eagle_worker_v2
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
    EAGLEDraftExtendCudaGraphRunner,
)
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.plugin.engine.draft_worker import HvdDraftWorker, drafting
from sglang_hvd.plugin.engine.worker import HvdWorker
from sglang_hvd.plugin.hooks.hook_table import HOOKS
from sglang_hvd.plugin.startup.refusals import check_sampling
from sglang_hvd.plugin.startup.supported import SUPPORTED_SGLANG, require_hooks
from sglang_hvd.plugin.trees.verify_input import HvdVerifyInput

# Methods of ours that extend nothing. SGLang's classes must have none of these names, since ours
# would replace theirs.
OWN_HELPERS = {
    HvdWorker: {
        *("_decode", "_extend", "plan_ahead", "_record_prefill", "_publish"),
        *("describe", "use_predictor", "on_idle", "on_pause", "drop", "note_finished_at_prefill"),
        *("control_cache", "on_shutdown"),
    },
    HvdDraftWorker: {"extend", "_num_draft_tokens"},
}


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_this_is_the_supported_sglang() -> None:
    assert version("sglang") == SUPPORTED_SGLANG


def test_requests_carry_what_keeps_tenants_apart() -> None:
    assert {"cache_salt", "extra_key"} <= set(_parameters(Req.__init__))


def test_sglang_finds_the_plugin() -> None:
    assert "hvd" in {entry.name for entry in entry_points(group=GENERAL_PLUGINS_GROUP)}


@pytest.mark.parametrize("target", HOOKS)
def test_every_hook_has_its_target(target: str) -> None:
    assert callable(pkgutil.resolve_name(target))


def test_hooked_functions_take_what_the_hooks_expect() -> None:
    expected = {
        "add_cli_args": ["parser"],
        "handle_speculative_decoding": ["server_args"],
        "_handle_eagle_family": ["server_args"],
        "create_worker": ["self", "server_args"],
        "get_output_streamer_class": ["self"],
        "get_internal_state": ["self", "recv_req"],
        "update_weights_from_disk": ["self", "obj", "request"],
        "handle_dumper_control": ["self", "recv_req"],
        "update_finish_state": ["self", "new_accepted_len"],
        "resolve_max_speculative_num_draft_tokens": ["self", "server_args"],
        "max_decode_logits_rows": ["self"],
        "init_attention_backends": ["self"],
        "compute_num_reserved_tokens": [],
        "pause_generation": ["self", "recv_req"],
        "handle_shutdown": ["self", "recv_req"],
        "_release_aborted_request": ["self", "req"],
        "_maybe_collect_routed_experts": ["self", "req"],
        "get_req_to_token_extra_context_len": [],
        "set_internal_state": ["self", "obj"],
        "apply_custom_logit_processor": ["logits", "sampling_batch_info", "num_tokens_in_batch"],
        "_decode_batch_token_id_output": ["self", "recv_obj"],
        "_stream_chat_response": ["self", "gen_request", "raw_request", "model_name"],
        "_stream_generate_response": ["self", "gen_request", "raw_request", "model_name"],
        "_slice_streaming_output_meta_info": [
            *("meta_info", "last_output_offset", "customized_info_keys"),
        ],
    }
    for target in HOOKS:
        name = target.rsplit(".", 1)[1]
        if name in expected:
            function = inspect.unwrap(pkgutil.resolve_name(target))
            assert _parameters(function) == expected[name], target


def test_requests_that_are_aborted_while_they_wait_are_released() -> None:
    assert "self._release_aborted_request(req)" in inspect.getsource(Scheduler.abort_request)


def test_a_request_that_ended_is_announced_before_its_answer_is_sent() -> None:
    announced, sent = (
        "self._maybe_collect_routed_experts(req)",
        "self.output_streamer.stream_output(",
    )
    prefill = inspect.getsource(SchedulerBatchResultProcessor.process_batch_result_prefill)
    places = [prefill.index(text) for text in ("req.update_finish_state()", announced, sent)]
    assert places == sorted(places)
    # Behind a decode step the worker was told before.
    decode = inspect.getsource(SchedulerBatchResultProcessor)
    told = decode.index("self.draft_worker.note_request_finished(")
    assert told < decode.index(announced, told)


def test_sglang_knows_before_a_prefill_that_its_token_will_be_the_last() -> None:
    # Such requests are not merged into the running batch, under overlap scheduling neither.
    assert "self.enable_skip_finishing_decode = True" in inspect.getsource(
        Scheduler.event_loop_overlap
    )
    finishing = inspect.getsource(Scheduler._reqs_finishing_inflight)
    assert "req.next_output_finishes_by_length()" in finishing
    running = inspect.getsource(Scheduler.update_running_batch)
    assert "finishing_reqs = self._reqs_finishing_inflight(batch)" in running
    assert "batch.filter_batch(reqs_to_exclude=finishing_reqs)" in running


def test_a_request_that_met_nan_says_so() -> None:
    source = inspect.getsource(Req._check_vocab_boundary_finish)
    assert 'FINISH_MATCHED_STR(matched="NaN happened")' in source


def test_the_eagle_worker_has_the_methods_that_are_extended() -> None:
    for cls, ours in (
        (eagle_worker_v2.EAGLEWorkerV2, HvdWorker),
        (eagle_worker_v2.EagleDraftWorker, HvdDraftWorker),
    ):
        for name, member in vars(ours).items():
            if inspect.isfunction(member):
                assert hasattr(cls, name) != (name in OWN_HELPERS[ours]), f"{cls.__name__}.{name}"
    assert "EagleDraftWorker(" in inspect.getsource(eagle_worker_v2.EAGLEWorkerV2.__init__)


def test_a_decode_step_of_sglangs_has_the_stages_of_ours() -> None:
    """HvdWorker._decode replaces this branch of SGLang's forward_batch_generation."""
    forward = eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation
    assert _parameters(forward) == [
        *("self", "batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
    ]
    [choice] = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0].body  # type: ignore[attr-defined]
    assert ast.unparse(choice.test) == "batch.forward_mode.is_extend() or batch.is_extend_in_batch"
    nodes = [node for each in choice.orelse for node in ast.walk(each)]
    conditions = [ast.unparse(node.test) for node in nodes if isinstance(node, ast.If | ast.Assert)]
    assert sorted(conditions) == sorted(
        [
            "batch.spec_info is None",  # an idle rank of data-parallel attention, which is refused
            # Drafts that the scheduler built, under pipeline parallelism, which is refused.
            "batch.spec_info is not None and batch.spec_info.is_verify_input()",
            "self.speculative_num_steps == 0",  # adaptive speculation, which is refused
            "verify_input.is_verify_input()",
            "on_publish is not None",
            "self.speculative_num_steps == 0"  # adaptive speculation
            " and envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get()",
            "get_parallel().pp_size > 1 and (not batch.forward_mode.is_idle())"  # pipeline stages
            " and (self.speculative_num_steps > 0)",
        ]
    )
    contexts = [
        [ast.unparse(item) for item in node.items] for node in nodes if isinstance(node, ast.With)
    ]
    around = [
        "draft_tp_context(self.draft_worker.parallel_layout)",
        "speculative_moe_backend_context()",
        "speculative_moe_a2a_backend_context()",
    ]  # as in draft_worker.drafting
    assert contexts == [
        [*around, f"spec_stage_span({stage!r})"]
        for stage in ("draft", "draft_extend", "draft")  # the last under pipeline parallelism
    ]
    assert all(f"{context.split('(')[0]}(" in inspect.getsource(drafting) for context in around)
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert {name for name in called if name.startswith(("self.", "batch."))} == {
        "self.activate_step_by_batch",  # adaptive speculation
        "self.speculative_algorithm.is_standalone",  # idle ranks
        "batch.spec_info.is_verify_input",
        "self._build_trivial_verify_input",  # adaptive speculation
        "self.draft_worker.draft",
        "self.verify",
        "self._stub_skipped_draft_extend",
        "self.draft_worker._draft_extend_for_decode",
        *("batch.forward_mode.is_idle", "batch.seq_lens_cpu.sum"),  # pipeline parallelism
    }
    source = "\n".join(ast.unparse(each) for each in choice.orelse)
    stages = (
        "self.activate_step_by_batch(",
        "if batch.spec_info is None:",
        "elif self.speculative_num_steps == 0:",
        "self.draft_worker.draft(batch)",
        "assert verify_input.is_verify_input()",
        "batch.spec_info = verify_input",
        "self.verify(",
        "on_publish(batch_output.new_seq_lens)",
        "self._stub_skipped_draft_extend(batch, batch_output)",
        "self.draft_worker._draft_extend_for_decode(",
        "get_parallel().pp_size > 1",
        "return batch_output",
    )
    places = [source.index(stage) for stage in stages]
    assert places == sorted(places)
    assert _parameters(eagle_worker_v2.EAGLEWorkerV2.verify) == [
        *("self", "batch", "pp_proxy_tensors", "grammar_barrier"),
    ]


def test_a_prefill_is_recorded_between_the_models_forwards() -> None:
    source = inspect.getsource(eagle_worker_v2.EAGLEWorkerV2._forward_prefill_batch)
    target = source.index("self.target_worker.forward_batch_generation(")
    assert target < source.index("self.draft_worker._draft_extend_for_prefill(")


def test_what_is_of_one_number_of_draft_steps_is_what_sglang_switches() -> None:
    switch = inspect.getsource(eagle_worker_v2.EAGLEWorkerV2.apply_runtime_state)
    for name in (
        "dw.speculative_num_steps",
        "dw.draft_attn_backend",
        "dw.draft_runner.draft_attn_backend",
    ):
        assert f"{name} = state." in switch
    assert "dw._rebuild_topk1_chain_buffers()" in switch
    rebuild = inspect.getsource(eagle_worker_v2.EagleDraftWorker._rebuild_topk1_chain_buffers)
    for name in ("_topk1_parents_prealloc", "_topk1_score_indices_prealloc"):
        assert f"self.{name} = " in rebuild
    made = inspect.signature(EAGLEDraftCudaGraphRunner.__init__).parameters.values()
    required = [each.name for each in made if each.default is inspect.Parameter.empty]
    assert required == ["self", "eagle_worker"]


def test_runners_of_draft_extend_share_the_lengths_that_they_capture_with() -> None:
    made = inspect.getsource(EAGLEDraftExtendCudaGraphRunner.__init__)
    assert 'self.buffers.share_buffers(exclude={"select_index"})' in made
    assert "extend_seq_lens=extend_seq_lens" in made
    replay = inspect.getsource(EAGLEDraftExtendCudaGraphRunner.execute)
    assert "buffers.extend_seq_lens[:raw_bs]" in replay


@pytest.mark.parametrize(("num_requests", "is_refused"), [(883, False), (884, True)])
def test_more_probabilities_than_32_bits_number_are_refused(
    num_requests: int, is_refused: bool
) -> None:
    with pytest.raises(ValueError, match="32 bits") if is_refused else contextlib.nullcontext():
        check_sampling(num_requests * 32, 151_936)


def test_room_follows_the_widest_verification_and_graphs_the_base() -> None:
    for function in (get_alloc_len_per_decode, get_req_to_token_extra_context_len):
        assert "max_speculative_num_draft_tokens()" in inspect.getsource(function)
    rows = inspect.getsource(inspect.unwrap(ModelRunner.max_decode_logits_rows))
    assert "draft_token_counts = [max_speculative_num_draft_tokens()]" in rows
    assert "max(capture_bs) * num_tokens_per_req" in rows
    sizes = inspect.getsource(get_batch_sizes_to_capture)
    assert "list(get_exec().graph.cuda_graph_config.decode.bs)" in sizes


def test_sglang_keeps_room_for_the_widest_verification() -> None:
    require_hooks()
    args = ServerArgs(model_path="none")
    args._resolution_finished = False
    with pytest.MonkeyPatch.context() as patch:
        resolved = SimpleNamespace(
            speculative_algorithm="EAGLE3",
            speculative_num_draft_tokens=32,
            speculative_adaptive=False,
        )
        patch.setattr(overrides, "resolving_view", lambda args: resolved)
        assert overrides.max_speculative_num_draft_tokens(args) == 32
        args._hvd_launch = SimpleNamespace(widths=VerifyWidths((8, 32, 64), base=32))
        assert overrides.max_speculative_num_draft_tokens(args) == 64


def test_the_scores_of_the_model_drafters_nodes_can_be_kept() -> None:
    body = inspect.getsource(eagle_worker_v2.EagleDraftWorker.draft_forward)
    assert "= organize_draft_results(\n" in body
    parameters = _parameters(eagle_worker_v2.organize_draft_results)
    assert parameters == ["score_list", "token_list", "parents_list", "num_draft_token"]


def test_the_width_of_a_verification_is_read_from_its_input() -> None:
    prepare = inspect.getsource(eagle_utils.eagle_prepare_for_verify)
    assert "draft_token_num=verify_input.draft_token_num" in prepare
    verify = inspect.getsource(eagle_worker_v2.EAGLEWorkerV2.verify)
    assert "num_draft_tokens=self.speculative_num_draft_tokens" in verify
    assert "topk=self.topk" in verify
    run = inspect.getsource(eagle_worker_common.run_eagle_verify)
    assert "accept_index=accept_index" in run
    assert "= target_worker.forward_batch_generation(" in run  # before which its plan is fenced
    extend = inspect.getsource(eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode)
    assert "num_tokens_per_req=self.speculative_num_draft_tokens" in extend


def test_a_draft_input_can_be_cut_to_some_requests() -> None:
    body = inspect.getsource(EagleDraftInput.filter_batch)
    assert "if self.future_indices is not None:" in body
    for name in ("topk_p", "topk_index", "hidden_states", "bonus_tokens"):
        assert f"self.{name} = self.{name}[new_indices]" in body


def test_draft_extend_can_be_left_out() -> None:
    stub = eagle_worker_v2.EAGLEWorkerV2._stub_skipped_draft_extend
    assert _parameters(stub) == ["self", "batch", "batch_output"]
    extend = eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode
    assert _parameters(extend) == ["self", "batch", "batch_result", "kv_loc_plan"]


def test_draft_extend_of_a_prefill_is_what_catching_up_runs() -> None:
    method = eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill
    assert _parameters(method)[:4] == ["self", "batch", "target_hidden_states", "next_token_ids"]
    extend = inspect.getsource(method)
    assert "capture_hidden_mode=capture_hidden_mode" in extend
    assert "probs = renorm_draft_probs(" in extend
    assert "topk_p, topk_index = fast_topk(probs, self.topk, dim=-1)" in extend
    # Tokens and positions are one apart: the token after a position meets its hidden state.
    assert "torch.cat((input_ids[1:], tail_tokens[i].reshape(1)))" in extend


def test_the_drafters_graphs_come_after_pools_backends_and_the_targets_graphs() -> None:
    body = inspect.getsource(Scheduler.init_all_cuda_graphs)
    assert body.index("self.tp_worker.init_cuda_graphs()") < body.index(
        "self.draft_worker.init_cuda_graphs()"
    )
    body = inspect.getsource(Scheduler)
    graphs = body.index("self.init_all_cuda_graphs()")
    assert body.index("self.init_all_attention_backends()") < graphs


def test_run_eagle_verify_takes_topk_apart_from_the_tree() -> None:
    parameters = _parameters(eagle_worker_common.run_eagle_verify)
    assert {"topk", "num_draft_tokens", "finalize_tree_path", "grammar_barrier"} <= set(parameters)
    assert "topk > 1" in inspect.getsource(eagle_worker_common.run_eagle_verify)


def test_the_verify_input_is_shaped_by_two_properties() -> None:
    for name in ("max_tree_depth", "tree_topk"):
        assert isinstance(inspect.getattr_static(EagleVerifyInput, name), property)
        assert isinstance(inspect.getattr_static(HvdVerifyInput, name), property)
    fields = {field.name for field in dataclasses.fields(EagleVerifyInput)}
    assert {"kv_loc_plan", "prepared_out_cache_loc", "retrieve_next_sibling"} <= fields


def test_results_and_requests_carry_what_is_read() -> None:
    results = {field.name for field in dataclasses.fields(GenerationBatchResult)}
    assert {"next_token_ids", "accept_lens"} <= results
    assert "bonus_tokens" in {field.name for field in dataclasses.fields(EagleDraftInput)}
    batches = {field.name for field in dataclasses.fields(ScheduleBatch)}
    assert {"reqs", "chunked_req", "seq_lens", "seq_lens_cpu", "seq_lens_sum"} <= batches
    source = inspect.getsource(Req)
    for name in ("origin_input_ids", "origin_input_ids_unpadded", "output_ids", "finished_len"):
        assert f"self.{name}" in source
    assert isinstance(inspect.getattr_static(Req, "output_ids_through_stop"), property)
    assert "__slots__" not in vars(Req)  # our state hangs on the request


def test_the_output_streamer_can_be_extended() -> None:
    for name in ("build_additional_customized_info", "is_request_level_customized_info_key"):
        assert callable(getattr(SchedulerOutputStreamer, name))


def test_the_scheduler_tells_the_worker_of_ends_and_flushes() -> None:
    assert _parameters(BaseSpecWorker.note_request_finished) == ["self", "rid", "natural_stop"]
    assert _parameters(BaseSpecWorker.clear_cache_pool) == ["self"]


def test_the_dumpers_requests_carry_any_text_and_a_reason() -> None:
    assert {"method", "body"} <= set(DumperControlReqInput.__struct_fields__)
    assert {"success", "response", "error"} <= set(DumperControlReqOutput.__struct_fields__)
    assert {"model_path", "load_format"} <= set(UpdateWeightFromDiskReqInput.__struct_fields__)
    assert _parameters(TokenizerControlMixin.dumper_control) == ["self", "obj"]
    # What the handler returns is sent to the one who asked.
    assert "self.send_control_output(output, recv_req)" in inspect.getsource(
        inspect.unwrap(Scheduler.process_input_requests)
    )


def test_drafting_can_be_called_up_to_its_tree() -> None:
    assert _parameters(eagle_worker_common.prepare_for_draft) == [
        *("draft_input", "req_to_token_pool", "batch", "cuda_graph_runner", "draft_model_runner"),
        *("topk", "num_steps", "target_translator", "num_draft_tokens"),
    ]
    source = inspect.getsource(eagle_worker_v2.EagleDraftWorker.draft)
    for name in ("cuda_graph_runner.execute(", "draft_forward(", "init_forward_metadata("):
        assert name in source


def test_a_width_can_have_backends_and_graphs_of_its_own() -> None:
    worker = eagle_worker_v2.EAGLEWorkerV2
    parameters = _parameters(worker._override_worker_state)
    assert parameters[:3] == ["self", "speculative_num_steps", "speculative_num_draft_tokens"]
    adaptive = inspect.getsource(worker.build_adaptive_runtime_state)
    for name in (
        *("_draft_worker.init_attention_backend()", "_get_attention_backend(", "attn_backend="),
        *("speculative_num_steps=", "speculative_num_draft_tokens="),
    ):
        assert name in adaptive
    # One workspace for all of FlashInfer's backends, unless another is asked for.
    asked_for = inspect.signature(ModelRunner._get_attention_backend).parameters
    assert asked_for["init_new_workspace"].default is False
    assert "disable_padding = get_exec().graph.disable_cuda_graph_padding" in inspect.getsource(
        DecodeCudaGraphRunner
    )
    # What is swapped is all that SGLang's own swap changes besides the draft loop and the settings.
    swap = inspect.getsource(worker.apply_runtime_state)
    for name in (
        *("dw.draft_extend_attn_backend =", "dw.draft_runner.attn_backend ="),
        *("dw.cuda_graph_runner_for_draft_extend =", "model_runner.attn_backend ="),
        "model_runner.decode_cuda_graph_runner =",
    ):
        assert name in swap
    assert "self.eager_runner = " in inspect.getsource(ModelRunner)
    assert MambaAttnBackendBase.accept_lens_pool is None  # unless verifications are fused
    assert HybridLinearAttnBackend.__init__.__annotations__["linear_attn_backend"]
    # FlashInfer's kernel, and Mamba-2's, take a step's width for the distance of two requests'
    # states.
    layers = Path(inspect.getfile(HybridLinearAttnBackend)).parent / "linear"
    gdn = (layers / "gdn_backend.py").read_text()  # the CPU's kernels here lack what it imports
    assert "self.verify_kernel_is_flashinfer = True" in gdn
    assert "self.kernel_dispatcher = GDNKernelDispatcher(" in gdn
    assert "cache_steps=draft_token_num" in inspect.getsource(MambaMixer2.forward)
    extend = inspect.signature(EAGLEDraftExtendCudaGraphRunner.__init__)
    required = [p for p in extend.parameters.values() if p.default is inspect.Parameter.empty]
    assert len(required) == 2  # itself and the draft worker


def test_graphs_hand_on_all_that_the_draft_loop_returns() -> None:
    source = inspect.getsource(EAGLEDraftCudaGraphRunner._postprocess_output_to_raw_bs)
    assert "t[:raw_bs] if t is not None else None for t in out" in source


def test_backends_say_which_mask_they_read() -> None:
    assert isinstance(inspect.getattr_static(AttentionBackend, "verify_mask"), property)
    assert {"buffer", "mode", "max_bs"} <= set(VerifyMask.__struct_fields__)
    assert _parameters(VerifyMask.fits) == ["self", "bs"]


def test_arguments_are_read_and_resolved_through_views() -> None:
    assert _parameters(overrides.resolved_view) == ["server_args"]
    assert _parameters(overrides.resolving_view) == ["server_args"]
    assert _parameters(overrides.declare_resolution)[:2] == ["server_args", "source"]
    assert callable(overrides.attention_backends_of)


def test_our_launch_reaches_the_scheduler_process_with_the_arguments() -> None:
    # Private attributes of the record are pickled with it.
    server_args = ServerArgs(model_path="none")
    server_args._hvd_flags = {"policy": "cache"}
    assert pickle.loads(pickle.dumps(server_args))._hvd_flags == {"policy": "cache"}
