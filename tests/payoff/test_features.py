"""Features against their definitions, worked out again in Python."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hvd.payoff import (
    FEATURE_NAMES,
    PAPER_FEATURES,
    POSITION_FEATURES,
    DraftFeatures,
    RequestTracker,
    TokenClasses,
)
from sglang_hvd.payoff.features import MAX_DRAFT_LEN
from sglang_hvd.payoff.token_classes import TokenClass
from sglang_hvd.suffix_cache.token_ids import padded
from sglang_hvd.types import EVIDENCE, EVIDENCE_DEPTH, MATCH_COLUMNS, DraftBatch

STRINGS = ["a", " b", ",", "(", "\n", "7", " ", '":']
CLASSES = TokenClasses.from_strings(STRINGS)
CLASS_NAMES = [c.name.lower() for c in TokenClass if c.name]
WINDOW = 4
MARKS = {
    "line_break": TokenClass.LINE_BREAK,
    "punctuation": TokenClass.PUNCTUATION,
    "structure": TokenClass.BRACKET | TokenClass.DELIMITER,
    "digit": TokenClass.DIGIT,
}


# The bounds of a log odds as float32 has them: next to 1 its steps are .6 % of what is left.
LEAST, MOST = float(np.float32(1e-5)), float(np.float32(1) - np.float32(1e-5))


def logit(prob: float) -> float:
    prob = min(max(prob, LEAST), MOST)
    return math.log(prob / (1 - prob))


def is_in(token_id: int, c: TokenClass) -> float:
    return float(0 <= token_id < len(STRINGS) and bool(CLASSES.flags[token_id] & c))


class Outcomes:
    """How often drafts had tokens right: one namespace in a table of them."""

    def __init__(
        self, num_entries: int, entries: dict[int, tuple[int, int, int]], space: str | None = None
    ) -> None:
        self.num_entries = num_entries
        self.scope = 0 if space is None else 0xCBF29CE484222325
        for byte in (space or "").encode():
            self.scope = (self.scope ^ byte) * 0x100000001B3 % 2**64
        if space is not None:
            self.scope = (self.scope ^ self.scope >> 32) * 0xD6E8FEB86659FD93 % 2**64
            self.scope ^= self.scope >> 32
        self.entries = entries  # tag, right, wrong

    def place(self, before: int, token: int) -> tuple[int, int]:
        h = (before % 2**32 << 32 | token % 2**32) ^ self.scope
        h = (h ^ h >> 32) * 0x9E3779B97F4A7C15 % 2**64
        h = (h ^ h >> 29) * 0xC2B2AE3D27D4EB4F % 2**64
        return (h >> 16) % self.num_entries, h >> 48

    def add(self, before: int, token: int, *, is_right: bool) -> None:
        for place, tag in (self.place(-2, token), self.place(before, token)):
            there, right, wrong = self.entries.get(place, (0, 0, 0))
            if there != tag and right + wrong > 1:
                weaker = (right - 1, wrong) if right >= wrong else (right, wrong - 1)
                self.entries[place] = there, *weaker
                continue
            if there != tag:
                right = wrong = 0
            if right + wrong == 255:
                right, wrong = right // 2, wrong // 2
            self.entries[place] = tag, right + is_right, wrong + (not is_right)

    def prob(self, before: int, token: int) -> float:
        prob = 0.75
        for weight, (place, tag) in ((3, self.place(-2, token)), (2, self.place(before, token))):
            there, right, wrong = self.entries.get(place, (0, 0, 0))
            if there == tag:
                prob = (right + weight * prob) / (right + wrong + weight)
        return min(max(prob, 0.01), 0.99)


class Request:
    """What the definitions say of one request, from its whole history."""

    def __init__(self, prompt: Sequence[int], of_all: Outcomes) -> None:
        self.prompt = list(prompt)
        self.outcomes, self.of_all = Outcomes(2**10, {}), of_all
        self.output: list[int] = []
        # per cycle: draft, committed tokens, accepted tokens of a verified cache draft; of a part
        # that was accepted whole, nothing is told
        self.cycles: list[tuple[list[int], list[int], int | None]] = []
        self.expected: int | None = None

    def commit(self, draft: list[int], place: int, tokens: list[int], num_verified: int) -> int:
        """Returns the accepted tokens of what was verified of the draft; -1 without any."""
        agreed = agreeing(draft, tokens)
        accepted = min(agreed, num_verified)
        chain = [self.latest, *draft]
        for i in range(min(agreed + 1, len(draft), len(tokens))):
            for outcomes in (self.outcomes, self.of_all):
                outcomes.add(chain[i], draft[i], is_right=i < agreed)
        if draft and place >= 0 and agreed > 0:
            self.expected = place + len(tokens)
        elif self.expected is not None:
            self.expected += len(tokens)
        is_told = num_verified > 0 and (accepted < num_verified or num_verified == len(draft))
        self.cycles.append((draft, tokens, accepted if is_told else None))
        self.output += tokens
        return accepted if num_verified else -1

    @property
    def latest(self) -> int:
        return [-1, *self.prompt, *self.output][-1]

    def probs_right(self, draft: Sequence[int], outcomes: Outcomes) -> list[float]:
        chain = [self.latest, *draft]
        return [outcomes.prob(*pair) for pair in itertools.pairwise(chain[:7])]

    def features(self, draft: "Draft", votes: "Draft", place: int) -> dict[str, float]:
        num = len(draft.tokens)
        match, of_votes = draft.match, votes.match
        recent = self.cycles[-WINDOW:]
        verified = [accepted for _, _, accepted in recent if accepted is not None]
        told = [(d, tokens) for d, tokens, _ in self.cycles if tokens]  # the others say nothing
        agreed = [(agreeing(d, tokens), len(tokens)) for d, tokens in told][::-1]
        values = {
            "score": match["score"],
            "match_len": match["match_len"],
            "draft_len": num,
            "log_prompt_len": math.log1p(len(self.prompt)),
            "log_generated_len": math.log1p(len(self.output)),
            "relative_position": len(self.output) / max(1, len(self.prompt) + len(self.output)),
            "recent_cache_rate": len(verified) / len(recent) if recent else 0,
            "recent_mean_accepted": sum(verified) / len(verified) if verified else 0,
            "recent_last_accepted": verified[-1] if verified else 0,
            "score_6": sum(draft.probs[:6]),
        }
        for c, name in zip(TokenClass, CLASS_NAMES[:5], strict=False):
            values[name] = sum(is_in(token, c) for token in draft.tokens) / num
        for depth in (1, 2, 3, 4, 6, 8, 12, 16, 24):
            values[f"logit_prob_{depth}"] = logit(draft.prob(depth))
        for depth in (1, 3, 10, 16):
            values[f"votes_logit_prob_{depth}"] = logit(votes.prob(depth))
        for prefix, m in (("", match), ("votes_", of_votes)):
            values |= {
                f"{prefix}in_prompt": m["origin"] == 0,
                f"{prefix}in_output": m["origin"] == 1,
                f"{prefix}log_match_len": math.log1p(m["match_len"]),
                f"{prefix}log_age": math.log1p(m["age"]),
                f"{prefix}log_occurrences": math.log1p(m["num_occurrences"]),
                f"{prefix}log_agreeing": math.log1p(m["num_agreeing"]),
                f"{prefix}share_agreeing": m["num_agreeing"] / max(1, m["num_occurrences"]),
                f"{prefix}agreement": m["agreement"],
                f"{prefix}mean_agreement": m["mean_agreement"],
            }
        common = agreeing(draft.tokens, votes.tokens)
        values |= {
            "votes_log_agreeing_len": math.log1p(common),
            "votes_agreeing_share": common / num,
            "votes_is_same": common == num,
            "votes_logit_agreed": logit(votes.prob(common) if common else 0),
            "votes_logit_agreed_6": logit(votes.prob(6) if common >= 6 else 0),
            "votes_score_agreed": sum(votes.probs[:common]),
            "votes_score": of_votes["score"],
        }
        for back in range(4):
            had, tokens = agreed[back] if back < len(agreed) else (0, 0)
            values[f"agreed_share_{back + 1}"] = had / tokens if tokens else 0
            if back < 2:
                values[f"agreed_{back + 1}"], values[f"committed_{back + 1}"] = had, tokens
        for half_life in (4, 16, 64, 256):
            had = committed = 0.0
            for a, n in agreed[::-1]:
                kept = 2 ** (-n / half_life)
                had, committed = had * kept + a, committed * kept + n
            values[f"moving_share_{half_life}"] = had / committed if committed else 0
        num_committed = sum(n for _, n in agreed)
        values["agreed_share"] = sum(a for a, _ in agreed) / num_committed if num_committed else 0
        values["log_committed"] = math.log1p(num_committed)
        run = 0
        for d, tokens in told[::-1]:
            if not d or agreeing(d, tokens) < min(len(d), len(tokens)):
                break
            run += len(tokens)
        values["log_run"] = math.log1p(run)
        is_known = place >= 0 and self.expected is not None
        shift = place - (self.expected or 0) if is_known else 0
        values |= {
            "is_place_known": is_known,
            "is_place_same": is_known and shift == 0,
            "is_place_near": is_known and abs(shift) <= 3,
            "is_place_ahead": 0 < shift < 64,
            "is_place_behind": -64 < shift < 0,
            "place_shift": math.copysign(math.log1p(abs(shift)), shift),
        }
        values |= {name: votes.evidence[name] for name in ("aligned", "in_common")}
        for whose, outcomes in (("own_", self.outcomes), ("", self.of_all)):
            probs = self.probs_right(draft.tokens, outcomes)
            for most in (1, 3, 6):
                values[f"{whose}logit_right_{most}"] = logit(math.prod(probs[:most]))
            values[f"{whose}logit_right_least"] = logit(min(probs))
        values |= self.line_features(draft)
        for depth in range(1, EVIDENCE_DEPTH + 1):
            values[f"logit_other_{depth}"] = logit(votes.evidence[f"other_{depth}"])
            values[f"log_others_{depth}"] = math.log1p(votes.evidence[f"num_others_{depth}"])
        text = [-1, -1, *self.prompt, *self.output]
        tokens = [*text[-2:], *[*draft.tokens, -1, -1][:3]]
        places = ("before_2", "before_1", "token_1", "token_2", "token_3")
        for place_name, token in zip(places, tokens, strict=True):
            for c, name in zip(TokenClass, CLASS_NAMES, strict=True):
                values[f"{place_name}_{name}"] = is_in(token, c)
        return {name: float(value) for name, value in values.items()}

    def line_features(self, draft: "Draft") -> dict[str, float]:
        """Where in its line the draft begins, what the output was like, where the draft changes."""
        text, values = [*self.prompt, *self.output], dict[str, float]()
        for name, mark in MARKS.items():
            values[f"log_first_{name}"] = math.log1p(num_before(draft.tokens, mark, 128))
            if name != "digit":
                values[f"log_since_{name}"] = math.log1p(num_before(text[::-1], mark, len(text)))
        beyond = draft.match["match_len"] - num_before(text[::-1], TokenClass.LINE_BREAK, len(text))
        latest = self.output[-64:]
        for c, name in zip(TokenClass, CLASS_NAMES, strict=True):
            values[f"latest_{name}"] = sum(is_in(token, c) for token in latest) / max(
                1, len(latest)
            )
        return values | {
            "covers_line": beyond >= 0,
            "exceeds_line": beyond > 0,
            "log_beyond_line": math.log1p(max(0, beyond)),
        }


def num_before(tokens: Sequence[int], mark: TokenClass, otherwise: int) -> int:
    """Tokens before the first one that is in one of the classes."""
    return next((i for i, token in enumerate(tokens) if is_in(token, mark)), otherwise)


class Draft:
    def __init__(
        self,
        random: np.random.Generator,
        text_len: int,
        most: int,
        num_tokens: int = len(STRINGS) + 1,
    ) -> None:
        self.tokens = random.integers(0, num_tokens, random.integers(0, most + 1)).tolist()
        # Long drafts stay above what is told apart from 0.
        steps = random.uniform(0.3 if len(self.tokens) <= 20 else 0.8, 1, len(self.tokens))
        if random.random() < 0.1:
            steps[:1] = 1 - 3e-6  # above the upper bound of log odds
        self.probs = np.cumprod(steps).astype(np.float32).tolist()
        num_occurrences = int(random.integers(1, 20))
        self.match = {
            "match_len": float(random.integers(1, 32)),
            "score": float(np.float32(sum(self.probs))),
            "num_tokens": float(len(self.tokens)),
            "origin": float(random.integers(0, 3)),
            "age": float(random.integers(0, max(1, text_len))),
            "num_occurrences": float(num_occurrences),
            "num_agreeing": float(random.integers(1, num_occurrences + 1)),
            "agreement": float(np.float32(random.random())),
            "mean_agreement": float(np.float32(random.random())),
        }
        self.evidence = dict.fromkeys(EVIDENCE, 0.0)
        for depth in range(1, min(len(self.tokens), EVIDENCE_DEPTH) + 1):
            num_seen = int(random.integers(0, 3))
            self.evidence[f"num_seen_{depth}"] = num_seen
            self.evidence[f"num_followed_{depth}"] = int(random.integers(0, num_seen + 1))
            self.evidence[f"age_{depth}"] = float(random.choice([0, 7, 900, 65536]))
        for depth in range(1, EVIDENCE_DEPTH + 1):
            num_others = int(random.integers(0, 3))
            self.evidence[f"num_others_{depth}"] = num_others
            self.evidence[f"other_{depth}"] = float(np.float32(random.random())) * (num_others > 0)
        for name in ("aligned", "in_common"):
            self.evidence[name] = float(random.integers(0, 33)) / 32

    def prob(self, depth: int) -> float:
        return float(self.probs[depth - 1]) if depth <= len(self.probs) else 0.0

    def place(self, text_len: int) -> int:
        if not self.tokens or self.match["origin"] == 2:
            return -1
        return max(-1, text_len - 1 - int(self.match["age"]))


def most_of(random: np.random.Generator) -> int:
    """Most tokens of a draft: mostly few, else up to all."""
    return 20 if random.random() < 0.7 else MAX_DRAFT_LEN


def agreeing(draft: Sequence[int], tokens: Sequence[int]) -> int:
    same = [a == b for a, b in zip(draft, tokens, strict=False)]
    return same.index(False) if False in same else len(same)


def batch_of(drafts: Sequence[Draft], width: int = 70) -> DraftBatch:
    batch = DraftBatch.of_size(len(drafts), width)
    for row, draft in enumerate(drafts):
        num = len(draft.tokens)
        batch.token_ids[row, :num] = draft.tokens
        batch.probs[row, :num] = draft.probs
        batch.num_nodes[row] = num
        batch.matches[row] = [draft.match[name] for name in MATCH_COLUMNS]
        batch.evidence[row] = [draft.evidence[name] for name in EVIDENCE]
    return batch


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_values_are_those_of_the_definitions(seed: int, num_requests: int, num_cycles: int) -> None:
    check_values(np.random.default_rng(seed), num_requests, num_cycles)


def test_values_after_so_many_tokens_that_tables_are_full() -> None:
    check_values(np.random.default_rng(3), num_requests=2, num_cycles=400, num_tokens=2000)
    check_values(np.random.default_rng(4), num_requests=1, num_cycles=400, num_tokens=2)


def check_values(
    random: np.random.Generator, num_requests: int, num_cycles: int, num_tokens: int = 9
) -> None:
    tracker = RequestTracker(WINDOW, CLASSES)
    entries: dict[int, tuple[int, int, int]] = {}
    spaces = {space: Outcomes(2**18, entries, space) for space in ("", "a", "\u00e9")}
    spaces_of = random.choice(list(spaces), num_requests).tolist()
    requests = [
        Request(random.integers(0, len(STRINGS), random.integers(0, 5)).tolist(), spaces[space])
        for space in spaces_of
    ]
    slots = np.array(
        [
            tracker.start(np.array(request.prompt, np.int32), namespace=space)
            for request, space in zip(requests, spaces_of, strict=True)
        ],
        np.int32,
    )
    assert len(set(slots.tolist())) == num_requests
    for request, slot in zip(requests, slots.tolist(), strict=True):
        first = random.integers(0, len(STRINGS), random.integers(0, 3)).astype(np.int32)
        tracker.extend(slot, first)
        request.output += first.tolist()
    out = DraftFeatures.of_size(num_requests)
    for _ in range(num_cycles):
        lengths = [len(r.prompt) + len(r.output) for r in requests]
        drafts = [Draft(random, length, most_of(random), num_tokens) for length in lengths]
        votes = [Draft(random, length, most_of(random), num_tokens) for length in lengths]
        for draft, second in zip(drafts, votes, strict=True):
            common = int(random.integers(0, min(len(draft.tokens), len(second.tokens)) + 1))
            second.tokens[:common] = draft.tokens[:common]
        batch, second_batch = batch_of(drafts), batch_of(votes)
        if random.random() < 0.5:  # the votes made the drafts
            votes, second_batch = drafts, batch
        out.positions[:] = np.nan  # nothing is left from before
        tracker.write_features(out, slots, batch, second_batch)
        committed, verified_lens, cycles = [], [], []
        for row, (request, draft, second) in enumerate(zip(requests, drafts, votes, strict=True)):
            place = second.place(lengths[row]) if draft.tokens else -1
            assert out.draft_lens[row] == len(draft.tokens)
            if draft.tokens:
                wanted = request.features(draft, second, place)
                got = dict(zip(FEATURE_NAMES, out.features[row].tolist(), strict=True))
                assert set(wanted) == set(got)
                for name, value in wanted.items():
                    assert got[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
                check_positions(out.positions[row], request, draft, second)
            num_right = int(random.integers(0, len(draft.tokens) + 1))
            num_verified = 0
            if draft.tokens and random.random() < 0.5:
                whole = len(draft.tokens)
                num_verified = (
                    whole if random.random() < 0.5 else int(random.integers(1, whole + 1))
                )
            wrong = random.integers(0, len(STRINGS), 1).tolist()
            tokens = [*draft.tokens[:num_right], *wrong] if random.random() < 0.9 else []
            cycles.append((draft.tokens, place, tokens, num_verified))
            committed.append(tokens)
            verified_lens.append(num_verified)
        accepted = tracker.commit(slots, *padded(committed), np.array(verified_lens, np.int32))
        of_cycles = [
            request.commit(*cycle) for request, cycle in zip(requests, cycles, strict=True)
        ]
        assert accepted.tolist() == of_cycles


def check_positions(got: np.ndarray, request: Request, draft: Draft, votes: Draft) -> None:
    common = agreeing(draft.tokens, votes.tokens)
    before = ([-1, *request.prompt, *request.output])[-1]
    for j, token in enumerate(draft.tokens):
        row = dict(zip(POSITION_FEATURES, got[:, j].tolist(), strict=True))
        step = draft.probs[j] / (draft.probs[j - 1] if j else 1)
        second = votes.probs[j] / (votes.probs[j - 1] if j else 1) if j < common else 0
        for name, prob in (("logit_next", step), ("votes_logit_next", second)):
            wanted = min(max(logit(prob), -6), 6) / 4
            assert row[name] == pytest.approx(wanted, rel=1e-3, abs=1e-3), name
        follows = age = 0.0
        if j < EVIDENCE_DEPTH:
            age = math.log1p(draft.evidence[f"age_{j + 1}"]) / 10
            did = draft.evidence[f"num_followed_{j + 1}"]
            did_not = draft.evidence[f"num_seen_{j + 1}"] - did
            follows = math.log((did + 0.3) / (did_not + 0.3)) / 4
        assert row["log_token_age"] == pytest.approx(age, rel=1e-5)
        assert row["logit_follows"] == pytest.approx(follows, abs=1e-6)
        for c, name in zip(TokenClass, CLASS_NAMES, strict=True):
            assert row[name] == is_in(token, c)
            assert row[f"predecessor_{name}"] == is_in(before, c)
        before = token


@pytest.mark.parametrize("teaches", [True, False])
def test_requests_teach_those_of_their_namespace_alone(teaches: bool) -> None:
    random = np.random.default_rng(1)
    tracker, out = RequestTracker(WINDOW, CLASSES), DraftFeatures.of_size(4)
    prompt = np.arange(3, dtype=np.int32)
    spaces = ["5:user1", "5:user1", "5:user2", "user15:"]  # the first one may teach
    slots = np.array(
        [
            tracker.start(prompt, namespace=space, teaches=teaches and row == 0)
            for row, space in enumerate(spaces)
        ],
        np.int32,
    )
    own, of_all = (FEATURE_NAMES.index(f"{whose}logit_right_6") for whose in ("own_", ""))
    unknown, none = logit(0.75**6), np.zeros(4, np.int32)
    num_taught = 0
    for _ in range(300):
        tokens = random.integers(0, 50_000, 6).astype(np.int32)
        draft = Draft(random, 3, 0)
        draft.tokens, draft.probs = tokens.tolist(), [0.5] * 6
        batch = batch_of([draft] * 4)
        for _ in range(2):  # the second time the first request was right about all of it
            tracker.write_features(out, slots, batch, batch)
            tracker.commit(slots[:1], tokens[None], np.array([6], np.int32), none[:1])
            tracker.commit(slots[1:], *padded([[]] * 3), none[1:])
        right = out.features[:, of_all]
        assert right[2:] == pytest.approx([unknown] * 2, rel=1e-5)
        num_taught += bool(right[1] > unknown + 0.5)
        assert out.features[0, own] > unknown
    assert num_taught == (300 if teaches else 0)


def test_the_names_and_their_order_are_fixed() -> None:
    # Predictor files state them: a change here makes every trained predictor useless.
    assert (
        PAPER_FEATURES
        == FEATURE_NAMES[:14]
        == (
            "score",
            "match_len",
            "draft_len",
            "log_prompt_len",
            "log_generated_len",
            "relative_position",
            "recent_cache_rate",
            "recent_mean_accepted",
            "recent_last_accepted",
            "whitespace",
            "punctuation",
            "line_break",
            "bracket",
            "delimiter",
        )
    )
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES)


def test_a_request_without_prompt_or_output_has_finite_features() -> None:
    tracker = RequestTracker(WINDOW, CLASSES)
    slot = tracker.start(np.zeros(0, np.int32))
    out = DraftFeatures.of_size(1)
    random = np.random.default_rng(1)
    draft = next(d for d in (Draft(random, 0, 64) for _ in range(99)) if d.tokens)
    tracker.write_features(out, np.array([slot], np.int32), batch_of([draft]), batch_of([draft]))
    assert np.isfinite(out.features).all()
    assert np.isfinite(out.positions).all()


def test_a_row_does_not_depend_on_the_batch() -> None:
    random = np.random.default_rng(5)
    drafts = [Draft(random, 40, 64) for _ in range(20)]
    together, alone = RequestTracker(WINDOW, CLASSES), RequestTracker(WINDOW, CLASSES)
    prompt = np.arange(40, dtype=np.int32) % 8
    slots = np.array([together.start(prompt) for _ in drafts], np.int32)
    whole = DraftFeatures.of_size(len(drafts))
    together.write_features(whole, slots, batch_of(drafts), batch_of(drafts[::-1]))
    for row, (draft, second) in enumerate(zip(drafts, drafts[::-1], strict=True)):
        if not draft.tokens:
            continue
        one = DraftFeatures.of_size(1)
        slot = np.array([alone.start(prompt)], np.int32)
        alone.write_features(one, slot, batch_of([draft]), batch_of([second]))
        assert (one.features[0] == whole.features[row]).all()
        num = len(draft.tokens)
        assert (one.positions[0, :, :num] == whole.positions[row, :, :num]).all()


def test_drafts_beyond_the_depth_that_counts_are_cut() -> None:
    random = np.random.default_rng(2)
    long = next(d for d in (Draft(random, 9, 69) for _ in range(999)) if len(d.tokens) == 69)
    tracker, out = RequestTracker(WINDOW, CLASSES), DraftFeatures.of_size(1)
    slots = np.array([tracker.start(np.zeros(9, np.int32))], np.int32)
    tracker.write_features(out, slots, batch_of([long]), batch_of([long]))
    assert out.draft_lens.tolist() == [64]
    cut, of_cut = batch_of([long]), DraftFeatures.of_size(1)
    cut.num_nodes[:] = 64
    tracker.write_features(of_cut, slots, cut, cut)
    assert of_cut.features.tobytes() == out.features.tobytes()
    assert of_cut.positions.tobytes() == out.positions.tobytes()
    assert out.features[0, FEATURE_NAMES.index("draft_len")] == 64


def test_slots_and_arrays_that_do_not_fit_are_refused() -> None:
    tracker, out = RequestTracker(WINDOW, CLASSES), DraftFeatures.of_size(1)
    slot = tracker.start(np.zeros(3, np.int32))
    tracker.finish(slot)
    batch = batch_of([Draft(np.random.default_rng(1), 9, 5)])
    for bad in (slot, -1, 7):
        slots = np.array([bad], np.int32)
        with pytest.raises(ValueError, match="belongs to no active request"):
            tracker.write_features(out, slots, batch, batch)
        with pytest.raises(ValueError, match="belongs to no active request"):
            tracker.commit(slots, *padded([[1]]), np.zeros(1, np.int32))
        with pytest.raises(ValueError, match="belongs to no active request"):
            tracker.finish(bad)
    slots = np.array([tracker.start(np.zeros(3, np.int32))] * 2, np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        tracker.write_features(out, slots, batch, batch)
    narrow = replace(batch, evidence=batch.evidence[:, 1:].copy())
    with pytest.raises(ValueError, match="do not fit"):
        tracker.write_features(out, slots[:1], narrow, batch)
    with pytest.raises(ValueError, match="at least 1"):
        RequestTracker(0, CLASSES)


@pytest.mark.parametrize(("num_verified", "remembered"), [(125, 100), (100, 0), (80, 0)])
def test_the_history_knows_drafts_longer_than_the_tokens_that_count(
    num_verified: int, remembered: int
) -> None:
    tracker, out = RequestTracker(WINDOW, CLASSES), DraftFeatures.of_size(1)
    slots = np.array([tracker.start(np.arange(3, dtype=np.int32))], np.int32)
    batch = DraftBatch.of_size(1, 125)
    batch.token_ids[:], batch.probs[:], batch.num_nodes[:] = 1, 0.5, 125
    tracker.write_features(out, slots, batch, batch)
    committed = np.array([[1] * 100 + [2]], np.int32)
    verified_lens = np.array([num_verified], np.int32)
    accepted = tracker.commit(slots, committed, np.array([101], np.int32), verified_lens)
    assert accepted.tolist() == [min(100, num_verified)]
    tracker.write_features(out, slots, batch, batch)
    assert out.features[0, FEATURE_NAMES.index("recent_last_accepted")] == remembered
    # Of a part that was accepted whole nothing is told.
    is_told = out.features[0, FEATURE_NAMES.index("recent_cache_rate")] > 0
    assert is_told == (remembered > 0)
