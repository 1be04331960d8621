"""What each idea of the predictor gains, on the same drafts.

    python -m benchmarks.experiments.ideas --traces DIR --tokenizer FILE [--cache-mode votes|paper]
        [--json FILE]

Every row is one training. Its quality is measured on the last quarter of each recording's sessions,
at the cycle starts of serving with the predictor that ships, averaged over families. Inputs that a
row leaves out are constant.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from benchmarks.command import run, write_rows
from benchmarks.experiments.options import replay_options
from sglang_hvd.config import HvdConfig
from sglang_hvd.payoff import (
    DEFAULT_PREDICTORS,
    FEATURE_NAMES,
    PAPER_FEATURES,
    POSITION_FEATURES,
    AcceptancePredictor,
)
from sglang_hvd.payoff.predictor import Kind, feature_settings
from sglang_hvd.replay.core.recording_walk import RecordingWalk, fingerprints_of
from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings
from sglang_hvd.replay.core.training_rows import Lessons, TrainingRows
from sglang_hvd.replay.core.walk import walk_recordings
from sglang_hvd.replay.report.importance import FEATURE_GROUPS
from sglang_hvd.replay.training.evaluate import judged_by, judging_walks, qualities
from sglang_hvd.replay.training.fit import TrainingSettings, train
from sglang_hvd.replay.training.quality import PayoffQuality
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.replay.training.train import (
    TrainPlan,
    first_round,
    held_out_sessions,
    later_round,
    lessons_of,
)

# Groups of inputs that the paper does not have, in the order in which they are added.
_GROUPS = (
    "the draft's own probabilities",
    "the match",
    "what the votes propose",
    "how right the cache was lately",
    "whether a copy goes on",
    "the texts before draft and source",
    "how often drafts had its tokens right",
    "where in its line it begins",
    "what else has votes",
    "tokens where the draft begins",
)
# Inputs of draft tokens that come from the suffix cache.
_LOOKED_UP = frozenset({"logit_follows", "log_token_age"})

_Drafts = TypeVar("_Drafts", TrainingRows, Lessons)


@dataclass(frozen=True)
class _Idea:
    name: str
    features: frozenset[str] = frozenset(FEATURE_NAMES)
    positions: frozenset[str] = frozenset(POSITION_FEATURES)
    kind: Kind = "survival"
    settings: TrainingSettings | None = None
    has_first_round: bool = True
    has_later_round: bool = True


def _ideas() -> list[_Idea]:
    ideas = [
        _Idea("the paper's predictor (mlp)", kind="mlp"),
        _Idea(
            "the same, batch of 65536",
            kind="mlp",
            settings=TrainingSettings.of_paper(0, batch_size=65536),
        ),
        _Idea("survival, the paper's features", frozenset(PAPER_FEATURES), frozenset()),
    ]
    names = set(PAPER_FEATURES)
    for group in _GROUPS:
        names.update(FEATURE_GROUPS[group])
        ideas.append(_Idea(f"+ {group}", frozenset(names), frozenset()))
    assert names == set(FEATURE_NAMES), "a feature is in no group"
    return [
        *ideas,
        _Idea(
            "+ probabilities and classes of each draft token",
            positions=frozenset(POSITION_FEATURES) - _LOOKED_UP,
        ),
        _Idea("+ what each draft token usually follows (all)"),
        _Idea("all, drafts' tokens alone", settings=TrainingSettings(worth_weight=0)),
        _Idea("all, nothing hidden", settings=TrainingSettings(input_dropout=0)),
        _Idea("all, 128 + 128 hidden", settings=TrainingSettings(hidden_sizes=(128, 128))),
        _Idea("all, 64 + 64 hidden", settings=TrainingSettings(hidden_sizes=(64, 64))),
        _Idea("all, 32 + 32 hidden", settings=TrainingSettings(hidden_sizes=(32, 32))),
        _Idea(
            "all, three times as long",
            settings=TrainingSettings(num_row_visits=9_000_000, max_epochs=60),
        ),
        _Idea("all, trained on the first round only", has_later_round=False),
        _Idea("all, trained on the later round only", has_first_round=False),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = replay_options("experiments.ideas", "Measure what each idea gains.", arguments)
    study = _Study.load(options)
    rows = []
    for idea in tqdm(_ideas(), unit="idea", disable=None):
        rows.append({"idea": idea.name, **asdict(study.mean_of(idea))})
        write_rows(options.json, rows)  # the rows so far
    left_out, frequency = study.mean_of_families_left_out(), study.mean_of_frequency()
    rows.append({"idea": "all, on families left out of training", **asdict(left_out)})
    rows.append({"idea": "frequency score", **asdict(frequency)})
    columns = {
        "idea": "idea",
        "average_precision": "average precision",
        "roc_auc": "ROC area",
        "precision": "precision",
        "recall": "recall",
        "calibration_error": "calibration error",
    }
    print(markdown_table(columns, rows))
    write_rows(options.json, rows)
    return 0


@dataclass(frozen=True)
class _Study:
    plan: TrainPlan
    off_policy: Sequence[RecordingWalk]
    on_policy: Sequence[RecordingWalk]
    judged: Sequence[RecordingWalk]
    held_out: frozenset[str]

    @classmethod
    def load(cls, options: argparse.Namespace) -> "_Study":
        recordings = [r for r in find_recordings(options.traces) if r.is_permissive]
        tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
        plan = TrainPlan(HvdConfig(cache_mode=options.cache_mode))
        shipped = DEFAULT_PREDICTORS[options.cache_mode]
        off_policy = [w for walks in first_round(recordings, tokenizer, plan) for w in walks]
        held_out = held_out_sessions(off_policy, plan.held_out)
        later = later_round(recordings, tokenizer, plan, shipped, without=held_out)
        deciding = plan.config.model_copy(update={"predictor": shipped})
        return cls(
            plan,
            off_policy,
            [walk for walks in later for walk in walks],
            walk_recordings(
                recordings,
                tokenizer,
                judging_walks(deciding, without=fingerprints_of(off_policy) - held_out)["cycle"],
                label="judged",
                num_processes=plan.num_processes,
            ),
            held_out,
        )

    def mean_of(self, idea: _Idea) -> PayoffQuality:
        predictor = self._train(idea)
        return self._mean(idea, lambda _: predictor)

    def mean_of_families_left_out(self) -> PayoffQuality:
        """Each family is judged by a predictor that was trained without its recordings."""
        idea = _Idea("left out")
        families = {walk.family for walk in self.judged}
        predictors = {family: self._train(idea, without_family=family) for family in families}
        return self._mean(idea, predictors.__getitem__)

    def mean_of_frequency(self) -> PayoffQuality:
        return self._mean(_Idea("frequency"), lambda _: None)

    def _mean(
        self, idea: _Idea, judging: Callable[[str], AcceptancePredictor | None]
    ) -> PayoffQuality:
        """judging: returns the predictor that judges a family; None: the frequency score."""
        judged = {}
        for walk in self.judged:
            rows = walk.rows()
            if rows is not None:
                judged[walk] = judged_by(_without(rows, idea), judging(walk.family))
        if not judged:
            raise ValueError("no session is held out: give recordings of several sessions")
        return next(quality for walk, quality in qualities(judged) if walk is None)

    def _train(self, idea: _Idea, without_family: str = "") -> AcceptancePredictor:
        def kept(walks: Sequence[RecordingWalk]) -> list[RecordingWalk]:
            return [walk for walk in walks if walk.family != without_family]

        walks = [
            *(kept(self.off_policy) if idea.has_first_round else []),
            *(kept(self.on_policy) if idea.has_later_round else []),
        ]
        lessons = lessons_of(walks, without=self.held_out)
        lessons = _without(lessons.sample(self.plan.max_rows, self.plan.seed), idea)
        if idea.kind == "mlp":
            lessons = lessons.unweighted()
        return train(
            lessons,
            kind=idea.kind,
            settings=idea.settings,
            feature_settings=feature_settings(self.plan.config),
            provenance={},
        )


def _without(drafts: _Drafts, idea: _Idea) -> _Drafts:
    """The drafts, with all inputs set to 0 that the idea does not have."""
    of_draft, of_token = (
        np.array([name in kept for name in names], np.float32)
        for names, kept in ((FEATURE_NAMES, idea.features), (POSITION_FEATURES, idea.positions))
    )
    if not of_draft.all():
        drafts = replace(drafts, features=drafts.features * of_draft)
    if not of_token.all():
        drafts = replace(drafts, positions=drafts.positions * of_token)
        if isinstance(drafts, Lessons):
            drafts = replace(drafts, head=drafts.head * of_token)
    return drafts


if __name__ == "__main__":
    run(main)
