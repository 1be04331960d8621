"""Figures of an analysis against ones worked out by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_hvd.payoff import FEATURE_NAMES
from sglang_hvd.replay.core.recording_walk import RecordingWalk
from sglang_hvd.replay.report.analysis import RECALLS, Analysis, Bin
from sglang_hvd.replay.report.analyze import analyze_walks, payoffs_of, reliability
from sglang_hvd.replay.report.findings import findings
from sglang_hvd.replay.report.importance import FEATURE_GROUPS, permutation_importance
from sglang_hvd.replay.report.prompts import PromptCounts, num_repeated
from sglang_hvd.replay.training.evaluate import judge
from tests.payoff.made_up import linear
from tests.replay.conftest import WriteTraces
from tests.replay.made_up import ABOUT, counts, rows, small_analysis, walk


def test_structure_worked_out_by_hand() -> None:
    # Families by name, each before its files.
    chat, chat_file, code, code_file = small_analysis().structure
    assert [row.file for row in (chat, chat_file, code, code_file)] == [
        None, "chat file", None, "code file",
    ]  # fmt: skip
    assert (code.num_requests, code.prompt_tokens_median, code.output_tokens_median) == (2, 14, 10)
    assert code.prompt_tokens_p90 == pytest.approx(18.8)
    assert code.repeated_share == 12 / 22  # of 5 and 17 runs of four
    assert code.class_shares["delimiter"] == 0.5
    # Of 20 places: right from the prompt at two of six or more tokens and one of two.
    assert code.copied_shares == {"prompt": 3 / 20, "output": 0, "finished": 0}
    assert chat.copied_shares == {"prompt": 0, "output": 2 / 20, "finished": 1 / 20}
    assert (code.copied_run_share, chat.copied_run_share) == (2 / 20, 1 / 20)
    assert (code.proposed_share, code.cache_share) == (4 / 10, 2 / 10)


def test_the_papers_cache_does_not_tell_the_prompt_from_the_output() -> None:
    drafts = rows([1, 0, 3], in_output=[1, 1, 0])
    same = walk("chat", drafts, num_cycles=4, num_cache=0)
    analysis = analyze_walks(
        replace(ABOUT, cache_mode="paper"),
        [same],
        [same],
        [counts([4], [0])],
        {"predictor": linear({"score": 1})},
    )
    assert analysis.structure[0].copied_shares == {"own": 1 / 4, "finished": 1 / 4}


def analysis_of(walks: list[RecordingWalk]) -> Analysis:
    """Of files whose prompts have four tokens, at cycles and places that are the same."""
    predictors = {"predictor": linear({"score": 1})}
    return analyze_walks(ABOUT, walks, walks, [counts([4], [0])] * len(walks), predictors)


def test_shares_of_places_and_cycles_are_of_all_drafts_where_some_rows_stand_for_more() -> None:
    # Of one file each row stands for two drafts, of the other for one.
    drafts = rows([7, 0, 1, 0], in_prompt=[1, 1, 0, 0])
    walks = [
        walk("chat", drafts, num_cycles=20, num_cache=0, name=name, thinning=thinning)
        for name, thinning in (("half", 2), ("whole", 1))
    ]
    analysis = analysis_of(walks)
    family, half, whole = analysis.structure
    assert half.copied_shares == {"prompt": 2 / 20, "output": 0, "finished": 2 / 20}
    assert whole.copied_shares == {"prompt": 1 / 20, "output": 0, "finished": 1 / 20}
    assert family.copied_shares == {"prompt": 3 / 40, "output": 0, "finished": 3 / 40}
    assert [row.copied_run_share for row in analysis.structure] == [3 / 40, 2 / 20, 1 / 20]
    assert [row.proposed_share for row in analysis.structure] == [12 / 40, 8 / 20, 4 / 20]


def test_files_of_which_some_rows_were_kept_count_like_others_in_their_family() -> None:
    # Of the half file each row stands for two drafts; of the whole one's, each second counts.
    half, whole = rows([7, 7]), rows([0, 6, 0, 0])
    walks = [
        walk("chat", half, num_cycles=8, num_cache=0, name="half", thinning=2),
        walk("chat", whole, num_cycles=8, num_cache=0, name="whole"),
    ]
    analysis = analysis_of(walks)
    [payoffs] = analysis.payoffs
    assert (payoffs.num_drafts, payoffs.oracle_share) == (4, 0.5)
    evaluations = judge(walks, {}, cache_mode="votes", at="cycle")
    found = {of.file: (of.quality.num_drafts, of.quality.oracle_share) for of in evaluations}
    assert found == {"half": (2, 1.0), "whole": (4, 0.25), "mean": (4, 0.5)}


def test_a_walk_with_one_row_in_so_many_has_them_from_all_sessions_in_order() -> None:
    parts = [walk("chat", rows(lens), num_cycles=9, num_cache=0) for lens in ([1, 2], [3], [4, 5])]
    sessions = tuple(session for part in parts for session in part.sessions)
    every_second = RecordingWalk("chat", "chat", sessions, thinning=4).every(2)
    found = every_second.rows()
    assert found is not None
    assert found.accepted_lens.tolist() == [1, 3, 5]
    assert every_second.thinning == 8
    assert every_second.num_drafts() == 5


def test_one_family_alone_is_not_named() -> None:
    drafts = walk("recorded", rows([6, 0]), num_cycles=4, num_cache=1)
    found = findings(analysis_of([drafts]))
    assert found[0].summary.endswith("% of the places")
    assert not any("recorded" in text for one in found for text in (one.summary, *one.plots))


def test_payoffs_worked_out_by_hand() -> None:
    found = payoffs_of("code", rows([31, 6, 5, 3, 2, 0], [True, True, False, True, True, False]))
    assert (found.num_drafts, found.oracle_share) == (6, 2 / 6)
    assert found.mean_accepted == pytest.approx(47 / 6)
    assert found.survival[:6] == pytest.approx((5 / 6, 5 / 6, 4 / 6, 3 / 6, 3 / 6, 2 / 6))
    assert len(found.survival) == 31
    assert found.survival[-1] == pytest.approx(1 / 6)
    assert (found.num_verified, found.verified_mean_accepted) == (4, 42 / 4)
    assert (found.verified_high_share, found.verified_marginal_share) == (0.5, 0.25)
    assert found.verified_low_share == 0.25


def test_drafts_that_a_cut_text_ends_count_as_far_as_it_goes() -> None:
    random = np.random.default_rng(0)
    whole = np.minimum(random.geometric(1 / 9, 200_000) - 1, 31).astype(np.int32)
    known = random.integers(6, 40, len(whole))
    cut = replace(
        rows(np.minimum(whole, known).tolist(), [True] * len(whole), draft_len=[31] * len(whole)),
        draft_lens=np.minimum(31, known).astype(np.int32),
    )
    found, expected = payoffs_of("chat", cut), payoffs_of("chat", rows(whole.tolist()))
    assert found.mean_accepted == pytest.approx(expected.mean_accepted, rel=0.01)
    assert found.verified_mean_accepted == found.mean_accepted
    assert found.survival == pytest.approx(expected.survival, abs=0.005)
    assert float(cut.accepted_lens.mean()) < 0.9 * expected.mean_accepted


def test_the_survival_of_cut_drafts_is_kaplan_and_meiers() -> None:
    """Accepted 0, 1, 1+, 2, 3+ and 4 tokens, where the text of drafts with + ends there.

    At least 1: 5 of 6. Then 2: 3 of the 4 whose text goes on. Then 3: 2 of 3. Then 4: 1 of 1.
    """
    accepted = [0, 1, 1, 2, 3, 4]
    cut = replace(
        rows(accepted, draft_len=[31] * 6), draft_lens=np.array([31, 31, 1, 31, 3, 31], np.int32)
    )
    found = payoffs_of("chat", cut)
    assert found.survival[:5] == pytest.approx((5 / 6, 5 / 8, 5 / 12, 5 / 12, 0))
    assert found.mean_accepted == pytest.approx(5 / 6 + 5 / 8 + 5 / 12 + 5 / 12)


@pytest.mark.parametrize(
    ("accepted", "says"),
    [
        ([9] * 2 + [2] * 8, "Half of the drafts yield 2 tokens or more, a tenth 9"),
        ([1] * 2 + [0] * 8, "Most drafts yield nothing, a tenth yield 1 token or more"),
        ([1] + [0] * 19, "More than nine drafts in ten yield nothing"),
    ],
)
def test_how_long_drafts_are_right_is_said(accepted: list[int], says: str) -> None:
    drafts = walk("chat", rows(accepted), num_cycles=20, num_cache=0)
    predictors = {"predictor": linear({"score": 1})}
    analysis = analyze_walks(ABOUT, [drafts], [drafts], [counts([4], [0])], predictors)
    assert findings(analysis)[1].plots[0] == says


def test_without_a_verified_draft_there_is_nothing_to_say_of_them() -> None:
    found = payoffs_of("code", rows([7, 0]))
    assert (found.num_verified, found.verified_mean_accepted) == (0, None)
    assert found.verified_high_share is None


def test_bins_hold_what_lies_between_their_edges() -> None:
    predicted = np.array([-1, 0.5, 1, 1.5, 9], np.float32)
    real = np.array([0, 1, 2, 3, 4], np.int32)
    assert reliability(predicted, real, (1, 2, 4)) == (
        Bin(None, 1, -0.25, 0.5, 2),
        Bin(1, 2, 1.25, 2.5, 2),
        Bin(4, None, 9, 4, 1),
    )


def test_predicted_and_real_lengths_stand_side_by_side() -> None:
    found = {(one.predictor, one.of): one.bins for one in small_analysis().calibration}
    # A predictor of bare lengths has no probability, the suffix cache's own estimate has.
    assert set(found) == {
        ("frequency", "probability"),
        *((name, "length") for name in ("predictor", "mlp", "frequency")),
    }
    assert sum(b.num_drafts for b in found["predictor", "length"]) == 8
    assert found["predictor", "length"][-1] == Bin(8, 12, 9, 7, 1)
    assert found["frequency", "probability"] == (Bin(0.5, 0.6, 0.5, 3 / 8, 8),)


def test_precision_and_recall_by_family() -> None:
    analysis = small_analysis()
    quality = {(row.at, row.file, row.predictor): row.quality for row in analysis.quality}
    code, chat = (quality["cycle", family, "predictor"] for family in ("code", "chat"))
    assert (code.precision, code.recall, code.oracle_share) == (1, 1, 0.5)
    assert (chat.precision, chat.recall, chat.oracle_share) == (0, 0, 0.25)
    assert quality["cycle", "mean", "predictor"].recall == 0.5
    assert quality["cycle", "code", "mlp"].precision == 0.5
    assert ("position", "chat", "frequency") in quality


def test_the_curve_has_the_best_precision_for_each_recall() -> None:
    curve = small_analysis().curves[0]
    # By score: 9 right; 7 right and 7 wrong; 5 right; then wrong ones.
    assert curve.predictor == "predictor"
    by_recall = dict(zip(RECALLS, curve.at_recall, strict=True))
    assert by_recall[0.3] == 1
    assert by_recall[0.65] == by_recall[1.0] == 3 / 4
    assert (curve.precision, curve.recall) == (2 / 3, 2 / 3)


def test_an_informative_feature_is_important_and_a_constant_one_is_not() -> None:
    accepted = [8, 0] * 50
    known = rows(accepted, score=[float(length) for length in accepted], match_len=[3.0] * 100)
    found = permutation_importance(known, linear({"score": 1, "match_len": 1}), num_features=200)
    assert found is not None
    assert (found.num_drafts, found.average_precision) == (100, 1)
    drops = {drop.name: drop.drop for drop in found.features}
    assert len(drops) == len(FEATURE_NAMES)
    assert found.features[0].name == "score"
    assert 0.3 < drops.pop("score") < 0.7
    assert set(drops.values()) == {0}
    groups = {drop.name: drop.drop for drop in found.groups}
    assert groups["the draft's own probabilities"] > 0.3
    assert groups["the match"] == groups["each token of the draft"] == 0


def test_importance_is_the_same_every_time() -> None:
    drafts = rows([8, 0, 7, 1, 6] * 8, score=[float(i % 7) for i in range(40)])
    first, second = (permutation_importance(drafts, linear({"score": 1})) for _ in range(2))
    assert first == second


def test_without_a_draft_worth_verifying_nothing_is_important() -> None:
    assert permutation_importance(rows([0, 5]), linear({"score": 1})) is None
    drafts = walk("chat", rows([0, 5]), num_cycles=4, num_cache=0)
    analysis = analyze_walks(
        ABOUT, [drafts], [drafts], [counts([4], [0])], {"predictor": linear({"score": 1})}
    )
    assert (analysis.curves, analysis.importance) == ((), None)
    assert "nothing to find" in findings(analysis)[2].summary


def test_every_feature_is_in_one_group() -> None:
    grouped = [name for names in FEATURE_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(FEATURE_NAMES)
    assert all(FEATURE_GROUPS.values())


def test_without_a_cache_draft_there_is_nothing_to_analyse() -> None:
    empty = walk("chat", None, num_cycles=4, num_cache=0)
    with pytest.raises(ValueError, match="had a cache draft"):
        analyze_walks(
            ABOUT, [empty], [empty], [counts([4], [0])], {"predictor": linear({"score": 1})}
        )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0),
        ([1, 2, 3], 0),
        ([1, 2, 3, 4], 0),
        ([1, 1, 1, 1, 1], 1),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], 1),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 2),
        ([2**31 - 1, 0, 2**31 - 1, 0, 2**31 - 1, 0], 1),
    ],
)
def test_repeated_runs_of_four(tokens: list[int], expected: int) -> None:
    assert num_repeated(np.array(tokens, np.int32)) == expected


def test_prompts_that_were_left_out_have_no_share() -> None:
    nothing = PromptCounts(
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
        np.zeros((0, 5), np.int64),
        np.array([3], np.int64),
    )
    assert nothing.repeated_share is None
    assert set(nothing.class_shares.values()) == {None}


def test_sessions_a_predictor_was_trained_on_are_not_judged() -> None:
    known = walk("chat", rows([7, 0], score=[7, 1]), num_cycles=4, num_cache=1, name="known")
    new = walk("chat", rows([1]), num_cycles=3, num_cache=0, name="new")
    walks = [each.excluding(frozenset(["session of known"])) for each in (known, new)]
    predictors = {"predictor": linear({"score": 1})}
    analysis = analyze_walks(ABOUT, walks, walks, [counts([], []), counts([4], [0])], predictors)
    assert [row.file for row in analysis.structure] == [None, "new"]
    assert analysis.payoffs[0].num_drafts == 1


# ---- the command ----


def run(*flags: object) -> subprocess.CompletedProcess[str]:
    command = "from sglang_hvd.cli import main; raise SystemExit(main())"
    return subprocess.run(
        [sys.executable, "-c", command, "analyze", *map(str, flags)],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_the_command_writes_figures_and_a_page(
    made_up_traces: Path, number_tokenizer: Path, write_traces: WriteTraces, tmp_path: Path
) -> None:
    hostile = "<script>alert(1)</script>\x1b\ud800"
    write_traces(made_up_traces / "<b>&.jsonl", family=hostile, step=7, num_sessions=3)
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    flags = ["--traces", made_up_traces, "--tokenizer", number_tokenizer, "--processes", 1]
    done = run(*flags, "--json", figures, "--html", page)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
    found = json.loads(figures.read_text())
    assert list(found) == [
        "about", "structure", "payoffs", "quality", "curves", "calibration", "importance",
    ]  # fmt: skip
    assert {row["family"] for row in found["structure"]} == {"copying", "other", hostile}
    assert found["about"]["num_sessions"] == 19
    assert {row["predictor"] for row in found["quality"]} == {"predictor", "mlp", "frequency"}
    text = page.read_text()
    assert "<script" not in text
    assert "<b>" not in text
    assert f"sglang-hvd analyze --traces {made_up_traces}" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "figures.json", "page.html", "tokenizer.json", "traces",
    ]  # fmt: skip


def test_what_is_wrong_is_said_in_one_line(
    made_up_traces: Path, number_tokenizer: Path, tmp_path: Path
) -> None:
    flags = ["--traces", made_up_traces, "--tokenizer", number_tokenizer]
    page = tmp_path / "page.html"
    for bad, says in (
        (flags, "nothing to write"),
        ([*flags, "--html", tmp_path / "no" / "page.html"], "there is no folder"),
        ([*flags, "--html", page, "--predictor", tmp_path / "none"], "is not a file"),
        (["--traces", tmp_path / "none", *flags[2:], "--html", page], "cannot read the traces"),
    ):
        done = run(*bad)
        assert done.returncode == 2
        # Beside it at most a progress bar, which is wiped.
        [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert says in line
        assert "Traceback" not in done.stderr
    assert not page.exists()
