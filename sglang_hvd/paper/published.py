"""What the paper reports, as its text gives it: tables 1 to 4 and 11 to 13, figures 4 and 5.

Figures 2 and 3 are drawings, of which the text gives no number. All runs were made on H100 GPUs
with one request at a time, except those of figure 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Names of the paper's models in result files, and in the paper.
MODELS: Mapping[str, str] = {
    "qwen3-8b": "Qwen3-8B",
    "qwen3-4b": "Qwen3-4B",
    "llama3.1-8b": "Llama3.1-8B",
}

# The modes that the paper compares its method with, in its order.
BASELINES = ("greedy", "eagle3", "suffix", "frequency")
METHOD = "hvd-paper"


@dataclass(frozen=True, slots=True)
class PaperDataSet:
    """A data set of table 8.

    speedups: table 1. For each of MODELS, the method's over each of BASELINES.
    """

    title: str
    family: str
    speedups: tuple[tuple[float, float, float, float], ...]


_AGENTIC = "agentic / workflow editing"
_CODE = "code / repository"
_STRUCTURED = "structured generation"
_MULTI_HOP = "multi-hop QA"
_LONG = "long-context"
_OPEN = "open-ended instruction / chat"

# By their names in result files.
DATA_SETS: Mapping[str, PaperDataSet] = {
    "delegate-52": PaperDataSet(
        *("Delegate-52", _AGENTIC),
        ((3.25, 1.44, 2.14, 1.06), (3.40, 1.90, 1.64, 1.18), (3.46, 3.38, 0.81, 1.24)),
    ),
    "fineedit": PaperDataSet(
        *("InstructEdit/FineEdit", _AGENTIC),
        ((3.57, 1.51, 2.30, 1.32), (4.21, 2.67, 1.72, 1.22), (7.56, 5.49, 1.15, 1.20)),
    ),
    "repobench": PaperDataSet(
        *("RepoBench", _CODE),
        ((2.54, 1.09, 2.15, 1.15), (3.57, 1.56, 1.44, 0.81), (2.12, 2.99, 1.09, 1.26)),
    ),
    "swe-bench": PaperDataSet(
        *("SWE-bench OpenHands", _CODE),
        ((3.70, 1.09, 3.21, 1.28), (2.50, 1.08, 1.52, 0.88), (3.31, 2.11, 2.60, 1.26)),
    ),
    "magicoder": PaperDataSet(
        *("Magicoder", _CODE),
        ((3.31, 1.08, 3.79, 1.34), (1.73, 1.02, 1.82, 0.87), (5.86, 2.51, 4.28, 1.27)),
    ),
    "mbpp": PaperDataSet(
        *("MBPP", _CODE),
        ((4.49, 1.17, 4.78, 1.54), (2.73, 0.90, 2.11, 1.01), (3.68, 0.99, 4.65, 1.05)),
    ),
    "bfcl": PaperDataSet(
        *("BFCL", _STRUCTURED),
        ((2.31, 0.98, 3.13, 1.27), (2.19, 0.98, 2.47, 1.13), (1.02, 0.90, 1.32, 1.01)),
    ),
    "spider": PaperDataSet(
        *("Spider", _STRUCTURED),
        ((3.12, 0.97, 2.98, 1.33), (1.56, 1.01, 1.79, 0.88), (4.46, 1.85, 3.61, 1.24)),
    ),
    "hotpotqa": PaperDataSet(
        *("HotpotQA", _MULTI_HOP),
        ((2.57, 0.95, 3.77, 1.37), (2.03, 0.81, 1.97, 1.02), (2.23, 0.93, 2.70, 0.96)),
    ),
    "musique": PaperDataSet(
        *("MuSiQue", _MULTI_HOP),
        ((3.55, 0.95, 2.88, 1.17), (2.12, 1.18, 1.35, 1.05), (3.00, 3.22, 1.15, 1.97)),
    ),
    "2wikimultihopqa": PaperDataSet(
        *("2WikiMultiHopQA", _MULTI_HOP),
        ((2.73, 0.96, 3.28, 1.40), (2.01, 1.19, 1.65, 0.98), (2.52, 1.04, 2.49, 0.87)),
    ),
    "infinitebench": PaperDataSet(
        *("InfiniteBench", _LONG),
        ((5.03, 2.42, 3.04, 1.21), (5.53, 2.51, 2.40, 1.16), (2.23, 2.84, 1.47, 2.94)),
    ),
    "cnn-dailymail": PaperDataSet(
        *("CNN/DailyMail", _LONG),
        ((2.33, 0.94, 3.85, 1.34), (1.79, 0.99, 2.75, 1.02), (2.43, 0.94, 3.83, 1.04)),
    ),
    "govreport": PaperDataSet(
        *("GovReport", _LONG),
        ((2.03, 0.95, 3.36, 1.18), (1.52, 1.01, 2.08, 1.02), (0.95, 1.31, 0.98, 1.15)),
    ),
    "alpaca": PaperDataSet(
        *("Alpaca", _OPEN),
        ((2.73, 0.97, 3.84, 1.40), (2.06, 0.85, 2.40, 0.83), (3.14, 0.96, 5.68, 1.05)),
    ),
    "mt-bench": PaperDataSet(
        *("MT-Bench", _OPEN),
        ((3.34, 0.98, 4.68, 1.41), (1.59, 0.99, 2.06, 0.87), (3.24, 1.18, 4.76, 1.10)),
    ),
}

# Table 1, last row: the arithmetic means over the data sets.
AVERAGES = ((3.16, 1.15, 3.32, 1.30), (2.53, 1.29, 1.95, 0.99), (3.20, 2.04, 2.66, 1.29))


@dataclass(frozen=True, slots=True)
class PaperRun:
    """A row of tables 11 to 13: all data sets together.

    throughput: tokens per second. cycles: per 1000 tokens. accepted: draft tokens per cycle.
    cache, eagle3: percent of the cycles that verified such a draft. None: a dash.
    """

    throughput: float
    cycles: float
    accepted: float | None = None
    cache: float | None = None
    eagle3: float | None = None


# Tables 11 to 13, by model and mode.
RUNS: Mapping[str, Mapping[str, PaperRun]] = {
    "qwen3-8b": {
        "greedy": PaperRun(39.9, 998.7),
        "eagle3": PaperRun(109.5, 240.2, 3.16, 0.0, 100.0),
        "suffix": PaperRun(42.1, 397.8, 1.51, 97.6, 0.0),
        "frequency": PaperRun(105.0, 188.4, 4.31, 8.0, 92.0),
        METHOD: PaperRun(133.0, 189.7, 4.27, 9.7, 90.3),
    },
    "qwen3-4b": {
        "greedy": PaperRun(38.3, 1000.0),
        "eagle3": PaperRun(76.7, 309.7, 2.23, 0.0, 100.0),
        "suffix": PaperRun(54.6, 346.1, 1.89, 97.6, 0.0),
        "frequency": PaperRun(104.5, 223.9, 3.47, 8.2, 91.8),
        METHOD: PaperRun(101.1, 228.6, 3.37, 8.8, 91.2),
    },
    "llama3.1-8b": {
        "greedy": PaperRun(40.7, 1000.0),
        "eagle3": PaperRun(47.7, 571.0, 0.75, 0.0, 100.0),
        "suffix": PaperRun(78.2, 264.0, 2.79, 93.9, 0.0),
        "frequency": PaperRun(98.3, 234.9, 3.26, 9.4, 90.6),
        METHOD: PaperRun(126.2, 200.1, 4.00, 18.6, 81.4),
    },
}


@dataclass(frozen=True, slots=True)
class PaperSelection:
    """A row of table 2, in percent: drafts that reach the threshold, drafts that are selected."""

    high: float
    selected: float
    precision: float
    recall: float


SELECTIONS: Mapping[str, PaperSelection] = {
    "qwen3-8b": PaperSelection(4.8, 3.8, 78.2, 61.4),
    "qwen3-4b": PaperSelection(6.6, 5.4, 82.9, 67.8),
    "llama3.1-8b": PaperSelection(8.9, 8.1, 87.6, 79.8),
}

# Table 3: Qwen3-8B served by vLLM. Speedup over each of these modes, by data set.
SERVED_BASELINES = ("eagle3", "suffix")
SERVED: Mapping[str, tuple[float, float]] = {
    "mt-bench": (2.31, 1.21),
    "cnn-dailymail": (3.56, 1.16),
}

# Table 4: Llama3.1-8B on MT-Bench, by template and mode.
TEMPLATE_DATA_SET, TEMPLATE_MODEL = "mt-bench", "llama3.1-8b"
TEMPLATES: Mapping[tuple[str, str], PaperRun] = {
    ("none", "eagle3"): PaperRun(55.6, 455, 1.20),
    ("official", "eagle3"): PaperRun(134.4, 192, 4.21),
    ("none", METHOD): PaperRun(194.2, 120, 7.32),
}

# Figure 4 and its text: Llama3.1-8B, cycles per 1000 tokens and milliseconds per cycle.
BREAKDOWN_MODEL = "llama3.1-8b"
BREAKDOWN: Mapping[str, tuple[float, float]] = {
    "eagle3": (571, 36.7),
    "suffix": (264, 48.4),
    "frequency": (235, 43.3),
    METHOD: (200, 39.6),
}


@dataclass(frozen=True, slots=True)
class PaperGpu:
    """Figure 5 and its text: Qwen3-8B on four prompts of InfiniteBench.

    Cycles are per 1000 tokens. speedup: of the method over EAGLE3.
    """

    gpu: str
    eagle3_cycles: float
    method_cycles: float
    speedup: float


GPU_DATA_SET, GPU_MODEL = "infinitebench", "qwen3-8b"
GPUS = (
    PaperGpu("RTX 5090", 260.0, 152.9, 1.59),
    PaperGpu("H100", 257.1, 135.2, 1.73),
    PaperGpu("B200", 256.8, 230.3, 1.06),
)
