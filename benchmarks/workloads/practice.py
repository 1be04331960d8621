"""Data sets beyond the paper that practitioners quote for speculative decoding."""

from benchmarks.workloads.hub import DataSet, Row
from benchmarks.workloads.paper import turns, workload
from benchmarks.workloads.prompts import Prompt, Workload

CODE_EDIT = "code editing"

# SPEED-Bench ships this instead of the prompts that it may not pass on.
_NOT_SHIPPED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def _speed_bench(row: Row) -> Prompt | None:
    return None if _NOT_SHIPPED in row["turns"] else turns(row)


def _blazedit(row: Row) -> Prompt:
    return Prompt.of_user(
        f"Apply a change request to this file.\n\n```python\n{row['code']}\n```\n\nChange request: "
        f"{row['change_request']}\n\nReturn the whole new file."
    )


def _instruct_coder(row: Row) -> Prompt:
    return Prompt.of_user(
        f"{row['input']}\n\n{row['instruction']}\n\nReturn the code without an explanation."
    )


PRACTICE: tuple[Workload, ...] = (
    workload(
        "speed-bench",
        "eleven categories",
        DataSet(
            "nvidia/SPEED-Bench",
            "fd51e1f5c17d9071cc2aaa1f21df2ef79641e588",
            {"turns": ["string"]},
            _speed_bench,
            split="test",
            config="qualitative",
        ),
        "NVIDIA Evaluation Dataset License",
        "880 prompts",
        "The hub has placeholders for about half of the prompts; they are left out.",
    ),
    workload(
        "blazedit",
        CODE_EDIT,
        DataSet(
            "vdaita/edit_10k_char",
            "main",
            {"code": "string", "change_request": "string"},
            _blazedit,
        ),
        "not stated on the card",
        "90 files of up to 10,000 characters",
        "The revision could not be looked up: this follows the branch main.",
    ),
    workload(
        "instruct-coder",
        CODE_EDIT,
        # The hub shows the head as 6a778a7. Two published logs of measurements name all 40 digits.
        DataSet(
            "likaixin/InstructCoder",
            "6a778a720284d6520b56bd03d5c3070930d41071",
            {"instruction": "string", "input": "string"},
            _instruct_coder,
        ),
        "not stated on the card",
        "108,391 edits",
    ),
)
