"""How wide a server verifies that was not told, and what it refuses."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.startup import verify_widths as verify_widths_module
from sglang_hvd.plugin.startup.attention_support import TargetAttention
from sglang_hvd.plugin.startup.refusals import (
    check_update,
    refuse_untested,
    tree_of_flags,
)
from sglang_hvd.plugin.startup.verify_widths import check_pool, verify_widths

# What refuse_untested reads of SGLang's arguments.
REFUSED_BY_NONE: dict[str, object] = {
    **dict.fromkeys(
        [
            *("speculative_adaptive", "speculative_use_rejection_sampling"),
            *("speculative_use_block_verification", "enable_two_batch_overlap", "enable_hisparse"),
            *("enable_multi_layer_eagle", "enable_mixed_chunk", "enable_return_routed_experts"),
            *("enable_linear_replayssm_spec", "enable_pdmux", "enable_dp_attention"),
            *("enable_watermark", "enable_prefill_cp", "enable_pd_role_switch"),
        ],
        False,
    ),
    **{"speculative_num_steps": 3, "attn_dp_size": 1, "pp_size": 1, "disaggregation_mode": "null"},
    **{"moe_a2a_backend": "none", "moe_dense_tp_size": None, "dcp_size": 1, "kv_canary": "none"},
    "attn_cp_size": 1,
    **{"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0},
}


@pytest.fixture(autouse=True)
def text_config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of the target model."""
    text_config = SimpleNamespace()
    model_config = SimpleNamespace(hf_text_config=text_config)
    monkeypatch.setattr(verify_widths_module, "model_config_of", lambda cfg: model_config)
    return text_config


def widths_of(
    *,
    tree: int = 16,
    device: str = "cuda",
    requests: int = 48,
    attention: TargetAttention | None = None,
    widths_are_free: bool = False,
    backend: str = "flashinfer",
    drafter_backend: str | None = None,
    context_len: int = 4096,
    enable_lora: bool = False,
    lora_paths: list[str] | None = None,
    is_deterministic: bool = False,
    has_overlap: bool = False,
    **settings: Any,
) -> VerifyWidths:
    cfg = SimpleNamespace(
        device=device,
        disable_overlap_schedule=not has_overlap,
        max_running_requests=requests,
        enable_lora=enable_lora,
        lora_paths=lora_paths,
        enable_deterministic_inference=is_deterministic,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        attention_backend=backend,
        speculative_draft_attention_backend=drafter_backend,
    )
    return verify_widths(
        HvdConfig(**settings),
        tree,
        cfg,
        attention or TargetAttention(),
        context_len=context_len,
        widths_are_free=widths_are_free,
    )


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
        ("enable_linear_replayssm_spec", True, "--enable-linear-replayssm-spec"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_watermark", True, "--enable-watermark"),
        ("kv_canary", "log", "--kv-canary log"),
        (
            *("speculative_accept_threshold_single", 0.5),
            "--speculative-accept-threshold-single below 1",
        ),
        ("speculative_accept_threshold_acc", 0.9, "--speculative-accept-threshold-acc below 1"),
        ("speculative_num_steps", 0, "--speculative-num-steps 0"),
        ("pp_size", 2, "--pp-size above 1"),
        ("dcp_size", 2, "--dcp-size above 1"),
        ("attn_cp_size", 2, "--attn-cp-size above 1"),
        ("enable_prefill_cp", True, "--enable-prefill-cp"),
        ("moe_a2a_backend", "deepep", "--moe-a2a-backend deepep"),
        ("moe_dense_tp_size", 1, "--moe-dense-tp-size"),
        ("enable_pd_role_switch", True, "--enable-pd-role-switch"),
        (
            "speculative_accept_threshold_acc",
            math.nan,
            "--speculative-accept-threshold-acc below 1",
        ),
    ],
)
def test_what_would_be_wrong_or_was_not_tried_is_refused(
    field: str, value: object, flag: str
) -> None:
    cfg = SimpleNamespace(**REFUSED_BY_NONE)
    refuse_untested(cfg)
    setattr(cfg, field, value)
    with pytest.raises(ValueError, match=f"HVD does not support {flag}: drop it"):
        refuse_untested(cfg)


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ((None, None, None), None),
        ((3, 4, 16), 16),
        ((3, 4, 37), 37),
        *(((3, 1, width), 4) for width in (None, 4, 60)),  # SGLang makes a chain of its steps
        ((3, None, None), "--speculative-num-steps 3 describes a part .*: give .*-topk and .*-tok"),
        ((None, 4, None), "--speculative-eagle-topk 4 describes a part .*: give .*-steps and"),
        (
            (None, None, 8),
            "-num-draft-tokens 8 describes a part .*: give .*-steps and .*-topk too",
        ),
        ((3, 4, None), "-steps 3 .*-topk 4 describes .*: give --speculative-num-draft-tokens too"),
        ((3, None, 8), "-steps 3 .*-tokens 8 describes .*: give --speculative-eagle-topk too"),
        ((None, 1, 8), "-topk 1 .*-tokens 8 describes .*: give --speculative-num-steps too"),
        ((3, 4, 1), "--speculative-num-draft-tokens 1 drafts nothing: give at least 2"),
        ((3, 4, -1), "--speculative-num-draft-tokens -1 drafts nothing"),
        ((-1, 4, 8), "--speculative-num-steps -1 drafts nothing: give at least 1"),
        ((3, 0, 8), "--speculative-eagle-topk 0 drafts nothing: give at least 1"),
        ((3, 4, 38), "is more than the model drafter can propose: 37 with 3 steps and topk 4"),
    ],
)
def test_the_flags_of_the_tree_describe_all_of_it_or_nothing(
    tree: tuple[int | None, ...], found: int | str | None
) -> None:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    cfg = SimpleNamespace(**dict(zip(names, tree, strict=True)))
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            tree_of_flags(cfg)
    else:
        assert tree_of_flags(cfg) == found


