"""Computes the figures of `sglang-hvd analyze` from a replay of recorded generations.

They say what makes recordings cache-friendly, when cache drafts pay off, and whether a predictor
knows (paper, sections 5.1 to 5.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from sglang_hvd.config import (
    DEFAULT_VERIFY_WIDTH,
    MARGINAL_LEN,
    PAPER_THRESHOLD,
    WORTH_LEN,
    CacheMode,
    HvdConfig,
)
from sglang_hvd.payoff import FEATURE_NAMES, AcceptancePredictor
from sglang_hvd.payoff.predictor import PAPER_PREDICTORS, predictor_file
from sglang_hvd.replay.core.recording_walk import RecordingWalk, evened, fingerprints_of
from sglang_hvd.replay.core.recordings import (
    Recording,
    TraceTokenizer,
    session_fingerprints,
    tell_trained_on,
)
from sglang_hvd.replay.core.totals import CycleTotals
from sglang_hvd.replay.core.training_rows import TrainingRows
from sglang_hvd.replay.core.walk import walk_recordings
from sglang_hvd.replay.report.analysis import (
    RECALLS,
    About,
    Analysis,
    Bin,
    Calibration,
    Payoffs,
    PrecisionRecall,
    Structure,
)
from sglang_hvd.replay.report.importance import permutation_importance
from sglang_hvd.replay.report.prompts import PromptCounts
from sglang_hvd.replay.training.evaluate import (
    judge,
    judged_by,
    judging_walks,
    nothing_to_judge,
    trained_sessions,
)
from sglang_hvd.replay.training.quality import payoff_quality, precision_at_recalls

LONGEST = DEFAULT_VERIFY_WIDTH - 1  # tokens of a cache draft

_PROB_EDGES = tuple(step / 10 for step in range(1, 10))
_LENGTH_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def analyze(
    traces: Path,
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    *,
    config: HvdConfig,
    num_processes: int,
) -> Analysis:
    """Replays the recordings twice: under the payoff policy, and token by token for what can be
    copied.

    config: how the suffix cache drafts, and which predictor to analyse. Without a predictor it is
        the one that ships.

    Raises ValueError, in one line, for traces or a predictor that cannot be used, or if no session
    is left to judge.
    """
    cache_mode = config.cache_mode
    predictors = {
        # Policy payoff accepts both kinds of predictors.
        "predictor": AcceptancePredictor.of_config(config.for_policy("payoff")),
        "mlp": AcceptancePredictor.load(PAPER_PREDICTORS[cache_mode]),
    }
    trained_on = trained_sessions(predictors)
    tell_trained_on(recordings, trained_on)
    settings = judging_walks(config, without=trained_on)
    on_policy = settings["cycle"]
    cycles, positions = (
        walk_recordings(
            recordings, tokenizer, settings[at], label=f"{at}s", num_processes=num_processes
        )
        for at in ("cycle", "position")
    )
    sessions = fingerprints_of(cycles)
    judged = sessions - trained_on
    about = About(
        traces=traces.resolve().name,
        files=tuple(walk.name for walk in cycles if fingerprints_of([walk]) - trained_on),
        num_sessions=len(judged),
        num_trained_sessions=len(sessions) - len(judged),
        tokenizer=tokenizer.fingerprint,
        cache_mode=cache_mode,
        policy=on_policy.config.policy,
        threshold=PAPER_THRESHOLD,
        num_model_accepted=int(on_policy.model_drafter.mean_accepted),
        predictor=predictor_file(config).name,
        predictor_fingerprint=predictors["predictor"].fingerprint,
    )
    return analyze_walks(
        about,
        [walk.excluding(trained_on) for walk in cycles],
        [walk.excluding(trained_on) for walk in positions],
        _count_prompts(recordings, tokenizer, trained_on),
        predictors,
    )


def analyze_walks(
    about: About,
    cycles: Sequence[RecordingWalk],
    positions: Sequence[RecordingWalk],
    prompts: Sequence[PromptCounts],
    predictors: Mapping[str, AcceptancePredictor],
) -> Analysis:
    """The figures of two walks of the same recordings. Every session in them is judged.

    prompts: in the order of the walks.
    predictors: "predictor" is the one that is analysed, the others are compared with it.

    Raises ValueError, in one line, if no cycle had a cache draft.
    """
    members: dict[str, list[int]] = {}
    for index, walk in enumerate(cycles):
        if walk.totals().num_cycles:
            members.setdefault(walk.family, []).append(index)
    members = {family: members[family] for family in sorted(members)}
    by_family = {family: _together(cycles, members[family]) for family in members}
    by_family_at = {"cycle": list(by_family.values())}
    by_family_at["position"] = [_together(positions, members[family]) for family in members]

    structure = []
    for family, indices in members.items():
        counted = [
            _Counted.of(cycles[index], positions[index], about.cache_mode) for index in indices
        ]
        of_family = PromptCounts.concatenate([prompts[index] for index in indices])
        structure.append(_structure(family, None, counted, of_family))
        structure += [
            _structure(family, cycles[index].name, [of_file], prompts[index])
            for index, of_file in zip(indices, counted, strict=True)
        ]

    rows_of = {
        family: rows
        for family, walk in by_family.items()
        if (rows := walk.judged_rows()) is not None
    }
    if not rows_of:
        raise nothing_to_judge(cycles)
    of_families = (walk.judged_rows() for walk in evened([*by_family.values()]))
    rows = TrainingRows.concatenate([part for part in of_families if part is not None])
    return Analysis(
        about,
        tuple(structure),
        tuple(payoffs_of(family, of_family) for family, of_family in rows_of.items()),
        tuple(
            evaluation
            for at, walks in by_family_at.items()
            for evaluation in judge(walks, predictors, cache_mode=about.cache_mode, at=at)
        ),
        _curves(rows, predictors),
        _calibrations(rows, predictors),
        permutation_importance(rows, predictors["predictor"]),
    )


def payoffs_of(family: str, rows: TrainingRows) -> Payoffs:
    """Accepted lengths of the drafts of a family, one per row."""
    accepted, verified = rows.accepted_lens, rows.accepted_lens[rows.is_verified]
    some = len(verified) > 0
    survival = _survival(rows)
    return Payoffs(
        family=family,
        num_drafts=len(accepted),
        mean_accepted=sum(survival),
        oracle_share=float((accepted >= WORTH_LEN).mean()),
        survival=(*survival, *[0.0] * LONGEST)[:LONGEST],
        num_verified=len(verified),
        verified_mean_accepted=sum(_survival(rows.select(rows.is_verified))) if some else None,
        verified_low_share=float((verified < MARGINAL_LEN).mean()) if some else None,
        verified_marginal_share=(
            float(((verified >= MARGINAL_LEN) & (verified < WORTH_LEN)).mean()) if some else None
        ),
        verified_high_share=float((verified >= WORTH_LEN).mean()) if some else None,
    )


def _survival(rows: TrainingRows) -> tuple[float, ...]:
    """Shares of the drafts with at least 1, 2, ... accepted tokens, up to the longest one.

    A draft that is right up to the end of a cut text counts only up to there (Kaplan and Meier,
    1958).
    """
    accepted = rows.accepted_lens
    whole_lens = rows.features[:, FEATURE_NAMES.index("draft_len")]
    ends_with_text = (accepted == rows.draft_lens) & (rows.draft_lens < whole_lens)
    shares: list[float] = []
    share = 1.0
    for length in range(1, int(accepted.max()) + 1):
        num_longer = np.count_nonzero(accepted >= length)
        num_ended = np.count_nonzero(~ends_with_text & (accepted == length - 1))
        share *= num_longer / (num_longer + num_ended)
        shares.append(share)
    return tuple(shares)


def reliability(
    predicted: npt.NDArray[np.float32],
    real: npt.NDArray[np.bool_] | npt.NDArray[np.int32],
    edges: Sequence[float],
) -> tuple[Bin, ...]:
    """Compares mean predictions with what was real, in groups of predictions between two edges.

    The first group has no lower limit and the last no upper limit. Groups without a draft are left
    out.
    """
    limits = [None, *edges, None]
    group_of = np.searchsorted(np.array(edges, np.float32), predicted, side="right")
    return tuple(
        Bin(
            limits[group],
            limits[group + 1],
            float(predicted[group_of == group].mean()),
            float(real[group_of == group].mean()),
            int(np.count_nonzero(group_of == group)),
        )
        for group in np.unique(group_of)
    )


def _together(walks: Sequence[RecordingWalk], indices: Sequence[int]) -> RecordingWalk:
    of_family = evened([walks[index] for index in indices])
    family, thinning = of_family[0].family, of_family[0].thinning
    sessions = tuple(session for walk in of_family for session in walk.sessions)
    return RecordingWalk(family, family, sessions, thinning)


@dataclass(frozen=True, slots=True)
class _Counted:
    """Counts of a file: its cycles, and the places (tokens) of its outputs.

    num_drafts: cycles that had a cache draft.
    num_copied: places where the draft's first token is right, by the draft's origin.
    num_copied_runs: places where the draft's first six tokens are right.

    The last two are estimates, not whole numbers, where a walk kept only a part of its rows.
    """

    totals: CycleTotals
    num_drafts: int
    num_places: int
    num_copied: Mapping[str, float]
    num_copied_runs: float

    @classmethod
    def of(
        cls, cycles: RecordingWalk, positions: RecordingWalk, cache_mode: CacheMode
    ) -> "_Counted":
        # The paper's cache does not distinguish the prompt from what the request generated.
        origins = ("prompt", "output", "finished") if cache_mode == "votes" else ("own", "finished")
        drafts = positions.rows()
        num_copied, num_copied_runs = dict.fromkeys(origins, 0.0), 0.0
        if drafts is not None:
            # How many drafts each row stands for.
            each = positions.num_drafts() / len(drafts)
            in_prompt, in_output = (
                drafts.features[:, FEATURE_NAMES.index(name)] > 0
                for name in ("in_prompt", "in_output")
            )
            is_from = {
                "prompt": in_prompt,
                "output": in_output,
                "own": in_prompt | in_output,
                "finished": ~(in_prompt | in_output),
            }
            is_right = drafts.accepted_lens >= 1
            num_copied = {
                origin: each * np.count_nonzero(is_right & is_from[origin]) for origin in origins
            }
            num_copied_runs = each * np.count_nonzero(drafts.accepted_lens >= WORTH_LEN)
        return cls(
            cycles.totals(),
            cycles.num_drafts(),
            positions.totals().num_cycles,
            num_copied,
            num_copied_runs,
        )


def _structure(
    family: str, file: str | None, counted: Sequence[_Counted], prompts: PromptCounts
) -> Structure:
    """Figures of one file, or of a family if `file` is None. counted: the file, or each of them."""
    totals = sum((one.totals for one in counted), CycleTotals())
    num_places = sum(one.num_places for one in counted)
    has_prompts, cache_share = len(prompts.prompt_lens) > 0, totals.cache_share
    assert cache_share is not None, "files without a cycle are left out"
    return Structure(
        family=family,
        file=file,
        num_requests=len(prompts.output_lens),
        prompt_tokens_median=float(np.median(prompts.prompt_lens)) if has_prompts else None,
        prompt_tokens_p90=float(np.quantile(prompts.prompt_lens, 0.9)) if has_prompts else None,
        output_tokens_median=float(np.median(prompts.output_lens)),
        repeated_share=prompts.repeated_share,
        class_shares=prompts.class_shares,
        copied_shares={
            origin: sum(one.num_copied[origin] for one in counted) / num_places
            for origin in counted[0].num_copied
        },
        copied_run_share=sum(one.num_copied_runs for one in counted) / num_places,
        proposed_share=sum(one.num_drafts for one in counted) / totals.num_cycles,
        cache_share=cache_share,
    )


def _curves(
    rows: TrainingRows, predictors: Mapping[str, AcceptancePredictor]
) -> tuple[PrecisionRecall, ...]:
    worth = rows.accepted_lens >= WORTH_LEN
    if not worth.any():
        return ()
    curves = []
    for name in (*predictors, "frequency"):
        judgement = judged_by(rows, predictors.get(name))
        quality = payoff_quality(judgement, threshold=PAPER_THRESHOLD)
        assert quality.average_precision is not None, "some drafts are worth verifying"
        curves.append(
            PrecisionRecall(
                name,
                quality.average_precision,
                quality.precision,
                quality.recall,
                precision_at_recalls(judgement.ranking, worth, RECALLS),
            )
        )
    return tuple(curves)


def _calibrations(
    rows: TrainingRows, predictors: Mapping[str, AcceptancePredictor]
) -> tuple[Calibration, ...]:
    worth = rows.accepted_lens >= WORTH_LEN
    probabilities, lengths = [], []
    for name in (*predictors, "frequency"):
        judgement = judged_by(rows, predictors.get(name))
        probs = judgement.probs
        if name == "frequency":
            logits = rows.features[:, FEATURE_NAMES.index(f"logit_prob_{WORTH_LEN}")]
            probs = (1 / (1 + np.exp(-logits))).astype(np.float32)
        if probs is not None:
            probabilities.append(
                Calibration(name, "probability", reliability(probs, worth, _PROB_EDGES))
            )
        bins = reliability(judgement.payoffs, rows.accepted_lens, _LENGTH_EDGES)
        lengths.append(Calibration(name, "length", bins))
    return (*probabilities, *lengths)


def _count_prompts(
    recordings: Sequence[Recording], tokenizer: TraceTokenizer, without: frozenset[str]
) -> list[PromptCounts]:
    counts = []
    for recording in tqdm(recordings, desc="prompts", unit="file", leave=False, disable=None):
        traces = recording.traces(tokenizer)
        fingerprints = session_fingerprints(traces)
        judged = [trace for trace in traces if fingerprints[trace.session] not in without]
        counts.append(PromptCounts.of_traces(judged, tokenizer.token_classes))
    return counts
