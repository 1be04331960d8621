"""What a request may ask of HVD, and how a wrong wish is answered."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from sglang_hvd.config import HvdConfig, Policy
from sglang_hvd.plugin.requests.control import (
    RequestControl,
    check_custom_params,
    served_policies,
)
from sglang_hvd.types import MODEL_ONLY, DraftLimits

CONFIG = HvdConfig()


def of(asked: object, **settings: Any) -> RequestControl:
    return RequestControl.of({"hvd": asked}, HvdConfig(**settings))


@pytest.mark.parametrize("custom_params", [None, {}, {"hvd": None}, {"of_another": {"hvd": 1}}])
def test_a_request_that_asks_for_nothing_is_served_as_the_settings_say(
    custom_params: object,
) -> None:
    control = RequestControl.of(custom_params, CONFIG)
    assert control == RequestControl()
    assert control.limits(CONFIG) is None
    silent = RequestControl.of(custom_params, HvdConfig(learn=False, share=False))
    assert (silent.learn, silent.share) == (False, False)


def test_a_request_overrides_the_settings() -> None:
    control = of({"learn": True, "namespace": "mine"}, learn=False, share=False)
    assert (control.learn, control.share, control.namespace) == (True, False, "mine")


@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_request_has_the_policies_whose_drafts_the_server_makes(policy: Policy) -> None:
    config = HvdConfig(policy=policy)
    policies = served_policies(config)
    of_others = {"cache": {"off", "cache"}, "model": {"off", "model"}}
    assert set(policies) == of_others.get(policy, {"off", "cache", "model", policy})
    for asked in policies:
        limits = RequestControl.of({"hvd": {"policy": asked}}, config).limits(config)
        assert (limits is None) == (asked == policy)
    for asked in {*get_args(Policy), "none", ""} - set(policies):
        with pytest.raises(ValueError, match="policy must be one of"):
            RequestControl.of({"hvd": {"policy": asked}}, config)


def test_off_is_a_policy_without_sources() -> None:
    assert of("off") == of({"policy": "off"})
    assert of("off").limits(CONFIG) == DraftLimits(0)
    assert of({"policy": "model"}).limits(CONFIG) == MODEL_ONLY
    limited = of({"policy": "allocate", "max_draft_tokens": 3})
    assert limited.limits(CONFIG) == DraftLimits(None, 3)


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ("on", '"hvd" must be "off" or an object such as'),
        ([True], '"hvd" must be "off" or an object such as'),
        (True, '"hvd" must be "off" or an object such as'),
        ({"polciy": "off"}, "there is no key 'polciy'; the keys are policy, max_draft_tokens"),
        ({"policy": 1}, "'policy': input should be a valid string, got 1"),
        ({"policy": "fastest"}, "policy must be one of off, cache, model, allocate on this"),
        ({"max_draft_tokens": -1}, "greater than or equal to 0, got -1"),
        ({"max_draft_tokens": 2.0}, "valid integer, got 2.0"),
        ({"max_draft_tokens": True}, "valid integer, got True"),
        ({"learn": "no"}, "valid boolean, got 'no'"),
        ({"share": 0}, "valid boolean, got 0"),
        ({"namespace": ["a"]}, "valid string, got ['a']"),
        ({"report_cycles": None}, "valid boolean, got None"),
        ({"a\nb": 1}, r"there is no key 'a\nb'"),
        ({1: 1}, "keys should be strings"),
    ],
)
def test_a_wrong_wish_is_refused_in_one_line(asked: object, fault: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        check_custom_params({"hvd": asked}, CONFIG)
    assert str(refused.value).startswith("custom_params: ")
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("key", [None, "policy", "max_draft_tokens", "learn", "namespace", "new"])
@pytest.mark.parametrize("depth", [3, 900, 100_000])
def test_a_wish_of_any_depth_is_refused_in_one_short_line(key: str | None, depth: int) -> None:
    asked = _nested(depth) if key is None else {key: _nested(depth)}
    with pytest.raises(ValueError, match=r"^custom_params") as refused:
        check_custom_params({"hvd": asked}, CONFIG)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_server_can_forbid_overrides() -> None:
    config = HvdConfig(allow_request_overrides=False)
    for asked in ("off", {"policy": "cache"}, {"learn": False}):
        with pytest.raises(ValueError, match="lets no request choose"):
            check_custom_params({"hvd": asked}, config)
        check_custom_params({"hvd": asked}, config, is_own=False)
    check_custom_params({"hvd": {"report_cycles": True}, "of_another": 1}, config)


def test_a_server_that_hides_figures_reports_no_cycles() -> None:
    with pytest.raises(ValueError, match="reports no figures"):
        check_custom_params({"hvd": {"report_cycles": True}}, HvdConfig(report_figures=False))
    with pytest.raises(ValueError, match=r"report_cycles, which .* needs it"):
        HvdConfig(report_figures=False, report_cycles=True)
