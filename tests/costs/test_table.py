"""Tables of what steps cost."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from sglang_hvd.costs import StepCosts

CONFIGS = Path(__file__).parents[2] / "configs" / "costs"

TABLE = """
about: made up
batch_sizes: [1, 4]
widths: [1, 8]
verify:
  - [6, 13]
  - [9, 30]
draft_round: [0.5, 0.8]
draft_extend:
  - [0.25, 0.25]
  - [0.25, 1.3]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    return path


def test_between_and_beyond_the_entries_times_are_on_lines(tmp_path: Path) -> None:
    costs = StepCosts.load(written(tmp_path, TABLE))
    assert costs.verify_ms(1, [1, 2, 8, 9]).tolist() == [6, 7, 13, 14]
    assert costs.verify_ms(2, [1, 8]) == pytest.approx([7, 13 + 17 / 3])
    assert costs.verify_ms(5, [1]).tolist() == [10]
    assert costs.draft_extend_ms(4, [8]).tolist() == [1.3]


def test_beyond_the_entries_more_never_costs_less(tmp_path: Path) -> None:
    # Of these two widths the narrow one grows faster.
    costs = StepCosts.load(written(tmp_path, TABLE.replace("[9, 30]", "[12, 14]")))
    at_four, at_forty = costs.verify_ms(4, [1, 8]), costs.verify_ms(40, [1, 8])
    assert at_four.tolist() == [12, 14]
    assert at_forty.tolist() == [84, 84]
    assert costs.verify_ms(0, [1, 8]).tolist() == [6, 13]
    crossing = TABLE.replace("[0.25, 0.25]", "[0.1, 1.2]")
    catch_up = StepCosts.load(written(tmp_path, crossing)).catch_up_ms([1, 4, 400], 30)
    assert (np.diff(catch_up) >= 0).all()


def test_a_draft_runs_a_round_less_than_it_has_steps(tmp_path: Path) -> None:
    costs = StepCosts.load(written(tmp_path, TABLE))
    assert costs.draft_ms([1, 4], 1).tolist() == [0, 0]
    assert costs.draft_ms([0, 1, 4], 4) == pytest.approx([0, 1.5, 2.4])


ONCE = "draft_once: [0.25, 0.5]\n"


def test_a_draft_may_take_more_than_its_rounds(tmp_path: Path) -> None:
    costs = StepCosts.load(written(tmp_path, TABLE + ONCE))
    assert costs.draft_ms([0, 1, 4], 1).tolist() == [0, 0.25, 0.5]
    assert costs.draft_ms([0, 1, 4], 4) == pytest.approx([0, 1.75, 2.9])


CONTEXT = "context: 0.25\n"


def test_contexts_take_time_in_addition_to_the_nodes(tmp_path: Path) -> None:
    costs = StepCosts.load(written(tmp_path, TABLE + CONTEXT))
    assert costs.context_ms(6000) == 1.5
    assert costs.verify_ms(1, [1]).tolist() == [6]
    assert StepCosts.load(written(tmp_path, TABLE)).context_ms(6000) == 0


