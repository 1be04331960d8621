"""Which models of a server take the weights that it is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

from sglang_hvd.plugin.hooks import weight_updates


@pytest.fixture
def manager() -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace())


@pytest.fixture(params=[True, False], ids=["HVD", "another algorithm"])
def has_hvd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    worker = object() if request.param else None
    monkeypatch.setattr(weight_updates, "worker_of", lambda _: worker)
    return bool(request.param)


def selected(manager: Any, *selector: str) -> str:
    def select_runners(_: Any, selector: str) -> list[tuple[str, Any]]:
        return [(selector, None)]

    [(of_update, _)] = weight_updates.select_target(select_runners, manager, *selector)
    return of_update


def test_updates_that_can_name_no_model_are_of_the_target(manager: Any, has_hvd: bool) -> None:
    assert selected(manager) == ("target" if has_hvd else "all")


def test_sessions_are_of_the_models_that_they_name(manager: Any, has_hvd: bool) -> None:
    assert [selected(manager, of) for of in ("target", "draft", "all")] == [
        "target",
        "draft",
        "all",
    ]


@pytest.mark.parametrize("selector", ["target", "draft", "all"])
def test_tensors_are_of_the_target_unless_the_draft_model_is_named(
    selector: Any, manager: Any, has_hvd: bool
) -> None:
    def update(_: Any, request: UpdateWeightsFromTensorReqInput) -> str:
        return request.selector

    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], selector=selector)
    expected = "target" if has_hvd and selector == "all" else selector
    assert weight_updates.send_to_target(update, manager, request) == expected
    assert request.selector == selector
