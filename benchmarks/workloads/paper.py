"""The paper's sixteen data sets (table 8), in its six families.

The paper names data sets and neither splits nor the wording of prompts: both are ours. Columns and
types are those of the cards on the hub or of the files themselves. Where a revision or a column
could not be looked up, the row says so.
"""

import json
from collections.abc import Callable, Mapping

from benchmarks.workloads.hub import DataSet, Row
from benchmarks.workloads.prompts import MAX_CHARS, Prompt, Workload

AGENTIC = "agentic / workflow editing"
CODE = "code / repository"
STRUCTURED = "structured generation"
MULTI_HOP = "multi-hop QA"
LONG = "long-context"
OPEN = "open-ended instruction / chat"


def _delegate(row: Row) -> Prompt | None:
    """The first edit of a work environment's first state, with the files of that state."""
    start = row["metadata"]["start_state"]
    state = next(state for state in row["states"] if state["state_id"] == start)
    if not state["prompts"]:
        return None
    files = {
        name: row["files"].get(f"{state['solution_folder']}/{name}") for name in state["context"]
    }
    if None in files.values():
        return None
    shown = "\n\n".join(f"{name}:\n```\n{text}\n```" for name, text in files.items())
    return Prompt.of_user(
        f"{shown}\n\n{state['prompts'][0]['prompt']}\n\nReturn every file completely, each after "
        "its name."
    )


def _fine_edit(row: Row) -> Prompt:
    return Prompt.of_user(
        f"Edit this text.\n\n{row['context']}\n\nEdit request: {row['edit_request']}\n\nReturn the "
        "whole edited text and nothing else."
    )


def _repo_bench(row: Row) -> Prompt:
    snippets = "\n\n".join(f"# {part['path']}\n{part['snippet']}" for part in row["context"])
    return Prompt.of_user(
        f"These are parts of the repository {row['repo_name']}:\n\n```python\n{snippets}\n```\n\n"
        f"Continue the file {row['file_path']}:\n\n```python\n{row['import_statement']}\n"
        f"{row['cropped_code']}\n```"
    )


def _swe_bench(row: Row) -> Prompt:
    return Prompt.of_user(
        f"The repository {row['repo']} is at commit {row['base_commit']}. Resolve this issue:\n\n"
        f"<issue>\n{row['problem_statement']}\n</issue>\n\nSay which files you would read, write a "
        "script that reproduces the error, then give the change as a unified diff.",
        system="You are a software engineer who works in a sandbox with a shell and an editor.",
    )


def _mbpp(row: Row) -> Prompt:
    tests = "\n".join(row["test_list"])
    return Prompt.of_user(f"{row['text']}\n\nYour code should pass these tests:\n\n{tests}")


def _bfcl(row: Row) -> Prompt | None:
    """The first turn. Entries with several turns are left out: they need the tools themselves."""
    if row["multi_turn"]:
        return None
    messages = tuple(json.loads(row["turns"])[0])
    # Some entries describe the functions in a system message already.
    has_system = messages[0]["role"] == "system"
    return Prompt(messages, tools=() if has_system else tuple(json.loads(row["tools"])))


def _spider(row: Row) -> Prompt:
    return Prompt.of_user(
        f"{row['context']}\n\nWrite one SQL query that answers this question: {row['question']}"
    )


def _asked(passages: Mapping[str, str] | list[tuple[str, str]], question: str) -> Prompt:
    pairs = passages.items() if isinstance(passages, Mapping) else passages
    shown = "\n\n".join(f"{title}\n{text}" for title, text in pairs)
    return Prompt.of_user(f"{shown}\n\nAnswer from these passages, step by step: {question}")


def _hotpot(row: Row) -> Prompt:
    context = row["context"]
    texts = ("".join(sentences) for sentences in context["sentences"])
    return _asked(list(zip(context["title"], texts, strict=True)), row["question"])


def _musique(row: Row) -> Prompt:
    passages = [(part["title"], part["paragraph_text"]) for part in row["paragraphs"]]
    return _asked(passages, row["question"])


