"""The data sets of a run: drawn once, and kept with their prompts in the run's folder."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.workloads.catalogue import find
from benchmarks.workloads.paper import PAPER
from benchmarks.workloads.prompts import Groups, Prompt, Workload, draw
from sglang_hvd.demo.corpus.session import Family
from sglang_hvd.demo.corpus.sessions import demo_sessions
from sglang_hvd.paper.results import DataSet
from sglang_hvd.whole_file import write_whole

# The demo's models know only the demo's conversations. Such conversations stand in for these data
# sets, and the result marks them as samples.
SAMPLES: Mapping[str, Family] = {
    "delegate-52": "editing",
    "mbpp": "code",
    "bfcl": "tool_calls",
    "spider": "sql",
    "hotpotqa": "qa",
    "infinitebench": "editing",
    "cnn-dailymail": "qa",
    "mt-bench": "chat",
}
_SAMPLE_SESSIONS, _SAMPLE_TURNS = 120, 2

# Figure 2a names entities, file paths, delimiters, code patterns, schemas and tools. It does not
# say how they were counted: these expressions are ours.
_SIGNS: Mapping[str, re.Pattern[str]] = {
    "file paths": re.compile(r"(?:[\w.-]+/)+[\w-]+\.?\w*|\b[\w-]+\.(?:[a-z]{1,4})\b"),
    "delimiters": re.compile(r"[{}\[\]()<>|;`]|\"\"\"|---+|==+"),
    "code patterns": re.compile(
        r"\b(?:def|class|return|import|from|function|SELECT|FROM|WHERE)\b|\b\w+\(|```"
    ),
    "schema fields": re.compile(r"\"\w+\"\s*:|\b\w+ (?:TEXT|INTEGER|INT|REAL|VARCHAR|NUMBER)\b"),
}
_NAME = re.compile(r"\b(?:[A-Z]\w+|\w+_\w+)\b")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A data set with its prompts.

    measured: as many as `about` says, and more if more requests run at a time.
    """

    about: DataSet
    measured: tuple[Prompt, ...]
    warm_up: tuple[Prompt, ...]

    def prompts_for(self, concurrency: int) -> Sequence[Prompt]:
        """The prompts to measure if so many requests run at a time."""
        return self.measured[: max(concurrency, self.about.num_measured)]


def drawn_sets(
    names: Sequence[str],
    folder: Path,
    *,
    are_samples: bool,
    copies: Path | None,
    num_measured: int,
    num_at_once: int,
    num_warm_up: int,
    seed: int,
) -> list[Drawn]:
    """The data sets of these names, in the paper's order.

    folder: keeps the prompts, so that a run that goes on needs no network and has the same ones.
    are_samples: the demo's conversations stand in for the data sets.
    copies: a folder with copies of data sets; None: they come from the hub.
    num_at_once: the largest number of requests at a time.

    Raises ValueError, in one line, if a data set cannot be read, or if the folder has prompts that
    were drawn otherwise.
    """
    asked = {
        "are_samples": are_samples,
        "copies": None if copies is None else str(copies.absolute()),
        "num_measured": num_measured,
        "num_drawn": max(num_measured, num_at_once),
        "num_warm_up": num_warm_up,
        "seed": seed,
    }
    found = []
    for path, workload in sets_of(names, folder, are_samples=are_samples).items():
        if workload is not None:
            prompts = draw(
                workload,
                folder=copies,
                num_measured=max(num_measured, num_at_once),
                num_warm_up=num_warm_up,
                seed=seed,
            )
            about = DataSet(
                name=workload.name,
                family=workload.family,
                source=workload.source,
                licence=workload.licence,
                revision=workload.revision,
                is_sample=are_samples,
                num_measured=num_measured,
                num_warm_up=len(prompts.warm_up),
                signs=signs_of(prompts.measured[:num_measured]),
            )
            kept = {"asked": asked, "about": about.model_dump(), **asdict(prompts)}
            write_whole(path, (json.dumps(kept, indent=1) + "\n").encode())
        found.append(_read(path, asked))
    return found


def sets_of(
    names: Sequence[str], folder: Path, *, are_samples: bool
) -> dict[Path, Workload | None]:
    """The file of each data set's prompts, in the paper's order, with the workload to draw them
    from; None: the file is there.

    Raises ValueError, in one line, if a name is unknown or given twice.
    """
    stems = [Path(name).stem for name in names]
    if len(set(stems)) < len(stems):
        raise ValueError(f"{', '.join(names)}: give each data set once, and files other names")
    order = [workload.name for workload in PAPER]
    names = sorted(names, key=lambda name: order.index(name) if name in order else len(order))
    paths = {folder / f"{Path(name).stem}.json": name for name in names}
    of = _sample if are_samples else find
    return {path: None if path.exists() else of(name) for path, name in paths.items()}


def signs_of(prompts: Sequence[Prompt]) -> dict[str, float]:
    """Structural signs in prompts, in units per 1000 characters."""
    texts = [str(prompt.request(None).get("text", "")) for prompt in prompts]
    num_thousands = sum(map(len, texts)) / 1000
    if not num_thousands:
        return {}
    counts = {name: sum(len(sign.findall(t)) for t in texts) for name, sign in _SIGNS.items()}
    said = [_NAME.findall(text) for text in texts]
    counts["repeated names"] = sum(len(names) - len(set(names)) for names in said)
    return {name: number / num_thousands for name, number in counts.items()}


def _sample(name: str) -> Workload:
    if name not in SAMPLES:
        raise ValueError(f"{name}: the demo has samples of {', '.join(SAMPLES)}")
    family = SAMPLES[name]

    def load(_: Path | None) -> Groups:
        # A seed of its own: two data sets may have samples of the same family.
        seed = 1000 + list(SAMPLES).index(name)
        sessions = demo_sessions(family, count=_SAMPLE_SESSIONS, seed=seed)
        said = [[turn.user for turn in session.turns[:_SAMPLE_TURNS]] for session in sessions]
        return [[Prompt.of_user(first, *others)] for first, *others in said]

    return replace(
        find(name),
        source=f"sglang_hvd/demo/corpus, family {family}",
        licence="Apache-2.0",
        load=load,
        revision=None,
    )


def _read(path: Path, asked: Mapping[str, object]) -> Drawn:
    try:
        kept = json.loads(path.read_bytes())
        drawn = Drawn(
            DataSet.model_validate(kept["about"]),
            *(tuple(map(_prompt, kept[part])) for part in ("measured", "warm_up")),
        )
        before = dict(kept["asked"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = str(error).splitlines()[0]
        raise ValueError(f"{path} has no prompts ({told}): remove it to draw them again") from None
    if before != asked:
        differing = ", ".join(name for name in asked if before.get(name) != asked[name])
        raise ValueError(
            f"{path} was drawn with other settings ({differing} differ): give another --out, or "
            "the same settings"
        )
    return drawn


def _prompt(fields: Mapping[str, Any]) -> Prompt:
    """The inverse of asdict, after JSON has made lists of the tuples."""
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()
    }
    return Prompt(**values)
