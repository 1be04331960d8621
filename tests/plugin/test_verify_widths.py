"""How wide a server verifies that was not told, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin import algorithm
from sglang_hvd.plugin import verify_widths as verify_widths_module
from sglang_hvd.plugin.tree_support import TargetAttention
from sglang_hvd.plugin.verify_widths import VerifyWidths, verify_widths

# What _refuse_untested reads of SGLang's arguments.
REFUSED_BY_NONE: dict[str, object] = {
    **dict.fromkeys(
        [
            *("speculative_adaptive", "speculative_use_rejection_sampling"),
            *("speculative_use_block_verification", "enable_two_batch_overlap", "enable_hisparse"),
            *("enable_multi_layer_eagle", "enable_mixed_chunk", "enable_return_routed_experts"),
            *("enable_linear_replayssm_spec", "enable_pdmux", "enable_dp_attention"),
        ],
        False,
    ),
    **{"speculative_num_steps": 3, "attn_dp_size": 1, "pp_size": 1, "disaggregation_mode": "null"},
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
    is_any_width: bool = False,
    enable_lora: bool = False,
    lora_paths: list[str] | None = None,
    **settings: Any,
) -> VerifyWidths:
    cfg = SimpleNamespace(
        device=device,
        max_running_requests=requests,
        enable_lora=enable_lora,
        lora_paths=lora_paths,
    )
    return verify_widths(
        HvdConfig(**settings),
        tree,
        cfg,
        attention or TargetAttention(),
        is_any_width=is_any_width,
    )


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
        ("enable_linear_replayssm_spec", True, "--enable-linear-replayssm-spec"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("speculative_num_steps", 0, "--speculative-num-steps 0"),
        ("pp_size", 2, "--pp-size above 1"),
    ],
)
def test_what_would_be_wrong_or_was_not_tried_is_refused(
    field: str, value: object, flag: str
) -> None:
    cfg = SimpleNamespace(**REFUSED_BY_NONE)
    algorithm._refuse_untested(cfg)
    setattr(cfg, field, value)
    with pytest.raises(ValueError, match=f"HVD does not support {flag}: drop it"):
        algorithm._refuse_untested(cfg)


def test_one_or_two_requests_verify_more_where_it_is_weighed() -> None:
    for requests, narrow in ((4, (16,)), (16, (4, 8, 16)), (48, (1, 2, 4, 8, 16))):
        assert widths_of(requests=requests) == VerifyWidths((*narrow, 32, 64), base=32)
    assert widths_of(device="cpu") == VerifyWidths((1, 2, 4, 8, 16, 32), base=32)
    assert widths_of(policy="payoff") == VerifyWidths((32,), base=32)
    assert widths_of(max_draft_tokens=40).values[-2:] == (32, 41)
    assert widths_of(max_draft_tokens=20).values[-1] == 21
    assert widths_of(tree=60) == VerifyWidths((1, 2, 4, 8, 16, 32, 60, 64), base=60)
    # Who names widths has no others.
    assert widths_of(verify_width=24).values[-1] == 24
    assert widths_of(narrow_widths=()).values == (32,)
    assert widths_of(enable_lora=True).values == (32,)


def test_where_hardly_more_can_run_every_step_may_be_as_wide() -> None:
    for requests, narrow in ((1, (32,)), (2, (32,)), (3, (16, 32))):
        assert widths_of(requests=requests) == VerifyWidths((*narrow, 64), base=64)
    assert widths_of(requests=4).base == 32
    # SGLang makes room for what so many verify at the base width.
    for requests in (1, 3, 4, 48):
        widths = widths_of(requests=requests)
        assert widths.most_nodes(requests) == requests * widths.base
    assert widths_of().most_nodes(1) == 64


def test_a_wide_width_that_is_asked_for() -> None:
    widths = widths_of(wide_width=48, narrow_widths=(4, 8))
    assert widths == VerifyWidths((4, 8, 32, 48), base=32, asked_for=frozenset({4, 8, 48}))
    widths = widths_of(wide_width=48, device="cpu", is_any_width=True, enable_lora=True)
    assert widths.values == (1, 2, 4, 8, 16, 32, 48)
    assert widths_of(wide_width=32).values[-1] == 32
    with pytest.raises(ValueError, match=r"--hvd-wide-width 24 is narrower than .* width 32"):
        widths_of(wide_width=24)
    with pytest.raises(ValueError, match="--hvd-wide-width with LoRA"):
        widths_of(wide_width=64, enable_lora=True)


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
    with pytest.raises(ValueError, match="no room for a cache draft beside"):
        widths_of(tree=32, policy="both", verify_width=32)


def test_narrow_widths_follow_the_number_of_requests() -> None:
    for requests, narrow in ((5, (8, 16)), (256, (1, 2, 4, 8, 16))):
        assert widths_of(requests=requests).values == (*narrow, 32, 64)


@pytest.mark.parametrize("lora", [{"enable_lora": True}, {"lora_paths": ["adapter"]}])
def test_with_lora_a_gpu_has_one_width(lora: dict[str, Any]) -> None:
    assert widths_of(**lora).values == (32,)
    with pytest.raises(ValueError, match="with LoRA on this device"):
        widths_of(narrow_widths=(4,), **lora)


def test_other_policies_have_the_widths_that_are_asked_for() -> None:
    assert widths_of(policy="payoff", narrow_widths=(4, 8)).values == (4, 8, 32)
    assert widths_of(policy="payoff", narrow_widths=(4, 8)).asked_for == {4, 8}


def test_where_widths_cost_nothing_there_are_all_powers_of_two() -> None:
    for policy in ("allocate", "cache"):
        widths = widths_of(policy=policy, device="cpu", is_any_width=True, enable_lora=True)
        assert widths == VerifyWidths((1, 2, 4, 8, 16, 32), base=32)


def test_none_that_is_narrow_is_as_wide_as_the_base() -> None:
    with pytest.raises(ValueError, match="must stay below the verify width 32"):
        widths_of(narrow_widths=(4, 32))