def _two_wiki(row: Row) -> Prompt:
    """The context is JSON: a list of [title, sentences]."""
    passages = [(title, " ".join(sentences)) for title, sentences in json.loads(row["context"])]
    return _asked(passages, row["question"])


def _summary_of(column: str, kind: str) -> Callable[[Row], Prompt]:
    def prompt(row: Row) -> Prompt:
        return Prompt.of_user(f"Summarize this {kind}.\n\n{_cut(row[column])}")

    return prompt


def _cut(document: str) -> str:
    """The beginning and the end of a document that is too long, in equal parts."""
    most = MAX_CHARS - 1000
    if len(document) <= most:
        return document
    return f"{document[: most // 2]}\n\n[...]\n\n{document[-(most // 2) :]}"


def _alpaca(row: Row) -> Prompt:
    return Prompt.of_user("\n\n".join(filter(None, (row["instruction"], row["input"]))))


def turns(row: Row) -> Prompt:
    """A conversation whose user turns are the column `turns`."""
    first, *others = row["turns"]
    return Prompt.of_user(first, *others)


def workload(
    name: str, family: str, data: DataSet, licence: str, size: str, note: str = ""
) -> Workload:
    return Workload(
        name, family, data.source, licence, size, data.load, note, revision=data.revision
    )


