"""The requests that the drafter knows: from their prefill until SGLang has ended them.

The state of a request is found from SGLang's Req object, which is held weakly. SGLang ends requests
in ways that no hook announces (finished at prefill, aborted in chunked prefill, the prefix-warming
request of n > 1), and a rid may be used again.

All methods run on the scheduler's thread. The callback of the weak reference may run anywhere the
garbage collector does, even inside a metrics lock: it only appends to a deque.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR

from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.requests.bad_requests import end_request
from sglang_hvd.plugin.requests.control import RequestControl
from sglang_hvd.plugin.requests.marks import held_of, leave_figures, mark_held
from sglang_hvd.plugin.requests.recording import RequestRecorder
from sglang_hvd.plugin.requests.sampling import SamplingKind
from sglang_hvd.plugin.requests.served_figures import ServedFigures
from sglang_hvd.request_stats import RequestStats
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.suffix_cache import namespace_name
from sglang_hvd.types import SOURCES, DraftLimits, TokenIds

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Int64 = npt.NDArray[np.int64]


class Trait(IntFlag):
    """What a step has to know of a request, one bit each of the eight that a batch has room for.
    It stays as long as the request is held.

    SAMPLED: it does not decode greedily. NEEDS_OUTPUT: its verification needs its output.
    FIXED_SOURCES: it verifies the drafts of some source, whatever they gain.
    """

    SAMPLED = auto()
    BIASED = auto()
    PENALISED = auto()
    NEEDS_OUTPUT = auto()
    REPORTING = auto()
    FIXED_SOURCES = auto()


@dataclass(slots=True, eq=False)
class HeldRequest:
    """One request that the drafter knows.

    key: the drafter's name for it.
    num_prompt_tokens: tokens of the prompt, as the target model sees it.
    control: what it asked for.
    limits: what it may verify; None: what the policy of the server chooses.
    kind: how its tokens are sampled.
    output_ids: committed output tokens; None unless its kind needs them.
    prompt_ids: recorded when the request ends; None if nothing of it is recorded.
    cycles: the reports of its cycles so far; None unless they are reported.
    earlier: its counts from before it was started again (HeldRequests._hold).
    traits: bits of Trait, worked out once from the rest.
    """

    key: int
    rid: str
    req: weakref.ref[Req]
    num_prompt_tokens: int
    control: RequestControl
    limits: DraftLimits | None
    kind: SamplingKind
    output_ids: array[int] | None
    prompt_ids: TokenIds | None
    cycles: list[dict[str, Any]] | None
    earlier: RequestStats
    traits: int = field(init=False)

    def __post_init__(self) -> None:
        kind, limits = self.kind, self.limits
        has = {
            Trait.SAMPLED: not kind.is_greedy,
            Trait.BIASED: kind.has_logit_bias,
            Trait.PENALISED: kind.penalties is not None,
            Trait.NEEDS_OUTPUT: self.output_ids is not None,
            Trait.REPORTING: self.cycles is not None,
            Trait.FIXED_SOURCES: limits is not None and bool(limits.sources),
        }
        self.traits = sum(trait for trait, applies in has.items() if applies)


@dataclass(frozen=True, slots=True, eq=False)
class HeldBatch:
    """What the steps of an unchanged batch need of its requests, worked out once. Row i belongs to
    request i. Nobody writes into the arrays: a step may send them without a copy.

    keys: the drafter's names for them.
    slots: int64[num_requests]; see slots_of.
    sampled_rows: int64[num]; those that do not decode greedily.
    biased_rows: int64[num]; those with a logit bias.
    penalised_rows: int64[num]; those with penalties.
    output_rows: int64[num]; those whose verification needs their output.
    reporting_rows: int64[num]; those whose cycles are reported.
    may_run_ahead: no request has fixed sources or needs its output.
    """

    requests: Sequence[HeldRequest]
    keys: Sequence[int]
    slots: Int64
    sampled_rows: Int64
    biased_rows: Int64
    penalised_rows: Int64
    output_rows: Int64
    reporting_rows: Int64
    may_run_ahead: bool

    @classmethod
    def of(cls, requests: Sequence[HeldRequest], slots: Int64) -> HeldBatch:
        traits = np.array([held.traits for held in requests], np.uint8)

        def rows(trait: Trait) -> Int64:
            return np.flatnonzero(traits & trait.value)

        return cls(
            requests,
            tuple([held.key for held in requests]),
            slots,
            sampled_rows=rows(Trait.SAMPLED),
            biased_rows=rows(Trait.BIASED),
            penalised_rows=rows(Trait.PENALISED),
            output_rows=rows(Trait.NEEDS_OUTPUT),
            reporting_rows=rows(Trait.REPORTING),
            may_run_ahead=not len(rows(Trait.FIXED_SOURCES | Trait.NEEDS_OUTPUT)),
        )

    def __len__(self) -> int:
        return len(self.keys)


class HeldRequests:
    """The requests of one scheduler process, as the drafter knows them.

    vocab_size: number of logits of the target model. SGLang accepts larger token ids in a prompt,
        but a draft that holds one makes it read and write out of bounds.
    """

    def __init__(
        self,
        drafter: HybridDrafter,
        figures: ServedFigures,
        *,
        clock: StepClock,
        config: HvdConfig,
        recorder: RequestRecorder | None,
        vocab_size: int,
    ) -> None:
        self._drafter, self._figures, self._clock = drafter, figures, clock
        self._config = config
        self._recorder = recorder
        self._vocab_size = vocab_size
        self._held: dict[int, HeldRequest] = {}  # by key
        self._dead: deque[int] = deque()  # keys whose request is gone
        self._next_key = 0
        self._num_reporting = 0
        self.num_forgotten = 0  # so far
        # The last step's batch, by the ids of SGLang's objects. It is dropped when a request is
        # forgotten, and by a prefill, which may give a retracted request another slot.
        self._last_batch: tuple[list[int], HeldBatch] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, held: HeldRequest) -> bool:
        return held.key in self._held

    @property
    def report_cycles(self) -> bool:
        """Whether the cycles of all requests are reported, not only of those that ask for it."""
        return self._config.report_cycles

    @property
    def has_reporting(self) -> bool:
        """Whether the cycles of any of these requests are reported."""
        return self._num_reporting > 0

    def find(self, req: Req) -> HeldRequest | None:
        """The request as the drafter knows it; None for a request that it does not know."""
        held: HeldRequest | None = held_of(req)
        # A copy of a request carries the attribute along, but is another request.
        return held if held is not None and held.req() is req and held in self else None

    def of_rid(self, rid: str) -> list[HeldRequest]:
        """All requests of this name."""
        return [held for held in self._held.values() if held.rid == rid]

    def of_prefill(self, reqs: Sequence[Req]) -> list[HeldRequest | None]:
        """The requests of a prefill; None for a request that ends with it."""
        # Requests that end with their prefill never come to a step. If there are enough of them, no
        # step runs at all.
        self.drop_ended(reqs)
        self._last_batch = None
        # A request that is known to end here is not held, since its prompt may be long to index. A
        # request that comes back from a retraction is held: it has figures and output to keep.
        return [
            None
            if req.next_output_finishes_by_length() and self.find(req) is None
            else self._hold(req)
            for req in reqs
        ]

    def of_step(self, reqs: Sequence[Req], cached_lens: Int64 | None) -> HeldBatch:
        """The requests of a decode step, once every token before it is committed.

        cached_lens: int64[num_requests], tokens of each request in the KV cache, where the host
            knows them. The newest committed token is not among them.
        """
        with self._clock.measure(Phase.COMMIT):
            self.drop_ended(reqs)
            batch = self._last_of(reqs)
            if batch is None:
                batch = self._hold_all(reqs)
            if cached_lens is not None:
                others = np.flatnonzero(self._drafter.lengths(batch.keys) != cached_lens + 1)
                if len(others):
                    for row in map(int, others):
                        self._resync(reqs[row], int(cached_lens[row]) + 1)
                    batch = self._hold_all(reqs)
        return batch

    def _resync(self, req: Req, num_tokens: int) -> None:
        """Starts the request again from the tokens that SGLang has of it.

        num_tokens: tokens that it has in fact. Under overlap scheduling the Req lacks the latest.
            They are missing from the drafter's text, and counted all the same.
        """
        self._figures.count_resync()
        held = self._hold(req)
        num_missing = num_tokens - self._drafter.num_tokens(held.key)
        # Output stays right with drafts from wrong tokens, but not with penalties from wrong ones.
        if held.output_ids is not None and num_missing:
            message = "the server lost the latest tokens of this request: send it again"
            end_request(req, message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        self._drafter.count_missing(held.key, num_missing)

    def of_run(self, reqs: Sequence[Req]) -> HeldBatch | None:
        """The requests of a step that may run ahead; None if one of them is not known yet, verifies
        a draft whatever it gains, or needs its output for the verification."""
        with self._clock.measure(Phase.COMMIT):
            self.drop_ended(reqs)
            batch = self._last_of(reqs)
            if batch is None and all(self.find(req) is not None for req in reqs):
                batch = self._hold_all(reqs)
        return batch if batch is not None and batch.may_run_ahead else None

    def drop_ended(self, running: Sequence[Req] = ()) -> None:
        """Forgets requests that ended unannounced; every step does so too."""
        while self._dead:
            held = self._held.get(self._dead.popleft())
            if held is not None:
                self._release(held)
        if len(self._held) > len(running):
            for held in list(self._held.values()):
                req = held.req()
                # Not kept for the shared cache: when a request is found ended here depends on
                # the process, and every tensor-parallel rank must hold the same cache.
                if req is not None and (req.finished() or _is_given_up(req)):
                    self._release(held)

    def drop(self, req: Req) -> None:
        """Forgets a request that was aborted while it waited, perhaps after a retraction. A session
        may keep the Req object as it is."""
        held = self.find(req)
        if held is not None:
            self._release(held)

    def finish(self, req: Req, held: HeldRequest) -> None:
        """Ends a request: its output goes to the shared cache, its figures to its response."""
        with self._clock.measure(Phase.COMMIT):
            # output_ids may go on after a stop token or stop string; the shared cache must not
            # learn what follows.
            output_ids = np.asarray(req.output_ids_through_stop, dtype=np.int64)
            is_sound = not _met_nan(req) and bool(self._are_tokens(output_ids).all())
            is_kept = len(output_ids) > 0 and is_sound and held.control.learn
            is_shared = is_kept and held.control.share
            stats = self._drafter.finish(
                held.key,
                output_ids=output_ids.astype(np.int32) if is_shared else None,
                keep=is_shared,
            )
            leave_figures(req, _figures(held.earlier + stats, held.cycles))
            if self._recorder is not None and is_kept and held.prompt_ids is not None:
                namespace = _namespace(req, held.control)
                self._recorder.record(req, held.prompt_ids, namespace=namespace)
            self._forget(held)
        if not self._held:
            self._clock.end_step()  # nothing that follows belongs to it

    def as_sampled(self, ids: npt.NDArray[np.integer[Any]]) -> TokenIds:
        """Tokens that SGLang's sampler gave. Where it met NaN they may be any number, and SGLang
        ends the request; the drafter sees 0 there."""
        are_tokens = self._are_tokens(ids)
        if not are_tokens.all():
            ids = np.where(are_tokens, ids, 0)
        return ids.astype(np.int32, copy=False)

    def _are_tokens(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Whether the vocabulary holds each."""
        # A negative id is a large one without its sign.
        return ids.view(f"u{ids.itemsize}") < self._vocab_size

    def _last_of(self, reqs: Sequence[Req]) -> HeldBatch | None:
        """The batch of the last step, if it has these requests."""
        ids = list(map(id, reqs))  # no Python code runs for each request
        last = self._last_batch
        return last[1] if last is not None and last[0] == ids else None

    def _hold_all(self, reqs: Sequence[Req]) -> HeldBatch:
        """The batch of these requests. Those that are not known yet are held from now on."""
        held = [self.find(req) or self._hold(req) for req in reqs]
        batch = HeldBatch.of(held, slots_of(reqs))
        self._last_batch = list(map(id, reqs)), batch
        return batch

    def _hold(self, req: Req) -> HeldRequest:
        """Holds a request as SGLang has it now, and starts it in the drafter.

        A held request with the same number of tokens stays as it is: its prefill goes on, or it
        comes back from a retraction. One with another number is started again, and its counts so
        far stay in `earlier`. That is a resync, or a retraction that lost the latest tokens.
        """
        num_tokens = len(req.origin_input_ids) + len(req.output_ids)
        before = self.find(req)
        earlier = RequestStats()
        if before is not None:
            if self._drafter.num_tokens(before.key) == num_tokens:
                return before
            earlier = before.earlier + self._release(before)
        key = self._next_key
        self._next_key += 1
        # Placeholders of images are no vocabulary tokens: they must never be drafted.
        given_ids = np.asarray(req.origin_input_ids_unpadded, dtype=np.int64)
        # SGLang accepts any number as a token id; what no vocabulary holds must not be drafted.
        # Where embeddings are given, the ids say nothing.
        is_valid = req.input_embeds is None and bool(self._are_tokens(given_ids).all())
        prompt_ids = given_ids.astype(np.int32) if is_valid else np.empty(0, np.int32)
        control = RequestControl.of(req.sampling_params.custom_params, self._config)
        limits = control.limits(self._config)
        if not is_valid:
            limits = _without_cache(limits)
        cycles: list[dict[str, Any]] | None = None
        if self.report_cycles or control.report_cycles:
            cycles = [] if before is None else before.cycles
        is_recorded = is_valid and control.learn and self._recorder is not None
        kind = SamplingKind.of(req)
        held = HeldRequest(
            key=key,
            rid=req.rid,
            req=weakref.ref(req, lambda _: self._dead.append(key)),
            num_prompt_tokens=len(req.origin_input_ids),
            control=control,
            limits=limits,
            kind=kind,
            output_ids=req.output_ids[:] if kind.needs_output else None,
            prompt_ids=prompt_ids if is_recorded else None,
            cycles=cycles,
            earlier=earlier,
        )
        self._drafter.start(
            key,
            prompt_ids,
            # A namespace of its own has no text of other requests.
            namespace=_namespace(req, control) if control.share else f"own:{key}",
            limits=limits,
            learns=control.learn and control.share,
            num_prompt_tokens=len(req.origin_input_ids),
        )
        if req.output_ids:  # retracted before: it comes back as a prefill with its output
            output_ids = np.asarray(req.output_ids, dtype=np.int64)
            # These tokens are not counted twice.
            self._drafter.extend(key, self.as_sampled(output_ids), counts=before is None)
        self._held[key] = held
        self._num_reporting += cycles is not None
        mark_held(req, held)
        return held

    def _release(self, held: HeldRequest) -> RequestStats:
        stats = self._drafter.finish(held.key, output_ids=None, keep=False)
        self._forget(held)
        return stats

    def _forget(self, held: HeldRequest) -> None:
        del self._held[held.key]
        self._num_reporting -= held.cycles is not None
        self.num_forgotten += 1
        self._last_batch = None


