"""The values that the core and the serving plugin hand to each other."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Places = Sequence[int] | npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class DraftSource:
    """One row of the table of draft sources: something that proposes drafts.

    name: the source's name in metrics, figures and recordings.
    is_on_host: the host knows the draft's tokens before it allocates, so the draft costs only the
        nodes to verify. The drafts of all such sources are one tree of a HostDrafts. Otherwise a
        drafter on the device drafts in rounds of steps that the requests of a batch share, and at
        most one such drafter runs in a step.
    """

    name: str
    is_on_host: bool


class SourceTable:
    """The draft sources, by place. A set of sources is a number: bit i stands for rows[i].

    labels: the name of each set, by its number.
    device_bits: the set of each single source whose drafts the host does not know, in order.
    """

    def __init__(self, *rows: DraftSource) -> None:
        self.rows = rows
        self.labels: tuple[str, ...] = tuple(map(self._label, range(1 << len(rows))))
        self.device_bits = tuple(1 << i for i, row in enumerate(rows) if not row.is_on_host)

    def bit_of(self, name: str) -> int:
        """The set of this one source. Raises KeyError if there is no such source."""
        for place, row in enumerate(self.rows):
            if row.name == name:
                return 1 << place
        raise KeyError(f"there is no draft source {name!r}, only {[r.name for r in self.rows]}")

    def _label(self, mask: int) -> str:
        names = [row.name for place, row in enumerate(self.rows) if mask >> place & 1]
        if names == ["cache", "model"]:
            return "both"
        return "+".join(names) or "plain"


# "cache": the suffix cache, "model": the model drafter. Their labels leave the process: "plain",
# "cache", "model", "both".
SOURCES = SourceTable(DraftSource("cache", is_on_host=True), DraftSource("model", is_on_host=False))


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a request may verify.

    sources: the set of draft sources whose drafts it verifies whenever they have one, whatever that
        gains. None: the policy chooses.
    max_tokens: maximum draft tokens of a cycle, of all sources together. None: as the policy does.
    """

    sources: int | None = None
    max_tokens: int | None = None


MODEL_ONLY = DraftLimits(SOURCES.bit_of("model"))


@dataclass(frozen=True, slots=True, eq=False)
class VerifyOutcomes:
    """The result of verifying the drafts of a batch; row i belongs to request i.

    token_ids: int32[num_requests, width], the tokens committed, the bonus token included; only the
        first lengths[i] entries of a row are valid.
    lengths: int32[num_requests].
    num_accepted_drafts: int32[num_requests], accepted draft tokens: all committed tokens if the
        request ended inside its draft, else all but the bonus token.
    num_model_accepted: int32[num_requests], tokens of the model drafter's draft that were right, if
        it was verified together with another draft; below 0 if it is not known.
    """

    token_ids: TokenIds
    lengths: npt.NDArray[np.int32]
    num_accepted_drafts: npt.NDArray[np.int32]
    num_model_accepted: npt.NDArray[np.int32]

    def select(self, places: Places) -> "VerifyOutcomes":
        """The outcomes of some of the requests."""
        return VerifyOutcomes(
            self.token_ids[places],
            self.lengths[places],
            self.num_accepted_drafts[places],
            self.num_model_accepted[places],
        )


class MatchOrigin(enum.IntEnum):
    """The text that holds the longest match of a draft; the number is in the column "origin"."""

    PROMPT = 0  # the request's own prompt
    OUTPUT = 1  # the request's own output
    SHARED = 2  # finished requests


# Columns of DraftBatch.matches, as native/draft_layout.hpp has them.
MATCH_COLUMNS = (
    "match_len",  # longest match among the occurrences of the first draft token
    "score",  # sum of the nodes' probabilities
    "num_tokens",  # nodes of the draft
    "origin",  # MatchOrigin of that longest match
    "age",  # tokens between that match and the end of its text
    "num_occurrences",  # occurrences of the context that were found
    "num_agreeing",  # those among them that the first draft token follows
    "agreement",  # their share of the votes
    "mean_agreement",  # mean of that share over the nodes of the draft
)

SCORE = MATCH_COLUMNS.index("score")

