"""Time of a prediction, features included, compared with the paper's predictor in plain numpy.

    python -m benchmarks.payoff [--json FILE]

Rows {"name", "num_requests", "unit", "ours", "peer", "ratio", "target"}: ours and the peer run in
turn, and times are medians over the repeats; ratio is peer / ours. The peer only multiplies
matrices: its features are given. evidence is the extra time of a proposal that looks its evidence
up in the texts. total is evidence, features and prediction. served adds the online correction and
the prediction for the model drafter.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.command import parser_of, run, write_rows
from sglang_hvd.commands.arguments import add_json
from sglang_hvd.config import PAPER_THRESHOLD, HvdConfig
from sglang_hvd.payoff import (
    DEFAULT_PREDICTORS,
    AcceptancePredictor,
    DraftFeatures,
    ModelPredictor,
    OnlineCalibration,
    RequestTracker,
    TokenClasses,
)
from sglang_hvd.payoff.predictor import PAPER_PREDICTORS
from sglang_hvd.replay.training.tables import markdown_table
from sglang_hvd.suffix_cache import SuffixCache
from sglang_hvd.types import DraftBatch, TokenIds

_VOCAB_SIZE = 1000
_TARGETS = {1: 12.0, 64: 100.0}  # microseconds
_NUM_TOKENS = 31  # of a draft
_REPEATS = 200
_CALLS = 20  # per repeat


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("payoff", "Measure the time of a prediction.")
    add_json(parser)
    options = parser.parse_args(arguments)
    rows = [row for num_requests in _TARGETS for row in _measure(num_requests)]
    columns = {
        "name": "name",
        "num_requests": "requests",
        "ours": "ours, us",
        "spread": "spread",
        "peer": "numpy MLP, us",
        "ratio": "ratio",
        "target": "target, us",
    }
    print(markdown_table(columns, rows, digits=2))
    write_rows(options.json, rows)
    return 0


def _measure(num_requests: int) -> list[dict[str, object]]:
    cache, drafts = _drafts(num_requests)
    rids, limits = range(num_requests), np.full(num_requests, _NUM_TOKENS, np.int32)
    tracker = RequestTracker(
        HvdConfig().history_window,
        TokenClasses(np.arange(_VOCAB_SIZE, dtype=np.int64).astype(np.uint8)),
    )
    prompt = np.arange(200, dtype=np.int32)
    slots = np.array([tracker.start(prompt) for _ in range(num_requests)], np.int32)
    features = DraftFeatures.of_size(num_requests)
    predictor = AcceptancePredictor.load(DEFAULT_PREDICTORS["votes"])
    calibration = OnlineCalibration(PAPER_THRESHOLD)
    of_model = ModelPredictor(num_steps=8)
    for slot in slots.tolist():
        of_model.start(slot)
    none = np.zeros(num_requests, np.int32)
    three, unknown = np.array([3], np.int32), np.full(1, np.nan, np.float32)
    # The state after a while of serving: drafts were right, and predictions are corrected.
    for _ in range(20):
        tracker.write_features(features, slots, drafts, drafts)
        right = np.ascontiguousarray(drafts.token_ids[:num_requests, :8])
        tracker.commit(slots, right, np.full(num_requests, 8, np.int32), none)
        calibration.correct(slots[:1], drafts, predictor.predict(features.first(1)))
        calibration.observe(slots[:1], right[:1], three, three, drafts.num_nodes[:1], unknown)
    paper = AcceptancePredictor.load(PAPER_PREDICTORS["votes"])

    def propose() -> None:
        cache.propose_into(drafts, rids, limits)

    def propose_with_evidence() -> None:
        cache.propose_into(drafts, rids, limits, with_evidence=True)

    def write() -> None:
        tracker.write_features(features, slots, drafts, drafts)

    def predict() -> None:
        predictor.predict(features)

    def total() -> None:
        propose_with_evidence()
        write()
        predict()

    def served() -> None:
        propose_with_evidence()
        write()
        prediction = calibration.correct(slots, drafts, predictor.predict(features))
        of_model.predict(slots, drafts, prediction.acceptance)

    def peer() -> None:
        hidden = (features.features[:, : len(paper.mean)] - paper.mean) / paper.std
        for weight, bias in zip(paper.weights[:-1], paper.biases[:-1], strict=True):
            hidden = np.maximum(hidden @ weight.T + bias, 0)
        hidden @ paper.weights[-1].T + paper.biases[-1]

    write()
    times = _interleaved(
        {
            "propose": propose,
            "with_evidence": propose_with_evidence,
            "features": write,
            "predict": predict,
            "total": total,
            "served": served,
            "peer": peer,
        }
    )
    # Subtract the time of the proposal itself.
    for name, whole in (("evidence", "with_evidence"), ("total", "total"), ("served", "served")):
        times[name] = (np.array(times[whole]) - times["propose"]).tolist()
    of_peer = float(np.median(times["peer"]))
    rows = []
    for name in ("evidence", "features", "predict", "total", "served"):
        ours = float(np.median(times[name]))
        low, high = np.quantile(times[name], (0.1, 0.9))
        is_total = name == "total"
        rows.append(
            {
                "name": name,
                "num_requests": num_requests,
                "unit": "us",
                "ours": ours,
                "spread": f"{low:.2f}-{high:.2f}",
                "peer": of_peer if is_total else None,
                "ratio": of_peer / ours if is_total else None,
                "target": _TARGETS[num_requests] if is_total else None,
            }
        )
    return rows


def _interleaved(calls: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Microseconds per call, of each repeat."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            times[name].append(1e6 * (time.perf_counter() - start) / _CALLS)
    return times


def _drafts(num_requests: int) -> tuple[SuffixCache, DraftBatch]:
    """A cache, and its drafts."""
    random = np.random.default_rng(1)
    cache = SuffixCache(background=False)
    for rid in range(num_requests):
        text: TokenIds = random.integers(0, _VOCAB_SIZE, 300).astype(np.int32)
        cache.start("finished", text[:0])
        cache.commit(["finished"], [text])
        cache.finish("finished", keep=True)
        cache.start(rid, np.concatenate([text, text[:40]]))
    batch = DraftBatch.of_size(num_requests, _NUM_TOKENS)
    limits = np.full(num_requests, _NUM_TOKENS, np.int32)
    cache.propose_into(batch, range(num_requests), limits, with_evidence=True)
    assert (batch.num_nodes == _NUM_TOKENS).all()
    return cache, batch


if __name__ == "__main__":
    run(main)
