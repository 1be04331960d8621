"""Which tokens the drafter knows of each SGLang request, and when it lets go of them.

Tokens reach the drafter from the worker's own results, because under overlap scheduling
`req.output_ids` lacks the tokens of the last launched step. State hangs on the Req object, which
is held weakly: SGLang ends requests in ways that no hook announces (finished at prefill, aborted
in chunked prefill, the prefix-warming request of n > 1), and a rid may be used again.

Thread rule: all methods run on the scheduler's thread. The callback of the weak reference may run
anywhere the garbage collector does, even inside a metrics lock: it only appends to a deque.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR

from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.device.host_transfer import HostCopy
from sglang_hvd.plugin.requests.marks import held_of, leave_figures, mark_held
from sglang_hvd.plugin.requests.recording import RequestRecorder
from sglang_hvd.plugin.requests.sampling import has_penalties
from sglang_hvd.request_stats import RequestStats
from sglang_hvd.step_clock import Phase, StepClock
from sglang_hvd.types import SOURCES, DraftPlans, TokenIds, VerifyOutcomes

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hvd.plugin.requests.metrics import ServerMetrics


@dataclass(slots=True, eq=False)
class _Held:
    """One request the drafter knows.

    num_tokens counts prompt and committed output tokens. model_only: it never verifies a
    cache draft. prompt_ids is there to be recorded; None:
    nothing is recorded of this request. earlier has what it brought before it was started anew.
    """

    key: int
    rid: str
    req: weakref.ref[Req]
    num_tokens: int
    model_only: bool
    prompt_ids: TokenIds | None
    source: str = "plain"
    cycles: list[tuple[str, int]] = field(default_factory=list)
    earlier: RequestStats = RequestStats()  # noqa: RUF009  it is immutable


@dataclass(slots=True)
class _Launched:
    """A step whose tokens are still on their way to the host.

    Each request's row of token_ids is `stride` wide. A prefill commits one token per request.
    is_planned: its cycles are, or it has none. is_plain: it has no drafts, and commits one token of
    each request.
    """

    held: list[_Held | None]
    copy: HostCopy
    stride: int
    is_prefill: bool
    is_planned: bool = True
    is_plain: bool = False


class HeldRequests:
    """The requests of one scheduler process, as the drafter sees them."""

    def __init__(
        self,
        drafter: HybridDrafter,
        *,
        stream: torch.cuda.Stream | None,
        metrics: ServerMetrics | None,
        clock: StepClock,
        report_cycles: bool,
        recorder: RequestRecorder | None,
        vocab_size: int,
    ) -> None:
        """
        vocab_size: logits of the target model per token. SGLang embeds what a request names beyond
            it, and reads and writes beyond them where a draft names it.
        """
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._clock = clock
        self._stream = stream
        self._metrics = metrics
        self._report_cycles = report_cycles
        self._recorder = recorder
        self._held: dict[int, _Held] = {}  # by key
        self._dead: deque[int] = deque()  # keys whose request is gone
        # The latest step, and the one before it where that ran ahead of its tokens.
        self._launched: deque[_Launched] = deque()
        self._is_ahead = False  # the step that is launched next
        self._was_plain = False  # the latest verification
        self._wants_drafts = False  # what steps that ran ahead have found
        self._num_context = 0
        self._next_key = 0
        self._num_resyncs = 0
        self._num_steps_ahead = 0
        self._num_cycles = dict.fromkeys(SOURCES.labels, 0)
        self._num_accepted_drafts = dict.fromkeys(SOURCES.labels, 0)

    def __len__(self) -> int:
        return len(self._held)

    def record_prefill(
        self, reqs: Sequence[Req], chunked_req: Req | None, next_token_ids: torch.Tensor
    ) -> None:
        """Take note of a prefill: its requests start, and each commits one token.

        Args:
            next_token_ids: int[num_requests] on the device; the entry of `chunked_req`, whose
                prompt goes on in the next prefill, is no token of the output.
        """
        self._settle()
        # Requests that end with their prefill never come to a step, and with enough of them nothing
        # else does.
        self.drop_ended(reqs)
        # Where that is known before, their prompts, which may be long, are not taken in at all;
        # requests that come back from a retraction have figures and output to be kept.
        held = [
            None
            if req.next_output_finishes_by_length() and self._find(req) is None
            else self._start(req)
            for req in reqs
        ]
        step = _Launched(
            held=[None if req is chunked_req else h for req, h in zip(reqs, held, strict=True)],
            copy=HostCopy([next_token_ids], self._stream),
            stride=1,
            is_prefill=True,
            is_plain=self._was_plain,
        )
        self._launched.append(step)

    def record_verify(
        self,
        reqs: Sequence[Req],
        next_token_ids: torch.Tensor,
        accept_lens: torch.Tensor,
        num_model_accepted: torch.Tensor | None,
    ) -> None:
        """Take note of a verification.

        Args:
            next_token_ids: int[num_requests * width] on the device, each request's committed
                tokens at the front of its row.
            accept_lens: int[num_requests]; committed tokens, bonus included.
            num_model_accepted: int[num_requests]; tokens of the model drafter's drafts that were
                right, None if it did not draft.
        """
        arrays = [next_token_ids, accept_lens]
        if num_model_accepted is not None:
            arrays.append(num_model_accepted)
        with self._clock.measure(Phase.TRANSFER):
            copy = HostCopy(arrays, self._stream)
        stride = next_token_ids.shape[0] // len(reqs)
        self._was_plain = stride == 1
        step = _Launched(
            held=[self._find(req) for req in reqs],
            copy=copy,
            stride=stride,
            is_prefill=False,
            is_planned=not self._is_ahead,
            is_plain=self._was_plain,
        )
        self._launched.append(step)
        self._num_steps_ahead += self._is_ahead
        self._is_ahead = False

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        """Whether the next step of these requests is to be launched without drafts and before the
        tokens of the last are read.

        It is if the last had no drafts either, or was a prefill behind such a step, so that one
        token of each of its requests is on its way, and the tokens before that do not ask for
        drafts. Never waits for the last step.
        """
        last = self._launched[-1] if self._launched else None
        self._is_ahead = False
        if last is None or not last.is_plain:
            return False
        self._settle(but=last)
        with self._clock.measure(Phase.COMMIT):
            self.drop_ended(reqs)
        if not last.is_planned:
            self._plan_launched(last)
        held = [h for req in reqs if (h := self._find(req)) is not None and not h.model_only]
        if self._wants_drafts or len(held) < len(reqs):
            return False
        coming = _keys_of(last)
        if last.is_prefill and coming.issuperset(h.key for h in held):
            return False  # none of them was decoded before
        for h, req in zip(held, reqs, strict=True):
            # SGLang's own count has the steps whose results it has taken in: all but a verification
            # that was the last. What the device verifies is laid out by these lengths.
            num_cached = req.kv.kv_committed_len + (not last.is_prefill and h.key in coming)
            if h.num_tokens - (h.key not in coming) != num_cached:
                self._num_resyncs += 1
                return False
        self._num_context = sum(h.num_tokens + (h.key in coming) for h in held)
        self._is_ahead = True
        return True

    @property
    def is_ahead(self) -> bool:
        """What runs_ahead found, until that step is recorded."""
        return self._is_ahead

    def plan(
        self, reqs: Sequence[Req], seq_lens: Sequence[int] | None, *, next_waits: bool = False
    ) -> DraftPlans:
        """Plan the next cycle of these requests from every token committed so far. A step that runs
        ahead has nothing to verify; its cycles are planned later.

        Args:
            seq_lens: tokens in the KV cache per request where the host knows them; the newest
                committed token, the root of the verify tree, is not among them.
            next_waits: the next step of these cannot run ahead of this one's tokens.
        """
        if self._is_ahead:
            return DraftPlans.plain(len(reqs))
        self._settle()
        self._wants_drafts = False
        with self._clock.measure(Phase.COMMIT):
            self.drop_ended(reqs)
            held = [self._find(req) or self._start(req) for req in reqs]
            if seq_lens is not None:
                for i, (req, num_cached) in enumerate(zip(reqs, seq_lens, strict=True)):
                    if held[i].num_tokens != num_cached + 1:
                        # Drafts from other tokens would be verified all the same, only in vain.
                        self._num_resyncs += 1
                        held[i] = self._start(req)
                        # Under overlap scheduling the request lacks the latest tokens, which then
                        # are a gap in the drafter's text; what comes is counted from here.
                        held[i].num_tokens = num_cached + 1
        self._num_context = sum(h.num_tokens for h in held)
        plans = self._drafter.plan([h.key for h in held], next_waits=next_waits)
        for h, source in zip(held, plans.sources, strict=True):
            h.source = source
        return plans

    @property
    def num_context(self) -> int:
        """Tokens of all requests of the step that was planned last, or that runs ahead."""
        return self._num_context

    def cached_lens(self, reqs: Sequence[Req]) -> list[int]:
        """Tokens in the KV cache of each of these requests, for which the step was planned, or in
        which it runs ahead."""
        held = [self._find(req) for req in reqs]
        assert all(h is not None for h in held), "plan starts requests that it does not know"
        # The newest token is not cached; where it is on its way it is not counted yet.
        coming = _keys_of(self._launched[-1]) if self._is_ahead else set()
        return [h.num_tokens - (h.key not in coming) for h in held if h is not None]

    def note_finished(self, rid: str) -> None:
        """A request ended while running: its output goes to the shared cache."""
        for h in [h for h in self._held.values() if h.rid == rid]:
            req = h.req()
            if req is not None and req.finished():
                self._end(req, h)

    def note_finished_at_prefill(self, req: Req) -> None:
        """A request ended with a prefill. If it had come back with output from a retraction, that
        is kept as that of one that ended while running."""
        held = self._find(req)
        if held is not None and len(req.output_ids) > 1:
            self._end(req, held)

    def let_go(self, req: Req) -> None:
        """Forget a request that was aborted while it waited, after a retraction perhaps: a session
        may keep it as it is."""
        held = self._find(req)
        if held is not None:
            self._release(held)

    def flush(self) -> None:
        """Forget the shared cache, how right its drafts were, and all requests that have ended."""
        self._settle()  # the last step tells of what is forgotten
        self.drop_ended()
        self._drafter.flush()

    def drop_ended(self, running: Sequence[Req] = ()) -> None:
        """Let go of requests that ended unannounced; every step does it too."""
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

    def publish(self) -> None:
        """Bring the Prometheus metrics up to date."""
        if self._metrics is not None:
            self._metrics.publish(
                num_requests=len(self),
                num_cycles=self._num_cycles,
                num_accepted_drafts=self._num_accepted_drafts,
                num_resyncs=self._num_resyncs,
                num_steps_ahead=self._num_steps_ahead,
                times=self._clock.totals(),
                cache=self._drafter.cache_stats(),
                recorder=None if self._recorder is None else self._recorder.stats(),
            )

    def describe(self) -> dict[str, Any]:
        """Counters and what is held, for /server_info; requests that ended are let go first."""
        self.drop_ended()
        cache = self._drafter.cache_stats()
        return {
            "num_requests": len(self),
            "num_resyncs": self._num_resyncs,
            "num_steps_ahead": self._num_steps_ahead,
            "num_cycles": dict(self._num_cycles),
            "num_accepted_drafts": dict(self._num_accepted_drafts),
            "num_request_tokens": cache.num_request_tokens,
            "num_shared_requests": cache.num_shared_requests,
            "num_shared_tokens": cache.num_shared_tokens,
            "num_namespaces": cache.num_namespaces,
            "num_session_tokens": cache.num_session_tokens,
            "num_pending_tokens": cache.num_pending_tokens,
            "num_cache_bytes": cache.num_bytes,
            "steps": self._clock.describe(),
            "recorder": asdict(self._recorder.stats()) if self._recorder is not None else None,
        }

    def _start(self, req: Req) -> _Held:
        """Hold a request as SGLang has it now; keeps the state of one whose prefill goes on, and of
        one that is started anew, without the tokens of the latest step, the figures."""
        num_tokens = len(req.origin_input_ids) + len(req.output_ids)
        before = self._find(req)
        earlier = RequestStats()
        if before is not None:
            if before.num_tokens == num_tokens:
                return before
            earlier = before.earlier + self._release(before)
        key = self._next_key
        self._next_key += 1
        # Placeholders of images are no vocabulary tokens: they must never be drafted.
        given_ids = np.asarray(req.origin_input_ids_unpadded, dtype=np.int64)
        # SGLang takes any number for a token id; what no vocabulary holds must not be drafted.
        # Where embeddings are given, the ids say nothing.
        is_valid = req.input_embeds is None and bool(self._is_token(given_ids).all())
        prompt_ids = given_ids.astype(np.int32) if is_valid else np.empty(0, np.int32)
        model_only = not is_valid or has_penalties(req.sampling_params)
        held = _Held(
            key=key,
            rid=req.rid,
            req=weakref.ref(req, lambda _: self._dead.append(key)),
            num_tokens=num_tokens,
            model_only=model_only,
            prompt_ids=prompt_ids if is_valid and self._recorder is not None else None,
            cycles=[] if before is None else before.cycles,
            earlier=earlier,
        )
        self._drafter.start(
            held.key,
            prompt_ids,
            namespace=_namespace(req),
            model_only=model_only,
            num_prompt_tokens=len(req.origin_input_ids),
        )
        if req.output_ids:  # retracted before: comes back as a prefill with its output
            output_ids = np.asarray(req.output_ids, dtype=np.int64)
            # What is counted already is not counted again.
            self._drafter.extend(held.key, self._as_sampled(output_ids), counts=before is None)
        self._held[key] = held
        mark_held(req, held)
        return held

    def _is_token(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether the vocabulary holds each."""
        return (ids >= 0) & (ids < self._vocab_size)

    def _as_sampled(self, ids: npt.NDArray[np.int64]) -> TokenIds:
        """What SGLang's sampler gave. Where that met NaN it may be any number, and SGLang ends the
        request; the drafter sees 0 there."""
        return np.where(self._is_token(ids), ids, 0).astype(np.int32)

    def _find(self, req: Req) -> _Held | None:
        held: _Held | None = held_of(req)
        # A copy of a request carries the attribute along, but is another request.
        return held if held is not None and held.req() is req and held.key in self._held else None

    def _release(self, held: _Held) -> RequestStats:
        stats = self._drafter.finish(held.key, output_ids=None, keep=False)
        del self._held[held.key]
        return stats

    def _settle(self, but: _Launched | None = None) -> None:
        """Commit the tokens of the launched steps, the oldest first, up to one."""
        while self._launched and self._launched[0] is not but:
            self._settle_next()

    def _settle_next(self) -> None:
        step = self._launched.popleft()
        if not step.is_planned:
            self._plan_launched(step)
        arrays = step.copy.wait()
        with self._clock.measure(Phase.COMMIT):
            self._commit(step, *arrays)

    def _plan_launched(self, step: _Launched) -> None:
        """Plan a step that ran ahead, now that all before it is known."""
        step.is_planned = True
        held = [h for h in step.held if h is not None and h.key in self._held]
        for h in held:
            h.source = "plain"
        if held and self._drafter.plan_launched([h.key for h in held]):
            self._wants_drafts = True

    def _commit(
        self,
        launched: _Launched,
        token_ids: np.ndarray,
        accept_lens: np.ndarray | None = None,
        num_model_accepted: np.ndarray | None = None,
    ) -> None:
        known = [
            (row, h) for row, h in enumerate(launched.held) if h is not None and h.key in self._held
        ]
        rows, held = [row for row, _ in known], [h for _, h in known]
        if not held:
            return
        tokens = self._as_sampled(token_ids.reshape(-1, launched.stride)[rows])
        if accept_lens is None:
            for h, committed in zip(held, tokens, strict=True):
                h.num_tokens += 1
                self._drafter.extend(h.key, committed)
            return
        lengths = accept_lens[rows].astype(np.int32)
        if num_model_accepted is None:
            num_model_accepted = np.full(len(launched.held), -1, np.int32)
        for h, num_tokens in zip(held, lengths.tolist(), strict=True):
            h.num_tokens += num_tokens
            self._count(h, num_tokens - 1)
        outcomes = VerifyOutcomes(
            tokens, lengths, lengths - 1, num_model_accepted[rows].astype(np.int32)
        )
        self._drafter.commit([h.key for h in held], outcomes)

    def _count(self, held: _Held, num_accepted: int) -> None:
        self._num_cycles[held.source] += 1
        self._num_accepted_drafts[held.source] += num_accepted
        if self._report_cycles:
            held.cycles.append((held.source, num_accepted))

    def _end(self, req: Req, held: _Held) -> None:
        while self._launched and held.num_tokens < len(req.origin_input_ids) + len(req.output_ids):
            self._settle_next()  # without overlap, or behind a step that ran ahead
        with self._clock.measure(Phase.COMMIT):
            self._finish(req, held)
        if not self._held:
            self._clock.end_step()  # nothing that follows belongs to it

    def _finish(self, req: Req, held: _Held) -> None:
        # Past a stop token or stop string output_ids goes on; the shared cache must not learn it.
        output_ids = np.asarray(req.output_ids_through_stop, dtype=np.int64)
        is_sound = not _met_nan(req) and bool(self._is_token(output_ids).all())
        is_kept = len(output_ids) > 0 and is_sound
        stats = self._drafter.finish(
            held.key, output_ids=output_ids.astype(np.int32) if is_kept else None, keep=is_kept
        )
        cycles = held.cycles if self._report_cycles else None
        leave_figures(req, _figures(held.earlier + stats, cycles))
        if self._recorder is not None and is_kept and held.prompt_ids is not None:
            self._recorder.record(req, held.prompt_ids, namespace=_namespace(req))
        del self._held[held.key]


