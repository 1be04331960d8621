"""The demo's table, and the sentences that say what it means."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from sglang_hvd.demo.report import Row, differences, meaning, rows, table
from tests.demo.made_up import reply

PLAIN = Row("editing", "plain", 100.0, 990.0, 0.0, 10.1, 0.0, True)


def of(workload: str, plain: float, eagle3: float, allocate: float) -> list[Row]:
    """The rows of a workload by their speeds."""
    return [
        replace(PLAIN, workload=workload, tokens_per_s=plain),
        replace(PLAIN, workload=workload, mode="eagle3", tokens_per_s=eagle3, cycles_per_1k=280),
        replace(PLAIN, workload=workload, mode="allocate", tokens_per_s=allocate, cycles_per_1k=95),
    ]


ROWS = [*of("editing", 100, 200, 500), *of("chat", 100, 200, 190), *of("all", 100, 200, 300)]


def printed(all_rows: list[Row], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(all_rows, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_wide_table_has_every_figure() -> None:
    lines = [line.split() for line in printed(ROWS, 100)]
    assert [
        "editing",
        "eagle3",
        "200.0",
        "1.00",
        "2.00",
        "280",
        "0.00",
        "10.1",
        "0%",
        "yes",
    ] in lines


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 90, 100, 200])
def test_a_table_fits_and_no_figure_is_cut(width: int) -> None:
    lines = printed(ROWS, width)
    assert max(map(len, lines)) <= width
    assert "\u2026" not in "".join(lines)
    for words in ("chat", "allocate", "tokens/s", "x plain", "190.0"):
        assert words in "\n".join(lines)


def test_a_table_without_eagle3_compares_with_plain_alone() -> None:
    lines = [line.split() for line in printed([row for row in ROWS if row.mode != "eagle3"], 100)]
    assert ["editing", "allocate", "500.0", "-", "5.00"] in [line[:5] for line in lines]


def test_the_sentences_say_where_it_loses() -> None:
    here, on_a_gpu = meaning(ROWS, "allocate")
    assert here == (
        "On this machine HVD is 1.50x as fast as EAGLE3 (0.95x on chat, where it loses, to 2.50x "
        "on editing) and 3.00x as fast as plain decoding."
    )
    assert on_a_gpu.endswith("decide there: 95 with HVD, 280 with EAGLE3, 990 with plain decoding.")


def test_the_sentences_of_a_loss_on_every_workload() -> None:
    lost = [*of("editing", 100, 200, 99), *of("chat", 100, 200, 100), *of("all", 100, 200, 99)]
    assert meaning(lost, "allocate")[0] == (
        "On this machine HVD is only 0.49x as fast as EAGLE3 (0.49x on editing, where it loses, to "
        "0.50x on chat) and only 0.99x as fast as plain decoding."
    )


def test_the_sentences_of_one_workload_without_eagle3() -> None:
    one = [row for row in of("editing", 100, 200, 100) if row.mode != "eagle3"]
    here, on_a_gpu = meaning(one, "allocate")
    assert here == "On this machine HVD is as fast as plain decoding."
    assert "EAGLE3" not in on_a_gpu


def test_texts_that_differ_are_named() -> None:
    assert differences(ROWS) == []
    wrong = [replace(row, outputs_identical=row.mode != "eagle3") for row in ROWS]
    assert differences(wrong) == ["eagle3 on editing", "eagle3 on chat"]


def test_rows_add_up_replies() -> None:
    replies = {
        "plain": [reply("editing", num_tokens=11, seconds=1.0), reply("chat", num_tokens=5)],
        "allocate": [
            reply("editing", num_tokens=11, num_accepted=8, seconds=0.5),
            reply("chat", num_tokens=5, text="another"),
        ],
    }
    found = rows(replies)  # type: ignore[arg-type]
    assert [(row.workload, row.mode, row.outputs_identical) for row in found] == [
        ("editing", "plain", True),
        ("editing", "allocate", True),
        ("chat", "plain", True),
        ("chat", "allocate", False),
        ("all", "plain", True),
        ("all", "allocate", False),
    ]
    assert (found[1].tokens_per_s, found[1].mean_accepted) == (22.0, 4.0)
    assert len(rows({"plain": replies["plain"][:1]})) == 1, "one workload needs no sum"