@pytest.mark.parametrize(
    ("updates", "fault"),
    [
        ({"speculative_accept_threshold_single": 0.5}, "threshold-single below 1: drop it"),
        ({"speculative_accept_threshold_acc": None}, "threshold-acc below 1: drop it"),
        ({"speculative_accept_threshold_acc": "1"}, "threshold-acc below 1: drop it"),
        ({"speculative_accept_threshold_acc": math.nan}, "threshold-acc below 1: drop it"),
        ({"pp_max_micro_batch_size": 4, "enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"pp_max_micro_batch_size": "4"}, "pp_max_micro_batch_size must be an integer, got '4'"),
    ],
)
def test_what_is_refused_at_start_is_refused_while_serving(
    updates: dict[str, object], fault: str
) -> None:
    cfg = SimpleNamespace(**REFUSED_BY_NONE)
    check_update(cfg, {"speculative_accept_threshold_single": 1, "pp_max_micro_batch_size": 8})
    with pytest.raises(ValueError, match=fault):
        check_update(cfg, updates)


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_RUST_SERVER", "1"), ("SGLANG_SIMULATE_ACC_LEN", "0.5")]
)
def test_what_the_environment_asks_for_is_refused_too(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"HVD does not support {name}: drop it"):
        refuse_untested(SimpleNamespace(**REFUSED_BY_NONE))
    monkeypatch.setenv(name, "0")
    refuse_untested(SimpleNamespace(**REFUSED_BY_NONE))


def test_one_or_two_requests_verify_more_where_it_is_weighed() -> None:
    for requests, narrow in ((1, ()), (4, (16,)), (16, (4, 8, 16)), (48, (1, 2, 4, 8, 16))):
        assert widths_of(requests=requests) == VerifyWidths((*narrow, 32, 64), base=32)
    assert widths_of(device="cpu").values[-1] == 32
    assert widths_of(policy="payoff") == VerifyWidths((32,), base=32)
    assert widths_of(max_draft_tokens=20).values[-1] == 21
    # Who names widths has no others.
    assert widths_of(verify_width=24).values[-1] == 24
    assert widths_of(narrow_widths=()).values == (32,)
    assert widths_of(enable_lora=True).values == (32,)


def test_a_kernel_for_decoding_verifies_no_more_than_its_users_ask_of_it() -> None:
    assert widths_of(backend="trtllm_mha", requests=1) == VerifyWidths((16,), base=16)
    assert widths_of(backend="trtllm_mha", tree=20, requests=1) == VerifyWidths((20,), base=20)
    # The drafter's, too: draft-extend is as wide as the verification before it.
    assert widths_of(drafter_backend="trtllm_mha", requests=1) == VerifyWidths((16,), base=16)
    assert widths_of(drafter_backend="triton", requests=1) == widths_of(requests=1)
    named = {"verify_width": 32, "wide_width": 64}
    assert widths_of(backend="trtllm_mha", requests=1, **named).values == (32, 64)


def test_a_width_that_is_not_much_wider_is_not_worth_its_memory() -> None:
    assert widths_of(max_draft_tokens=40).values[-1] == 32
    assert widths_of(max_draft_tokens=47).values[-1] == 48
    assert widths_of(tree=60).values[-1] == 60


def test_the_context_has_room_for_every_width() -> None:
    assert widths_of(context_len=65).values[-1] == 64
    assert widths_of(context_len=64).values[-1] == 32
    with pytest.raises(ValueError, match="--hvd-verify-width 32 leaves nothing of the context of"):
        widths_of(context_len=32)
    with pytest.raises(
        ValueError, match="--hvd-set wide_width=64 leaves nothing of the context of"
    ):
        widths_of(context_len=64, wide_width=64)


def test_what_a_full_step_verifies_of_all_requests() -> None:
    widths = VerifyWidths((4, 32, 64), base=32)
    assert [widths.max_nodes(requests) for requests in (1, 2, 3, 4, 5, 48)] == [
        *(64, 128, 128),
        *(128, 160, 48 * 32),
    ]
    assert [widths.batch_limit(width, 48) for width in widths.values] == [48, 48, 2]
    assert widths.batch_limit(64, 1) == 1


def test_a_wide_width_that_is_asked_for() -> None:
    widths = widths_of(wide_width=48, narrow_widths=(4, 8))
    assert widths == VerifyWidths((4, 8, 32, 48), base=32, asked_for=frozenset({4, 8, 48}))
    widths = widths_of(requests=1, verify_width=24, wide_width=48, narrow_widths=())
    assert widths == VerifyWidths((24, 48), base=24, asked_for=frozenset({48}))
    widths = widths_of(
        wide_width=48, device="cpu", widths_are_free=True, enable_lora=True, backend="torch_native"
    )
    assert widths.values == (1, 2, 4, 8, 16, 32, 48)
    assert widths_of(wide_width=32).values[-1] == 32
    with pytest.raises(ValueError, match=r"--hvd-set wide_width=24 is narrower than .* width 32"):
        widths_of(wide_width=24)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"is_deterministic": True}, "--enable-deterministic-inference"),
        ({"attention": TargetAttention(is_linear=True)}, "linear attention"),
        ({"device": "cpu", "widths_are_free": True, "backend": "intel_amx"}, "intel_amx"),
    ],
)
def test_where_sglang_follows_the_base_a_wide_width_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"does not support --hvd-set wide_width with .*{reason}"):
        widths_of(wide_width=64, **settings)
    assert widths_of(wide_width=widths_of(**settings).base, **settings) == widths_of(**settings)