PAPER: tuple[Workload, ...] = (
    workload(
        "delegate-52",
        AGENTIC,
        DataSet(
            "microsoft/delegate52",
            "9d325644687cc69533f8070e4decfc9cbf057b12",
            {
                "states": [
                    {
                        "state_id": "string",
                        "context": ["string"],
                        "solution_folder": "string",
                        "prompts": [{"prompt": "string"}],
                    }
                ],
                "metadata": "json",
                "files": "json",
            },
            _delegate,
            split="test",
        ),
        "CDLA-Permissive-2.0; each document has its own",
        "234 work environments",
    ),
    workload(
        "fineedit",
        AGENTIC,
        # No stored copy of the hub has the revisions, or says how the splits are named.
        DataSet(
            "YimingZeng/FineEdit_bench",
            "main",
            {"context": "string", "edit_request": "string"},
            _fine_edit,
        ),
        "CC-BY-4.0",
        "over 30,000 edits",
        "The revision could not be looked up: this follows the branch main.",
    ),
    workload(
        "repobench",
        CODE,
        DataSet(
            "tianyang/repobench_python_v1.1",
            "8a7cf0c8942cc1aa066bf261839650ac55a2ff79",
            {
                "repo_name": "string",
                "file_path": "string",
                "context": [{"path": "string", "snippet": "string"}],
                "import_statement": "string",
                "cropped_code": "string",
            },
            _repo_bench,
            split="cross_file_first",
        ),
        "CC (the card names no version)",
        "8,033 files",
    ),
    workload(
        "swe-bench",
        CODE,
        DataSet(
            "SWE-bench/SWE-bench_Verified",
            "78f471bf655a3137b2e8a75af1501690ec009ec3",
            {"repo": "string", "base_commit": "string", "problem_statement": "string"},
            _swe_bench,
            split="test",
        ),
        "not stated on the card",
        "500 issues",
        "The paper has OpenHands' prompts; here is the issue, without a sandbox.",
    ),
    workload(
        "magicoder",
        CODE,
        DataSet(
            "ise-uiuc/Magicoder-Evol-Instruct-110K",
            "b0079beaa0361d82412520b873715bee59cc7dd4",
            {"instruction": "string"},
            lambda row: Prompt.of_user(row["instruction"]),
        ),
        "Apache-2.0",
        "110,000 instructions",
    ),
    workload(
        "mbpp",
        CODE,
        DataSet(
            "google-research-datasets/mbpp",
            "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
            {"text": "string", "test_list": ["string"]},
            _mbpp,
            split="test",
            config="full",
        ),
        "CC-BY-4.0",
        "500 problems",
    ),
    workload(
        "bfcl",
        STRUCTURED,
        # The card's copy shows the head as cf38bbe, and the hub wants all 40 digits.
        DataSet(
            "llamastack/bfcl_v3",
            "main",
            {"multi_turn": "bool", "tools": "string", "turns": "string"},
            _bfcl,
        ),
        "MIT (card); the benchmark is Apache-2.0",
        "about 4,400 entries",
        "The revision could not be looked up: this follows the branch main.",
    ),
    workload(
        "spider",
        STRUCTURED,
        # No stored copy of the hub has this data set, and its author's model cards only name it:
        # revision, split and the names of the columns are unverified. The check of columns says
        # what it finds.
        DataSet(
            "NBAmine/xlangai-spider-with-context",
            "main",
            {"question": "string", "context": "string"},
            _spider,
        ),
        "CC-BY-SA-4.0 (Spider); the card was not found",
        "8,034 questions (Spider)",
        "Revision, split and columns could not be looked up.",
    ),
    workload(
        "hotpotqa",
        MULTI_HOP,
        DataSet(
            "hotpotqa/hotpot_qa",
            "1908d6afbbead072334abe2965f91bd2709910ab",
            {"question": "string", "context": {"title": ["string"], "sentences": [["string"]]}},
            _hotpot,
            split="validation",
            config="distractor",
        ),
        "CC-BY-SA-4.0",
        "7,405 questions",
    ),
    workload(
        "musique",
        MULTI_HOP,
        DataSet(
            "dgslibisey/MuSiQue",
            "c8f4f8c9465fb69d31a8eae894c3fd509c4ca321",
            {"question": "string", "paragraphs": [{"title": "string", "paragraph_text": "string"}]},
            _musique,
            file="musique_ans_v1.0_dev.jsonl",
        ),
        "CC-BY-4.0 (MuSiQue); not stated on the card",
        "2,417 questions",
    ),
    workload(
        "2wikimultihopqa",
        MULTI_HOP,
        # The paper's Alab-NII/2wikimultihop is a repository of GitHub whose data lie elsewhere;
        # this is the first author's copy on the hub. It has a loading script, which the library
        # refuses, so its file is read directly.
        DataSet(
            "xanhho/2WikiMultihopQA",
            "612bc5039a457880d9e7d84c3b0a4cf154b70e4f",
            {"question": "string", "context": "string"},
            _two_wiki,
            file="dev.parquet",
        ),
        "Apache-2.0",
        "12,576 questions",
    ),
    workload(
        "infinitebench",
        LONG,
        DataSet(
            "xinrongzhang2022/InfiniteBench",
            "25cee7d0d53e88f6d6d049e5e4567ffb4d8f8720",
            {"context": "string"},
            _summary_of("context", "book"),
            file="longbook_sum_eng.jsonl",
        ),
        "not stated on the card",
        "103 books (En.Sum)",
        "The paper does not name the task. The middle of each book is left out.",
    ),
    workload(
        "cnn-dailymail",
        LONG,
        DataSet(
            "abisee/cnn_dailymail",
            "96df5e686bee6baa90b8bee7c28b81fa3fa6223d",
            {"article": "string"},
            _summary_of("article", "article"),
            split="test",
            config="3.0.0",
        ),
        "Apache-2.0",
        "11,490 articles",
    ),
    workload(
        "govreport",
        LONG,
        DataSet(
            "ccdv/govreport-summarization",
            "4e21184e01ae8017e2c036e180fe5e541fef60a0",
            {"report": "string"},
            _summary_of("report", "report"),
            split="test",
            config="document",
        ),
        "not stated on the card",
        "973 reports",
        "The middle of a long report is left out.",
    ),
    workload(
        "alpaca",
        OPEN,
        DataSet(
            "tatsu-lab/alpaca",
            "dce01c9b08f87459cf36a430d809084718273017",
            {"instruction": "string", "input": "string"},
            _alpaca,
        ),
        "CC-BY-NC-4.0",
        "52,002 instructions",
    ),
    workload(
        "mt-bench",
        OPEN,
        DataSet(
            "SafeAILab/EAGLE",
            "cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b",
            {"turns": ["string"]},
            turns,
            file="eagle/data/mt_bench/question.jsonl",
            site="GitHub",
        ),
        "Apache-2.0",
        "80 conversations of two turns",
    ),
)
