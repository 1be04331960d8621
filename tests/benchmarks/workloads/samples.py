"""Made-up rows of the data sets, with the columns and types that the hub shows, in its file forms.

Sources: the cards (`dataset_info`) and viewers of the repositories on huggingface.co, or what is
named with the sample.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value

from benchmarks.workloads.hub import DataSet
from benchmarks.workloads.prompts import Workload

STRING, INT, BOOL, FLOAT = (Value(name) for name in ("string", "int64", "bool", "float64"))


@dataclass(frozen=True)
class Sample:
    """features: of the whole row; None: the library infers them from JSON.

    said: a word of each row that its prompt must contain.
    """

    row: Callable[[int], Mapping[str, Any]]
    said: str
    features: Features | None = None


def strings(*names: str) -> Features:
    return Features(dict.fromkeys(names, STRING))


SAMPLES: dict[str, Sample] = {
    # The viewer shows metadata and files as JSON objects of any form.
    "delegate-52": Sample(
        lambda i: {
            "sample_id": f"accounting{i}",
            "sample_type": "accounting",
            "sample_name": f"Ledger {i}",
            "states": [
                {
                    "state_id": "basic_state",
                    "context": [f"club{i}.ledger"],
                    "solution_folder": "basic_state",
                    "prompts": [
                        {
                            "prompt_id": "basic_to_person_split",
                            "target_state": "person_split_state",
                            "prompt": "split this ledger by person",
                        }
                    ],
                }
            ],
            "metadata": {"start_state": "basic_state", **({"num_lines": i} if i % 2 else {})},
            "files": {f"basic_state/club{i}.ledger": f"2016/06/01 Walgreens{i} $9.40"},
        },
        "Walgreens",
    ),
    "fineedit": Sample(
        lambda i: {
            "context": f"Original{i} text",
            "edit_request": "Change the first word",
            "edit_content": f"Edited{i} text",
            "diff": "-Original",
            "g_score": 9,
        },
        "Original",
        Features({**strings("context", "edit_request", "edit_content", "diff"), "g_score": INT}),
    ),
    "repobench": Sample(
        lambda i: {
            "repo_name": "owner/project",
            "file_path": f"module{i}.py",
            "context": [
                {"identifier": "Parser", "path": "a.py", "snippet": f"class Parser{i}: ..."}
            ],
            "import_statement": "from a import Parser",
            "token_num": 900,
            "cropped_code": "def run():\n",
            "all_code": "def run():\n    pass\n",
            "next_line": "    pass",
            "gold_snippet_index": 0,
            "created_at": "2023-10-06 00:00:00+00:00",
            "level": "2k",
        },
        "Parser",
        Features(
            {
                **strings("repo_name", "file_path"),
                "context": List({"identifier": STRING, "path": STRING, "snippet": STRING}),
                "import_statement": STRING,
                "token_num": INT,
                **strings("cropped_code", "all_code", "next_line"),
                "gold_snippet_index": INT,
                **strings("created_at", "level"),
            }
        ),
    ),
    "swe-bench": Sample(
        lambda i: {
            "repo": "astropy/astropy",
            "instance_id": f"astropy__astropy-{i}",
            "base_commit": f"{i:040x}",
            "patch": "diff",
            "test_patch": "diff",
            "problem_statement": f"Separability{i} is wrong",
            "hints_text": "",
            "created_at": "2022-03-03T15:14:54Z",
            "version": "4.3",
            "FAIL_TO_PASS": "[]",
            "PASS_TO_PASS": "[]",
            "environment_setup_commit": "298c",
            "difficulty": "15 min - 1 hour",
        },
        "Separability",
        strings(
            *("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement"),
            *("hints_text", "created_at", "version", "FAIL_TO_PASS", "PASS_TO_PASS"),
            *("environment_setup_commit", "difficulty"),
        ),
    ),
    "magicoder": Sample(
        lambda i: {"instruction": f"Write program{i}", "response": "print()"}, "program"
    ),
    "mbpp": Sample(
        lambda i: {
            "task_id": i,
            "text": f"Write function{i}.",
            "code": "def f(): ...",
            "test_list": ["assert f() == 1"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        "assert f",
        Features(
            {
                "task_id": Value("int32"),
                **strings("text", "code"),
                "test_list": List(STRING),
                "test_setup_code": STRING,
                "challenge_test_list": List(STRING),
            }
        ),
    ),
    # The columns are those of the script that publishes the set, in llama-stack's evaluations.
    "bfcl": Sample(
        lambda i: {
            "id": f"simple_{i}",
            "multi_turn": False,
            "functions": "[]",
            "tools": json.dumps(
                [{"type": "function", "function": {"name": "area", "parameters": {}}}]
            ),
            "missed_functions": "{}",
            "initial_config": "{}",
            "involved_classes": [],
            "turns": json.dumps([[{"role": "user", "content": f"Area of triangle{i}?"}]]),
            "language": "Python",
            "test_category": "simple",
            "subset": "simple",
            "ground_truth": "{}",
        },
        "triangle",
        Features(
            {
                "id": STRING,
                "multi_turn": BOOL,
                **strings("functions", "tools", "missed_functions", "initial_config"),
                "involved_classes": List(STRING),
                **strings("turns", "language", "test_category", "subset", "ground_truth"),
            }
        ),
    ),
    # Unverified: no copy of the card was found. xlangai/spider has db_id, query and question.
    "spider": Sample(
        lambda i: {
            "db_id": "concert_singer",
            "question": f"How many singers{i}?",
            "query": "SELECT count(*) FROM singer",
            "context": "CREATE TABLE singer (name TEXT)",
        },
        "CREATE TABLE",
        strings("db_id", "question", "query", "context"),
    ),
    "hotpotqa": Sample(
        lambda i: {
            "id": str(i),
            "question": f"Which came{i} first?",
            "answer": "it",
            "type": "comparison",
            "level": "hard",
            "supporting_facts": {"title": ["Arthur"], "sent_id": [0]},
            "context": {"title": ["Arthur", "First"], "sentences": [["A magazine."], ["Another."]]},
        },
        "magazine",
        Features(
            {
                **strings("id", "question", "answer", "type", "level"),
                "supporting_facts": {"title": List(STRING), "sent_id": List(Value("int32"))},
                "context": {"title": List(STRING), "sentences": List(List(STRING))},
            }
        ),
    ),
    "musique": Sample(
        lambda i: {
            "id": f"2hop__{i}",
            "paragraphs": [
                {"idx": 0, "title": "Green", "paragraph_text": "An album.", "is_supporting": True}
            ],
            "question": f"Who is the spouse{i}?",
            "question_decomposition": [
                {"id": 1, "question": "q", "answer": "a", "paragraph_support_idx": 0}
            ],
            "answer": "Miquette",
            "answer_aliases": [],
            "answerable": True,
        },
        "An album",
    ),
    # Lists are JSON texts in the parquet files: each context is [title, sentences].
    "2wikimultihopqa": Sample(
        lambda i: {
            "_id": str(i),
            "type": "compositional",
            "question": f"Who is the mother{i}?",
            "context": json.dumps([["Polish films", ["A film. ", "Made in 1930."]]]),
            "supporting_facts": "[]",
            "evidences": "[]",
            "answer": "Małgorzata",
        },
        "Made in 1930",
        strings(*("_id", "type", "question", "context", "supporting_facts", "evidences", "answer")),
    ),
    # Features as OpenBMB/InfiniteBench passes them to load_dataset.
    "infinitebench": Sample(
        lambda i: {
            "id": i,
            "context": f"Chapter{i} " + "word " * 8000 + "end",
            "input": "",
            "answer": ["A summary."],
            "options": [],
        },
        "[...]",
    ),
    "cnn-dailymail": Sample(
        lambda i: {"article": f"(CNN)Report{i}", "highlights": "h", "id": str(i)},
        "(CNN)",
        strings("article", "highlights", "id"),
    ),
    "govreport": Sample(
        lambda i: {"report": f"Background{i}", "summary": "s"},
        "Background",
        strings("report", "summary"),
    ),
    "alpaca": Sample(
        lambda i: {
            "instruction": f"Give tips{i}.",
            "input": "" if i % 2 else "for health",
            "output": "1. Eat",
            "text": "Below is an instruction",
        },
        "Give tips",
        strings("instruction", "input", "output", "text"),
    ),
    # github.com/SafeAILab/EAGLE, eagle/data/mt_bench/question.jsonl
    "mt-bench": Sample(
        lambda i: {
            "question_id": 81 + i,
            "category": "writing",
            "turns": [f"Compose a post{i}.", "Rewrite it."],
        },
        "Compose",
    ),
    "speed-bench": Sample(
        lambda i: {
            "question_id": str(i),
            "category": "coding",
            "sub_category": "",
            "turns": [f"Sort list{i}.", "Faster."],
            "source": "s",
            "src_id": str(i),
            "difficulty": "",
            "multiturn": True,
        },
        "Sort list",
        Features(
            {
                **strings("question_id", "category", "sub_category"),
                "turns": List(STRING),
                **strings("source", "src_id", "difficulty"),
                "multiturn": BOOL,
            }
        ),
    ),
    "blazedit": Sample(
        lambda i: {
            "code": f"def first{i}(): ...",
            "change_request": "Rename it.",
            "char_count": 9,
            "norm_distance": 0.1,
        },
        "Rename it",
        Features({**strings("code", "change_request"), "char_count": INT, "norm_distance": FLOAT}),
    ),
    "instruct-coder": Sample(
        lambda i: {"input": f"x = {i}", "instruction": "Add a comment.", "output": "# x"},
        "Add a comment",
        strings("input", "instruction", "output"),
    ),
}


def write(
    data: DataSet, sample: Sample, folder: Path, *, num_rows: int = 45, without: str | None = None
) -> None:
    """Writes a copy of the repository with made-up rows.

    without: leaves this column out.
    """
    root = folder / data.name
    rows = [dict(sample.row(i)) for i in range(num_rows)]
    features = sample.features
    if without is not None:
        rows = [{name: row[name] for name in row if name != without} for row in rows]
        if features is not None:
            features = Features({n: f for n, f in features.items() if n != without})
    is_parquet = data.file.endswith(".parquet") if data.file else features is not None
    path = root / (data.file or f"data/rows.{'parquet' if is_parquet else 'jsonl'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_parquet:
        Dataset.from_list(rows, features=features).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if data.file is None:
        config = {
            "config_name": data.config or "default",
            "data_files": [{"split": data.split, "path": str(path.relative_to(root))}],
        }
        (root / "README.md").write_text(f"---\n{json.dumps({'configs': [config]})}\n---\n")


def data_of(workload: Workload) -> DataSet:
    """The data set that a workload loads."""
    data = workload.load.__self__  # type: ignore[attr-defined]
    assert isinstance(data, DataSet)
    return data
