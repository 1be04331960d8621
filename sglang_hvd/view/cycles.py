"""The cycles of a reply, as a server reports them: what each drafted, why, and what was accepted.

A server reports them if it runs with --hvd-report-cycles true, or if the request asks for them with
the sampling parameter custom_params: {"hvd": {"report_cycles": true}}. They are the list
meta_info["hvd"][0]["cycles"] of the response, in a stream of its last chunk. `Cycle` explains the
keys of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

# Where a token of a reply came from. prompt, output, shared: a cache draft, copied from the
# request's own prompt, its own output, or another request. model: the model drafter's draft. both:
# the cache draft and the model drafter's had the same token. target: the target model alone.
TokenSource = Literal["prompt", "output", "shared", "model", "both", "target"]
TOKEN_SOURCES: tuple[TokenSource, ...] = get_args(TokenSource)

CycleSource = Literal["cache", "model", "both", "plain"]
Origin = Literal["prompt", "output", "shared"]
# What a file may hold. A server's verifications and contexts are smaller.
_Nodes = Annotated[int, Field(ge=0, le=1 << 16)]
_Count = Annotated[int, Field(ge=0, le=1 << 40)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Cycle:
    """One decoding cycle of a reply. Lengths are in tokens, bonus tokens not counted.

    at: output tokens before this cycle. The cycle committed output_ids[at : at + accepted + 1]; the
        last of these is the bonus token. The last cycle may go on after the reply's end.
    source: the drafts that were verified: "cache", "model", "both" in one tree, "plain" for none.
    origin: the text that the cache draft was found in: "prompt" or "output" of the request, or
        "shared" for finished requests. None if the cache proposed no chain; a
        branch may be verified all the same. In a report that only
        the request asked for, a draft from "shared" that was not verified counts as not proposed.
    match: the latest tokens that stand there too. None without a proposed chain.
    found: length of the draft that the cache proposed, verified or not.
    cache, model: nodes that were verified of the cache draft and of the model drafter's.
    steps: steps in which the model drafter drafted; 0 if it did not.
    accepted: accepted draft tokens.
    cache_right, model_right: how many of them each draft had right; None if it was not verified.
    expected: accepted tokens that the policy expected of what it verified; None if it predicts
        nothing.
    if_cache, if_model, if_both: accepted tokens that it expected of the whole cache draft, of the
        model drafter's whole draft, and of these two in one tree. None for what it does not
        predict.
    width: nodes of each request in the step's verification, root included.
    requests: requests of the step.
    ms: milliseconds between the host's reading of the tokens of the step before and of this step,
        or since the begin of this step if that is later. None if not known.
    ran_ahead: the step was launched without drafts, before the tokens of the last step were known.
    """

    at: _Count
    source: CycleSource
    origin: Origin | None
    match: _Count | None
    found: _Nodes
    cache: _Nodes
    model: _Nodes
    steps: _Nodes
    accepted: _Nodes
    cache_right: _Nodes | None
    model_right: _Nodes | None
    expected: _Number | None
    if_cache: _Number | None
    if_model: _Number | None
    if_both: _Number | None
    width: _Nodes
    requests: _Count
    ms: _Number | None
    ran_ahead: bool = False

    def report(self) -> dict[str, Any]:
        """The JSON object of a response."""
        return {key: getattr(self, key) for key in _KEYS}

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Cycle:
        """The inverse of `report`. Keys that a later version may add are ignored.

        Raises ValueError, in one line, if a key is missing or of the wrong type.
        """
        try:
            return _CYCLE.validate_python(report)
        except ValidationError as error:
            raise ValueError(
                f"not a cycle that this version of sglang-hvd reports: {first_fault(error)}"
            ) from None

    @property
    def num_nodes(self) -> int:
        """Draft nodes that were verified; equal nodes of both drafts count twice."""
        return self.cache + self.model

    @property
    def num_rejected(self) -> int:
        """Draft nodes that were verified and not accepted."""
        wasted_by_cache = self.cache - (self.cache_right or 0)
        wasted_by_model = self.model - (self.model_right or 0)
        return wasted_by_cache + wasted_by_model

    @property
    def token_sources(self) -> list[TokenSource]:
        """The source of each token that the cycle committed: list[accepted + 1]. Tokens of a branch
        without an origin count as shared."""
        right_of_cache, right_of_model = self.cache_right or 0, self.model_right or 0
        sources: list[TokenSource] = []
        for place in range(self.accepted):
            is_of_cache, is_of_model = place < right_of_cache, place < right_of_model
            if is_of_cache and is_of_model:
                sources.append("both")
            elif is_of_cache:
                sources.append(self.origin or "shared")
            else:
                sources.append("model")
        return [*sources, "target"]


def sources_of(cycles: Iterable[Cycle], num_tokens: int) -> list[TokenSource]:
    """The source of each of a reply's tokens. A token outside the cycles, such as that of the
    prefill, is the target model's."""
    sources: list[TokenSource] = ["target"] * num_tokens
    for cycle in cycles:
        for place, source in enumerate(cycle.token_sources, cycle.at):
            if place < num_tokens:
                sources[place] = source
    return sources


def first_fault(error: ValidationError) -> str:
    """The first fault of a JSON value, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


_KEYS = tuple(field.name for field in fields(Cycle))
_CYCLE = TypeAdapter(Cycle)