def slots_of(reqs: Sequence[Req]) -> Int64:
    """The rows of the requests in SGLang's table of tokens."""
    return np.array([req.kv.req_pool_idx for req in reqs], np.int64)


def _is_given_up(req: Req) -> bool:
    """Whether SGLang found no memory for the request, even alone: it freed its KV cache, and will
    not come back to it."""
    return req.to_finish is not None and not req.kv.holds_kv


def _met_nan(req: Req) -> bool:
    """Whether SGLang ended the request because its sampler gave no token. SGLang then writes a
    token that ends a text in its place, if it knows one."""
    reason = req.finished_reason
    return isinstance(reason, FINISH_MATCHED_STR) and reason.matched == "NaN happened"


def _without_cache(limits: DraftLimits | None) -> DraftLimits:
    """The same limits for a request that cannot verify cache drafts: only the model drafter's."""
    limits = limits or DraftLimits()
    model = SOURCES.bit_of("model")
    sources = model if limits.sources is None else limits.sources & model
    return DraftLimits(sources, limits.max_tokens)


def _namespace(req: Req, control: RequestControl) -> str:
    return namespace_name(req.cache_salt or "", req.extra_key or "", control.namespace)


def _figures(stats: RequestStats, cycles: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What `meta_info["hvd"]` shows; plain numbers and strings."""
    figures: dict[str, Any] = dict(stats.figures())
    if cycles is not None:
        figures["cycles"] = cycles
    return figures