def _keys_of(step: _Launched) -> set[int]:
    """Of the requests that it commits tokens of."""
    return {h.key for h in step.held if h is not None}


def _is_given_up(req: Req) -> bool:
    """SGLang found no memory for the request, even alone: it let go of its KV cache, and will not
    come back to it."""
    return req.to_finish is not None and not req.kv.holds_kv


def _met_nan(req: Req) -> bool:
    """SGLang ended the request, for its sampler gave what is no token; it writes one that ends a
    text in its place, if it knows one."""
    reason = req.finished_reason
    return isinstance(reason, FINISH_MATCHED_STR) and reason.matched == "NaN happened"


def _namespace(req: Req) -> str:
    """What SGLang's prefix cache keeps apart: requests of other salts, or keys with the adapter.
    Empty without either."""
    salt, key = req.cache_salt or "", req.extra_key or ""
    if not salt and not key:
        return ""
    # Clients choose them: of any length, and of half surrogate pairs, which are no text.
    name = f"{len(salt)}:{salt}{key}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(name).hexdigest()


def _figures(stats: RequestStats, cycles: list[tuple[str, int]] | None) -> dict[str, Any]:
    """What `meta_info["hvd"]` shows; plain numbers and strings."""
    figures: dict[str, Any] = dict(stats.figures())
    if cycles is not None:
        figures["cycles"] = cycles
    return figures