# The number of first tokens of a chain that DraftBatch.evidence is about.
EVIDENCE_DEPTH = 4
# Columns of DraftBatch.evidence, as native/draft_layout.hpp has them.
EVIDENCE = (
    *(
        f"{name}_{depth}"
        for name in (
            # The index has a bucket for the two tokens before this one. num_seen counts, of the
            # latest two places in this bucket, those at which these two tokens really stand and
            # are followed by a token. num_followed counts those followed by this token. Only the
            # request's own text counts.
            "num_seen",
            "num_followed",
            # Tokens since the text last had this token; 65536 if the token is not at any of the
            # latest four places in its bucket.
            "age",
            # num_others: how many other tokens have votes at this token's place. other: estimated
            # probability that the likeliest of them follows if all tokens before it are right.
            # Both are 0 for the paper's draft.
            "num_others",
            "other",
        )
        for depth in range(1, EVIDENCE_DEPTH + 1)
    ),
    # Shares of the 32 tokens before the draft that also stand before its source: at the same
    # distance, and at any distance. Both are 0 for the paper's draft.
    "aligned",
    "in_common",
)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Preallocated drafts: row i belongs to request i; its first num_nodes[i] entries are valid.

    Parents stand before their children. A chain is a tree in which node j follows node j - 1.

    token_ids: int32[max_requests, max_nodes].
    parents: int32, same shape: index of the node before, -1 for a node that follows the context
        itself.
    depths: int32, same shape: 1 for the tokens that may come next.
    probs: float32, same shape: estimated probability that the node is accepted.
    num_nodes: int32[max_requests], 0 if nothing matches.
    matches: float32[max_requests, len(MATCH_COLUMNS)], the match that gave the draft.
    evidence: float32[max_requests, len(EVIDENCE)], further evidence about chains, if it was asked
        for; 0 if there is none.
    """

    token_ids: TokenIds
    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]
    num_nodes: npt.NDArray[np.int32]
    matches: npt.NDArray[np.float32]
    evidence: npt.NDArray[np.float32]

    @classmethod
    def of_size(cls, max_requests: int, max_nodes: int) -> "DraftBatch":
        shape = (max_requests, max_nodes)
        return cls(
            token_ids=np.zeros(shape, np.int32),
            parents=np.zeros(shape, np.int32),
            depths=np.zeros(shape, np.int32),
            probs=np.zeros(shape, np.float32),
            num_nodes=np.zeros(max_requests, np.int32),
            matches=np.zeros((max_requests, len(MATCH_COLUMNS)), np.float32),
            evidence=np.zeros((max_requests, len(EVIDENCE)), np.float32),
        )

    def chains(self, num_tokens: npt.NDArray[np.int32]) -> "HostDrafts":
        """Copies of the first rows, which hold chains, or of their first tokens.

        num_tokens: int32[num_rows], tokens to take of each row, at most num_nodes; 0 for no draft.
        """
        num_rows, longest = len(num_tokens), int(num_tokens.max(initial=0))
        parents = np.empty((num_rows, longest), np.int32)
        parents[:] = np.arange(-1, longest - 1)
        return HostDrafts(
            token_ids=self.token_ids[:num_rows, :longest] * (parents < num_tokens[:, None] - 1),
            parents=parents,
            num_nodes=num_tokens.copy(),
            are_trees=np.zeros(num_rows, np.bool_),
            matches=self.matches[:num_rows].copy(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostDrafts:
    """The drafts that a batch verifies and the host knows; row i belongs to request i. The arrays
    become read-only.

    token_ids: int32[num_requests, width]; the first num_nodes[i] entries of a row are valid, the
        others are 0.
    parents: int32, same shape; as in DraftBatch.
    num_nodes: int32[num_requests], 0 for no draft.
    are_trees: bool[num_requests]; the others are chains.
    matches: float32[num_requests, len(MATCH_COLUMNS)], of the chains that the cache proposed.
    """

    token_ids: TokenIds
    parents: npt.NDArray[np.int32]
    num_nodes: npt.NDArray[np.int32]
    are_trees: npt.NDArray[np.bool_]
    matches: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        for name in _OF_DRAFTS:
            getattr(self, name).flags.writeable = False

    def __len__(self) -> int:
        return len(self.num_nodes)

    def select(self, places: Places) -> "HostDrafts":
        """The drafts of some of the requests."""
        return HostDrafts(*(getattr(self, name)[places] for name in _OF_DRAFTS))

    @classmethod
    def concatenate(cls, parts: Sequence["HostDrafts"]) -> "HostDrafts":
        """The drafts of one batch or more, one after the other."""
        width = max(part.token_ids.shape[1] for part in parts)
        wide = [
            replace(
                part,
                token_ids=_widened(part.token_ids, width),
                parents=_widened(part.parents, width),
            )
            for part in parts
        ]
        return cls(*(np.concatenate([getattr(part, name) for part in wide]) for name in _OF_DRAFTS))


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedGains:
    """The accepted tokens that a policy expects of each choice, float32[num_requests] each. NaN if
    the request does not have the choice, or if the policy predicts nothing about it.

    cache: of the whole draft that the host knows.
    model: of the model drafter's whole draft.
    both: of these two in one tree.
    verified: of what the request verifies.
    """

    cache: npt.NDArray[np.float32]
    model: npt.NDArray[np.float32]
    both: npt.NDArray[np.float32]
    verified: npt.NDArray[np.float32]

    @classmethod
    def unknown(cls, num_requests: int) -> "ExpectedGains":
        """Of a policy that predicts nothing. The arrays can be filled in."""
        return cls(*(np.full(num_requests, np.nan, np.float32) for _ in range(4)))


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlans:
    """What a batch verifies in its next cycles, in arrays; row i belongs to request i.

    The drafter keeps this value until the cycles are committed, to compare the predicted with the
    accepted length of each draft.

    drafts: the drafts to verify that the host knows.
    num_model_nodes: int32[num_requests], nodes of the model drafter's draft, 0 if it is not
        verified.
    model_sizes: int32[num_requests], the size that was chosen for it; in few steps a draft has
        fewer nodes than its size.
    model_steps: int32[num_requests], steps that it comes from; unspecified if it is not verified.
    predicted: float32[num_requests], predicted accepted length of each cache draft that was
        proposed; unspecified for the others. None under policies that predict nothing.
    chain_lens: int32[num_requests], leading chain tokens about which this cycle gives evidence:
        those verified, or 1 if only a branch was verified, since the first committed token shows
        whether the chain's first was right.
    chain_predicted: float32[num_requests], predicted accepted tokens of these. NaN stands for the
        prediction for the whole chain, which the calibration keeps.
    model_predicted: float32[num_requests], predicted accepted tokens of the model drafter's draft.
        NaN stands for the prediction for the full size, which its predictor keeps.
    host_sources: uint8[num_requests], the set of the host's sources whose drafts are verified, as a
        number of `table`.
    drafter: the set of the one source on the device that drafts in this step; 0 if none does.
    expected: what each choice was expected to gain, unspecified in rows that nobody asked about.
        None if nobody asked, and in selected or concatenated plans.
    """

    drafts: HostDrafts
    num_model_nodes: npt.NDArray[np.int32]
    model_sizes: npt.NDArray[np.int32]
    model_steps: npt.NDArray[np.int32]
    predicted: npt.NDArray[np.float32] | None
    chain_lens: npt.NDArray[np.int32]
    chain_predicted: npt.NDArray[np.float32]
    model_predicted: npt.NDArray[np.float32]
    host_sources: npt.NDArray[np.uint8]
    drafter: int
    table: SourceTable = SOURCES
    expected: ExpectedGains | None = None

    @classmethod
    def plain(cls, num_requests: int) -> "DraftPlans":
        """Nothing to verify for any of them, and nothing to learn."""
        nothing, no_length = np.zeros(num_requests, np.int32), np.zeros(num_requests, np.float32)
        drafts = DraftBatch.of_size(num_requests, 0).chains(nothing)
        no_source = np.zeros(num_requests, np.uint8)
        return cls(
            drafts, nothing, nothing, nothing, None, nothing, no_length, no_length, no_source, 0
        )

    @property
    def num_model_steps(self) -> int:
        """Steps of the model drafter, for all requests that verify its draft."""
        return int(self.model_steps.max(initial=0))

    @property
    def sources(self) -> list[str]:
        """The label of the set of sources whose drafts each request verifies."""
        of_device = (self.num_model_nodes > 0) * np.uint8(self.drafter)
        return [self.table.labels[of_set] for of_set in (self.host_sources | of_device).tolist()]

    @property
    def num_nodes(self) -> npt.NDArray[np.int32]:
        """Nodes to verify, root not counted, if the drafts share none: int32[num_requests]."""
        nodes: npt.NDArray[np.int32] = self.drafts.num_nodes + self.num_model_nodes
        return nodes

    def __len__(self) -> int:
        return len(self.num_model_nodes)

    def select(self, places: Places) -> "DraftPlans":
        """The plans of some of the requests."""
        return replace(
            self,
            drafts=self.drafts.select(places),
            predicted=None if self.predicted is None else self.predicted[places],
            expected=None,
            **{name: getattr(self, name)[places] for name in _OF_PLANS},
        )

    @classmethod
    def concatenate(cls, parts: Sequence["DraftPlans"]) -> "DraftPlans":
        """The plans of one batch or more, one after the other. At most one drafter may have drafted
        in them."""
        [drafter] = {part.drafter for part in parts if part.num_model_nodes.any()} or {0}
        predicted = [part.predicted for part in parts if part.predicted is not None]
        arrays = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _OF_PLANS}
        return cls(
            drafts=HostDrafts.concatenate([part.drafts for part in parts]),
            predicted=np.concatenate(predicted) if len(predicted) == len(parts) else None,
            drafter=drafter,
            table=parts[0].table,
            expected=None,
            **arrays,
        )


_OF_DRAFTS = tuple(field.name for field in fields(HostDrafts))
_OF_PLANS = (
    "num_model_nodes",
    "model_sizes",
    "model_steps",
    "chain_lens",
    "chain_predicted",
    "model_predicted",
    "host_sources",
)


def _widened(rows: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