def test_nodes_that_are_not_nearly_free_are_not_verified_by_default(
    text_config: SimpleNamespace,
) -> None:
    linear = TargetAttention(is_linear=True)
    assert widths_of(tree=4, attention=linear).values[-1] == 8
    assert widths_of(tree=12, attention=linear).values[-1] == 12
    text_config.num_experts = None
    assert widths_of().values[-1] == 64
    text_config.n_routed_experts = 64
    assert widths_of().values[-1] == 32


def test_the_model_drafters_tree_always_fits() -> None:
    assert {
        widths_of(tree=60, policy=policy).base for policy in ("allocate", "payoff", "model")
    } == {60}
    assert widths_of(policy="model").values == (16,)
    with pytest.raises(ValueError, match="narrower than the model drafter's tree of 60 nodes"):
        widths_of(tree=60, verify_width=32)


def test_both_drafts_of_a_request_have_room() -> None:
    assert widths_of(policy="both").values == (32,)
    assert widths_of(tree=32, policy="both").values == (40,)
    assert widths_of(tree=32, policy="both", verify_width=33).values == (33,)
    with pytest.raises(ValueError, match="no room for a cache draft next to"):
        widths_of(tree=32, policy="both", verify_width=32)


def test_narrow_widths_follow_the_number_of_requests() -> None:
    for requests, narrow in ((5, (8, 16)), (256, (1, 2, 4, 8, 16))):
        assert widths_of(requests=requests).values == (*narrow, 32, 64)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_lora": True}, "LoRA on this device"),
        ({"lora_paths": ["adapter"]}, "LoRA on this device"),
        # Near-ties would fall by how wide a step is, which other requests decide too.
        ({"is_deterministic": True}, "--enable-deterministic-inference"),
    ],
)
def test_what_keeps_a_gpu_to_one_width(settings: dict[str, Any], reason: str) -> None:
    assert widths_of(**settings).values == (32,)
    with pytest.raises(ValueError, match=f"--hvd-set narrow_widths with {reason}: drop one"):
        widths_of(narrow_widths=(4,), **settings)


