"""Shares, precision, recall, payoffs and calibration, worked out by hand and by scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import precision_score, recall_score

from sglang_hvd.paper.draft_tables import (
    cache_share,
    calibration,
    family_signs,
    payoffs,
    payoffs_of,
    pooled,
    precision,
    recall,
    selections,
    structure,
)
from sglang_hvd.paper.results import CalibrationBin
from sglang_hvd.paper.rounds import Measured, Missing
from sglang_hvd.paper.table_values import RunData
from tests.paper.made_up import data_set, measurement, result, selection
from tests.paper.test_speed_tables import row, shown


def test_precision_and_recall_are_those_of_appendix_g() -> None:
    random = np.random.default_rng(0)
    accepted, predicted = random.integers(0, 12, 500), random.integers(0, 12, 500)
    is_high, is_selected = accepted >= 6, predicted >= 6
    found = selection(
        "mbpp",
        num_proposed=500,
        num_high=int(is_high.sum()),
        num_selected=int(is_selected.sum()),
        num_both=int((is_high & is_selected).sum()),
    )
    of = precision(found), recall(found)
    assert [cell.value for cell in of if isinstance(cell, Measured)] == [
        precision_score(is_high, is_selected),
        recall_score(is_high, is_selected),
    ]


def test_table_2_pools_the_drafts_of_all_data_sets() -> None:
    found = result(
        ["mbpp", "mt-bench"],
        selections=(
            selection("mbpp"),
            selection("mt-bench", num_proposed=3000, num_high=150, num_selected=60, num_both=0),
        ),
    )
    table = selections(RunData.of(found))
    assert shown(table, "MBPP") == [1000, 5.0, 4.0, 75.0, 60.0, *["\u2013"] * 4]
    assert shown(table, "MT-Bench")[1:5] == [5.0, 2.0, 0.0, 0.0]
    # Of 4000 drafts 200 are high, 100 are selected and 30 are both.
    assert shown(table, "Qwen3-8B") == [4000, 5.0, 2.5, 30.0, 15.0, 4.8, 3.8, 78.2, 61.4]
    assert shown(table, "Qwen3-4B") == [*["\u2013"] * 5, 6.6, 5.4, 82.9, 67.8]


def test_a_model_that_the_paper_lacks_has_a_row_of_its_own() -> None:
    table = selections(RunData.of(result(model="demo")))
    assert shown(table, "demo") == [5000, 5.0, 4.0, 75.0, 60.0, *["\u2013"] * 4]
    assert shown(table, "Qwen3-8B")[:5] == ["\u2013"] * 5
    unjudged = selections(RunData.of(result(selections=())))
    assert shown(unjudged, "Qwen3-8B")[:5] == ["not run"] * 5


def test_without_such_drafts_there_is_no_precision_or_recall() -> None:
    nothing = selection("mbpp", num_proposed=10, num_high=0, num_selected=0, num_both=0)
    assert isinstance(precision(nothing), Missing)
    assert isinstance(recall(nothing), Missing)
    table = selections(RunData.of(result(["mbpp"], selections=(nothing,))))
    assert shown(table, "MBPP")[1:5] == [0.0, 0.0, "no such draft", "no such draft"]
    assert pooled([]) is None


def test_payoffs_worked_out_by_hand() -> None:
    # Ten drafts: 0 0 2 3 5 5 6 8 8 9.
    found = payoffs_of({0: 2, 2: 1, 3: 1, 5: 2, 6: 1, 8: 2, 9: 1})
    assert found is not None
    assert (found.num_drafts, found.mean) == (10, 4.6)
    assert (found.low, found.marginal, found.high) == (0.3, 0.3, 0.4)
    assert found.survival == (0.8, 0.8, 0.7, 0.6, 0.6, 0.4, 0.3, 0.3, 0.1)
    assert sum(found.survival) == pytest.approx(found.mean)
    assert payoffs_of({}) is None
    worthless = payoffs_of({0: 3})
    assert worthless is not None
    assert (worthless.low, worthless.high, worthless.survival) == (1.0, 0.0, ())


def test_figure_3_has_the_drafts_of_a_family_over_all_rounds() -> None:
    measured = [
        measurement("hvd-paper", "infinitebench", 0, accepted={0: 1, 7: 1}),
        measurement("hvd-paper", "infinitebench", 1, accepted={7: 2}),
        measurement("hvd-paper", "cnn-dailymail", 0, accepted={3: 4}),
        measurement("hvd-paper", "mbpp", 0, accepted={}),
        measurement("eagle3", "mbpp", 0),
    ]
    table = payoffs(RunData.of(result(measurements=tuple(measured))))
    assert shown(table, "long-context") == [8, round(33 / 8, 2), 12.5, 50.0, 37.5]
    assert shown(table, "code / repository") == ["\u2013"] * 5
    assert shown(table, "open-ended instruction / chat") == ["not run"] * 5
    assert [one.name for one in table.rows if not one.cells] == ["HVD (paper)"]


def test_figure_2_counts_cycles_with_a_cache_draft_in_any_company() -> None:
    cycles = {"cache": 10, "both": 5, "model": 25, "none": 10}
    run = RunData.of(
        result(["mbpp"], measurements=(measurement("hvd", "mbpp", cycles=cycles, num_cycles=50),))
    )
    assert cache_share(run, "hvd", ["mbpp"]) == Measured(0.3, 0.3, 0.3, 1)
    table = structure(run)
    assert shown(table, "MBPP") == [1.5, 12.0, 0.25, 30.0]
    assert shown(table, "Spider") == ["not run"] * 4


def test_signs_of_a_family_weigh_each_prompt_alike() -> None:
    sets = (
        data_set("infinitebench", num_measured=30, signs={"paths": 1.0}),
        data_set("cnn-dailymail", num_measured=10, signs={"paths": 3.0}),
    )
    run = RunData.of(result(["infinitebench", "cnn-dailymail"], data_sets_of=sets))
    assert family_signs(run) == {"long-context": {"paths": 1.5}}


def test_calibration_weighs_the_groups_of_like_prediction_by_their_drafts() -> None:
    def bins(*of: tuple[int, float, float]) -> tuple[CalibrationBin, ...]:
        return tuple(CalibrationBin(num_drafts=n, predicted=p, accepted=a) for n, p, a in of)

    found = result(
        ["mbpp", "mt-bench"],
        selections=(
            selection("mbpp", calibration=bins((30, -0.5, 0.1), (10, 6.5, 8.0), (0, 5.0, 5.0))),
            selection("mt-bench", calibration=bins((10, 0.5, 0.5), (30, 7.5, 6.0), (5, 40, 50))),
        ),
    )
    table = calibration(RunData.of(found))
    assert [one.name for one in table.rows] == ["below 1", "6 to 8", "from 24"]
    assert shown(table, "below 1") == [-0.25, 0.2, 40]
    assert shown(table, "6 to 8") == [7.25, 6.5, 40]
    assert row(table, "from 24").marks == ()
