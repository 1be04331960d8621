"""Every name of SGLang that the CPU host relies on, with the parameters it relies on."""

import inspect
import pkgutil

import pytest
import torch
from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel_cpu import hooks, replayed_graphs
from sglang.srt.speculative import eagle_utils

PARAMETERS = {
    "sglang.kernels.ops.speculative.spec_tree.TreeMaskMode": None,
    "sglang.srt.arg_groups.choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES": None,
    "sglang.srt.arg_groups.choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": None,
    "sglang.srt.arg_groups.overrides.resolving_view": "server_args",
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook": "name",
    "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu": "server_args",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend": "name",
    "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend.__init__": (
        "self model_runner"
    ),
    "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend.forward_decode": (
        "self q k v layer forward_batch save_kv_cache sinks"
    ),
    "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend.forward_extend": (
        "self q k v layer forward_batch save_kv_cache sinks"
    ),
    "sglang.srt.layers.attention.intel_amx_backend.IntelAMXMultiStepDraftBackend.__init__": (
        "self model_runner topk speculative_num_steps"
    ),
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": (
        "self hidden_states lm_head embedding_bias out"
    ),
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply": "self layer x bias",
    "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode": "self",
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph": (
        "model_runner"
    ),
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
    "._record_in_graph_metadata_prep_done": "self",
    "sglang.srt.model_executor.runner_backend.utils.resolve_decode_backend": "cuda_graph_runner",
    "sglang.srt.plugins.hook_registry.HookRegistry.register": "target hook hook_type source",
    "sglang.srt.plugins.hook_registry.HookRegistry._patched": None,
    "sglang.srt.runtime_context.attention_backends": "",
    "sglang.srt.speculative.draft_utils.DraftBackendFactory.__init__": (
        "self draft_model_runner topk speculative_num_steps seed_dsa_topk_from_draft_extend "
        "qsa_profile"
    ),
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs": "self",
    "sglang.srt.speculative.eagle_utils._verify_uses_greedy": (
        "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling"
    ),
    "sglang.srt.speculative.eagle_utils.default_tree_mask_mode": "",
    "sglang.srt.speculative.eagle_utils.eagle_sample": (
        "verify_input batch logits_output grammar_mask uno_target_max_top_k watermark_state "
        "watermark_full_mask"
    ),
    "sglang.srt.utils.is_cpu": "",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_name_and_parameters_are_as_expected(name: str) -> None:
    found = inspect.unwrap(pkgutil.resolve_name(name))
    if PARAMETERS[name] is not None:
        assert " ".join(inspect.signature(found).parameters) == PARAMETERS[name]


def test_every_hook_target_is_listed_here() -> None:
    targets = set(hooks.TARGETS) | set(replayed_graphs.TARGETS)
    classes = {target for target in targets if inspect.isclass(pkgutil.resolve_name(target))}
    assert targets - classes <= set(PARAMETERS)
    assert {f"{target}.__init__" for target in classes} <= set(PARAMETERS)


def test_amx_operator_is_missing_so_that_sglang_runs_its_native_layers() -> None:
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def test_backend_calls_attention_with_the_arguments_of_our_operators() -> None:
    """SGLang passes them by position: schema and function must have as many."""
    for operator in (decode_attention_cpu, extend_attention_cpu):
        schema = getattr(torch.ops.sgl_kernel, operator.__name__).default._schema
        ours = inspect.signature(operator).parameters.values()
        assert len(schema.arguments) == sum(p.kind != p.KEYWORD_ONLY for p in ours)


def test_verify_filters_top_k_before_top_p_before_sampling() -> None:
    """keep_top_k leaves the mass unscaled because keep_top_p comes next and must see all of it."""
    source = inspect.getsource(inspect.unwrap(eagle_utils.eagle_sample))
    order = [
        source.index(call)
        for call in (
            "tree_speculative_sampling_target_only",
            "top_k_renorm_prob(",
            "top_p_renorm_prob(",
            "sampling_fn(\n",
        )
    ]
    assert order == sorted(order)