def test_other_policies_have_the_widths_that_are_asked_for() -> None:
    assert widths_of(policy="payoff", narrow_widths=(4, 8)).values == (4, 8, 32)
    assert widths_of(policy="payoff", narrow_widths=(4, 8)).asked_for == {4, 8}


def test_where_widths_cost_nothing_there_are_all_powers_of_two() -> None:
    for policy in ("allocate", "cache"):
        widths = widths_of(policy=policy, device="cpu", widths_are_free=True, enable_lora=True)
        assert widths == VerifyWidths((1, 2, 4, 8, 16, 32), base=32)


def test_none_that_is_narrow_is_as_wide_as_the_base() -> None:
    with pytest.raises(ValueError, match="must stay below the verify width 32"):
        widths_of(narrow_widths=(4, 32))


@pytest.mark.parametrize(
    ("requests", "narrow"), [(1, (1,)), (4, (1, 16)), (16, (1, 4, 8, 16)), (48, (1, 2, 4, 8, 16))]
)
def test_steps_that_run_ahead_have_a_width_of_one(requests: int, narrow: tuple[int, ...]) -> None:
    ahead = partial(widths_of, has_overlap=True, run_ahead=True)
    assert ahead(requests=requests).values == (*narrow, 32, 64)
    assert widths_of(requests=requests, has_overlap=True) == widths_of(requests=requests)
    twice = ahead(requests=1, verify_width=64)
    assert twice.values == (1, 32, 64)


@pytest.mark.parametrize("settings", [{"has_overlap": False}, {"narrow_widths": (4, 8)}])
def test_a_server_that_cannot_run_ahead_is_refused_before_a_model_loads(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="run_ahead=true needs a verify width of 1, overlap"):
        widths_of(run_ahead=True, **{"has_overlap": True, **settings})


@pytest.mark.parametrize(("num_tokens", "is_refused"), [(None, False), (96, False), (95, True)])
def test_a_pool_that_holds_no_request_is_refused(num_tokens: int | None, is_refused: bool) -> None:
    cfg = SimpleNamespace(
        max_total_tokens=num_tokens, speculative_num_steps=3, speculative_eagle_topk=4
    )
    widths = VerifyWidths((1, 32), base=32)
    if is_refused:
        with pytest.raises(ValueError, match="95 has no room for a request of 32 tokens"):
            check_pool(widths, cfg)
    else:
        check_pool(widths, cfg)
