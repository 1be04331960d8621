"""How wide a server verifies that was not told, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin import algorithm
from sglang_hvd.plugin.tree_support import TargetAttention

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
    monkeypatch.setattr(algorithm, "model_config_of", lambda cfg: model_config)
    return text_config


def widths(
    *,
    tree: int = 16,
    device: str = "cuda",
    requests: int = 48,
    attention: TargetAttention | None = None,
    enable_lora: bool = False,
    **settings: Any,
) -> tuple[int, ...]:
    cfg = SimpleNamespace(
        device=device, max_running_requests=requests, enable_lora=enable_lora, lora_paths=None
    )
    config = HvdConfig(**settings)
    widest = algorithm._verify_width(config, tree, cfg, attention or TargetAttention())
    return (*algorithm._narrow_widths(config, widest, cfg, device == "cpu"), widest)


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


def test_few_requests_verify_more_where_it_is_weighed() -> None:
    assert widths(requests=1) == (32, 64)
    assert widths(requests=2) == (32, 64)
    assert widths(requests=16) == (4, 8, 16, 32, 64)
    assert widths(requests=17) == (2, 4, 8, 16, 32)
    assert widths() == (1, 2, 4, 8, 16, 32)
    assert widths(requests=1, device="cpu")[-1] == 32
    assert widths(requests=1, policy="payoff") == (32,)
    assert widths(requests=1, max_draft_tokens=20)[-1] == 21
    assert widths(requests=1, verify_width=24)[-1] == 24
    # Where no step could be narrower, all would be as wide.
    assert widths(requests=16, enable_lora=True) == (32,)
    assert widths(requests=16, narrow_widths=()) == (32,)


def test_nodes_that_are_not_nearly_free_are_not_verified_by_default(
    text_config: SimpleNamespace,
) -> None:
    linear = TargetAttention(is_linear=True)
    assert widths(tree=4, attention=linear)[-1] == 8
    assert widths(tree=12, attention=linear)[-1] == 12
    text_config.num_experts = None
    assert widths(requests=1)[-1] == 64
    text_config.n_routed_experts = 64
    assert widths(requests=1)[-1] == 32


def test_the_model_drafters_tree_always_fits() -> None:
    assert {widths(tree=60, policy=policy)[-1] for policy in ("allocate", "payoff", "model")} == {
        60
    }
    assert widths(policy="model") == (16,)
    with pytest.raises(ValueError, match="narrower than the model drafter's tree of 60 nodes"):
        widths(tree=60, verify_width=32)


def test_both_drafts_of_a_request_have_room() -> None:
    assert widths(policy="both") == (32,)
    assert widths(tree=32, policy="both") == (40,)
    assert widths(tree=32, policy="both", verify_width=33) == (33,)
    with pytest.raises(ValueError, match="no room for a cache draft beside"):
        widths(tree=32, policy="both", verify_width=32)
