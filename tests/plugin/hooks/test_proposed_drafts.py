"""Acceptance rates are those of the tokens that were proposed, whatever widths verified them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.hooks import proposed_drafts
from sglang_hvd.plugin.hooks.proposed_drafts import count_of_report, count_of_request

HVD, ANOTHER = SimpleNamespace(_hvd_launch=SimpleNamespace(config=HvdConfig())), SimpleNamespace()
HIDING = SimpleNamespace(_hvd_launch=SimpleNamespace(config=HvdConfig(report_figures=False)))


@pytest.mark.parametrize(
    ("num_verified", "num_proposed", "rate"), [(200, 190, 0.5), (105, 95, 1.0), (10, 0, 0.0)]
)
def test_a_request_has_the_rate_of_what_it_proposed(
    num_verified: int, num_proposed: int, rate: float
) -> None:
    num_correct = round(num_proposed * rate)
    # Ten verifications, for which SGLang takes 31 proposed tokens each.
    of_sglang = {
        **{"spec_verify_ct": 10, "spec_num_correct_drafts": num_correct},
        **{"spec_num_proposed_drafts": 310, "spec_accept_rate": num_correct / 310},
        **{"spec_cap_length": num_verified / 10, "spec_cap_lens_histogram": [0, 10]},
    }
    received = SimpleNamespace(spec_num_cap_tokens=[7, num_verified])
    meta_info = dict(of_sglang)
    count_of_request(None, SimpleNamespace(server_args=ANOTHER), meta_info, received, 1)
    assert meta_info == of_sglang
    count_of_request(None, SimpleNamespace(server_args=HVD), meta_info, received, 1)
    assert meta_info == {
        **{"spec_verify_ct": 10, "spec_num_correct_drafts": num_correct},
        **{"spec_num_proposed_drafts": num_proposed, "spec_accept_rate": rate},
    }
    hidden = {**of_sglang, "completion_tokens": 5}
    count_of_request(None, SimpleNamespace(server_args=HIDING), hidden, received, 1)
    assert hidden == {"completion_tokens": 5}
    ended_at_prefill: dict[str, Any] = {}
    count_of_request(None, SimpleNamespace(server_args=HVD), ended_at_prefill, received, 1)
    assert ended_at_prefill == {}


class _Reporter:
    """Reports when told to, as SGLang's reporter does."""

    def __init__(self, server_args: SimpleNamespace) -> None:
        self.scheduler = SimpleNamespace(server_args=server_args)
        self.reports: list[tuple[float, float]] = []
        self.begin()

    def begin(self) -> None:
        self.spec_num_forward_ct = self.spec_num_cap_tokens = self.spec_num_correct_drafts = 0

    def report(self, is_due: bool) -> None:
        if is_due:
            rate = self.spec_num_correct_drafts / (self.spec_num_forward_ct * 31)
            self.reports.append((rate, self.spec_num_cap_tokens / self.spec_num_forward_ct))
            self.begin()


def test_a_report_has_the_rate_of_what_was_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_num_draft_tokens=32)
    monkeypatch.setattr(proposed_drafts, "get_spec", lambda: spec)
    reporter, another = _Reporter(HVD), _Reporter(ANOTHER)
    # Cycles, nodes of all of them, and correct drafts: wide ones, narrow ones, then plain ones.
    for steps in (((2, 128, 120), (2, 10, 3)), ((4, 4, 0),)):
        for place, (num_cycles, num_nodes, num_correct) in enumerate(steps, 1):
            for each in (reporter, another):
                each.spec_num_forward_ct += num_cycles
                each.spec_num_cap_tokens += num_nodes
                each.spec_num_correct_drafts += num_correct
                count_of_report(_Reporter.report, each, place == len(steps))
    assert reporter.reports == [(pytest.approx(123 / 134), 0.0), (0.0, 0.0)]
    assert another.reports == [(123 / 124, 34.5), (0.0, 1.0)]


def test_sglang_computes_the_rates_where_the_hooks_correct_them() -> None:
    report = inspect.getsource(inspect.unwrap(SchedulerMetricsReporter.report_decode_stats))
    for text in (
        "num_correct_drafts = self.spec_num_correct_drafts",
        "draft_per_round = get_spec().speculative_num_draft_tokens - 1",
        "total_draft_tokens = self.spec_num_forward_ct * draft_per_round",
        "self.spec_num_accept_tokens = self.spec_num_correct_drafts = 0",
        "self.spec_num_forward_ct = 0",
    ):
        assert text in report
    of_request = inspect.unwrap(TokenizerManager._calculate_spec_decoding_metrics)
    assert list(inspect.signature(of_request).parameters) == ["self", "meta_info", "recv_obj", "i"]
    for key in ("spec_accept_rate", "spec_num_proposed_drafts", "spec_cap_length"):
        assert f'meta_info["{key}"]' in inspect.getsource(of_request)
