"""Counts the draft tokens that were really proposed in SGLang's acceptance rates.

SGLang takes each verification for one of speculative_num_draft_tokens nodes. HVD's have from one
node to more than that, so that the rate could exceed 1. The number of nodes travels as DSpark's
cap, of which SGLang keeps a sum for each request and for each report. Only DSpark has a cap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_spec

from sglang_hvd.plugin.startup.launch import launch_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import (
        SchedulerMetricsReporter,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def count_of_request(
    _result: None, manager: TokenizerManager, meta_info: dict[str, Any], received: Any, place: int
) -> None:
    """AFTER hook of TokenizerManager._calculate_spec_decoding_metrics.

    received: the outputs of several requests, this one at `place`.
    """
    launch = launch_of(manager.server_args)
    if launch is None or "spec_verify_ct" not in meta_info:
        return
    if not launch.config.report_figures:
        # A long run of accepted tokens says that somebody has had this text.
        for name in [name for name in meta_info if name.startswith("spec_")]:
            del meta_info[name]
        return
    num_proposed = received.spec_num_cap_tokens[place] - meta_info["spec_verify_ct"]
    meta_info["spec_num_proposed_drafts"] = num_proposed
    num_correct = meta_info["spec_num_correct_drafts"]
    meta_info["spec_accept_rate"] = num_correct / num_proposed if num_proposed else 0.0
    for of_dspark in ("spec_cap_length", "spec_cap_lens_histogram"):
        meta_info.pop(of_dspark, None)


def count_of_report(
    report_decode_stats: Callable[..., None],
    reporter: SchedulerMetricsReporter,
    *args: Any,
    **kw: Any,
) -> None:
    """AROUND hook of SchedulerMetricsReporter.report_decode_stats, which runs in every step and
    reports in some. Its rate is the correct drafts by those of verifications of one width; the
    former are scaled so that the rate is the one of the proposed drafts."""
    if launch_of(reporter.scheduler.server_args) is None:
        report_decode_stats(reporter, *args, **kw)
        return
    num_verified, num_correct = reporter.spec_num_cap_tokens, reporter.spec_num_correct_drafts
    num_cycles = reporter.spec_num_forward_ct
    num_proposed = num_verified - num_cycles
    num_assumed = num_cycles * (get_spec().speculative_num_draft_tokens - 1)
    reporter.spec_num_cap_tokens = 0
    if num_proposed:
        reporter.spec_num_correct_drafts = num_correct * num_assumed / num_proposed
    report_decode_stats(reporter, *args, **kw)
    if reporter.spec_num_forward_ct:  # nothing was reported: the counts go on
        reporter.spec_num_cap_tokens, reporter.spec_num_correct_drafts = num_verified, num_correct