@pytest.mark.parametrize("table", [TABLE, TABLE + ONCE, TABLE + CONTEXT])
def test_a_table_can_be_written_and_read_again(tmp_path: Path, table: str) -> None:
    costs = StepCosts.load(written(tmp_path, table))
    again = StepCosts.load(written(tmp_path, costs.to_yaml()))
    assert again == costs
    assert costs.to_yaml().startswith("# Milliseconds")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_tables_that_ship_can_be_read(path: Path) -> None:
    costs = StepCosts.load(path)
    assert costs.verify_ms(1, [1])[0] > 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[6, 13]", "[6]", "verify must have 2 x 2 entries"),
        ("[6, 13]", "[13, 6]", "verify must not be negative and never fall"),
        ("[9, 30]", "[5, 30]", "verify must not be negative and never fall"),
        ("[6, 13]", "[0, 13]", "a plain step takes time"),
        ("[6, 13]", "[.nan, 13]", "verify: 0: 0: Input should be a finite number"),
        ("[0.5, 0.8]", "[0.5]", "draft_round must have 2 entries"),
        ("[0.5, 0.8]", "[0.5, -0.8]", "draft_round must not be negative and never fall"),
        ("batch_sizes: [1, 4]", "batch_sizes: [2, 4]", "batch_sizes must rise from 1"),
        ("widths: [1, 8]", "widths: [1]", "widths must rise from 1 in two or more steps"),
        ("about: made up", "", "about: Field required"),
        ("about", "color: red\nabout", "color: Extra inputs are not permitted"),
        ("about", "draft_once: [0.5]\nabout", "draft_once must have 2 entries"),
        ("about", "context: -0.1\nabout", "context: Input should be greater than or equal to 0"),
        (TABLE, "[1", "cost table: not valid YAML"),
        ("about: made up", "about: 2024-13-45", "cost table: not valid YAML: month must be in"),
        (TABLE, "[" * 10_000, "cost table: not valid YAML: too deeply nested"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = written(tmp_path, TABLE.replace(old, new))
    with pytest.raises(ValueError, match=message) as raised:
        StepCosts.load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the cost table: No such file"):
        StepCosts.load(tmp_path / "none.yaml")


def test_a_copy_has_the_new_times_and_is_checked() -> None:
    before = StepCosts.from_yaml(TABLE)
    assert before.verify_ms(1, [1])[0] == before.verify[0][0]  # computed once, of this table
    doubled = [[2 * time for time in row] for row in before.verify]
    copied = before.model_copy(update={"verify": doubled})
    assert copied.verify_ms(1, [1])[0] == 2 * before.verify[0][0]
    with pytest.raises(ValidationError):
        before.model_copy(update={"verify": doubled[:1]})


@pytest.mark.parametrize(
    "about", ["one line", "two\nlines\n", 'quoted: "it\'s" # not a comment', ""]
)
def test_any_description_can_be_written_and_read_again(about: str) -> None:
    costs = StepCosts.from_yaml(TABLE).model_copy(update={"about": about})
    assert StepCosts.from_yaml(costs.to_yaml()).about == about


@pytest.mark.parametrize("scale", [1.0, 1.0371, 0.7243])
def test_equal_entries_have_equal_times_between_them(scale: float) -> None:
    """Else more requests could draft in less time, by a bit."""
    once = tuple(scale * ms for ms in (1.7, 1.7, 1.7, 2.3))
    costs = StepCosts(
        about="made up",
        batch_sizes=(1, 4, 16, 64),
        widths=(1, 32),
        verify=((scale, scale),) * 4,
        draft_round=(scale,) * 4,
        draft_extend=((0.3 * scale, 0.3 * scale),) * 4,
        draft_once=once,
    )
    for steps in (1, 3):
        of_any = costs.draft_ms(range(1, 65), steps)
        assert len(set(of_any[:16].tolist())) == 1
        assert (np.diff(of_any) >= 0).all()
    assert len(set(costs.verify_ms(37, range(1, 65)).tolist())) == 1
    assert len(set(costs.catch_up_ms(range(1, 65), 8).tolist())) == 1


def test_a_wait_depends_on_the_number_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(
        "{about: made up, batch_sizes: [1, 5], widths: [1, 2], verify: [[5, 6], [6, 8]], "
        "draft_round: [1, 1], draft_extend: [[0, 0], [0, 0]], wait: [3, 1]}"
    )
    table = StepCosts.load(path)
    assert [table.wait_ms(n) for n in (1, 3, 5, 9)] == [3, 2, 1, 0]  # it may fall, not below 0
    path.write_text(table.to_yaml())
    assert StepCosts.load(path) == table
    assert table.model_copy(update={"wait": None}).wait_ms(3) == 0
    with pytest.raises(ValueError, match="wait must not be negative"):
        table.model_copy(update={"wait": (1.0, -0.5)})
    with pytest.raises(ValueError, match="wait must have 2 entries"):
        table.model_copy(update={"wait": (1.0,)})
