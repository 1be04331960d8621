"""The values that the core and the serving plugin hand to each other."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class DraftSource(enum.Enum):
    """What one request verifies in one cycle."""

    CACHE = "cache"  # the cache draft
    MODEL = "model"  # the model drafter's draft
    BOTH = "both"  # both in one tree: the longer accepted path counts
    PLAIN = "plain"  # nothing: the target model decodes one token

    # Members are single, and enum's own hash, of the name, is Python code.
    __hash__ = object.__hash__


class CacheDraft(NamedTuple):
    """A continuation that the suffix cache proposes for one request. (A named tuple, as DraftPlan.)

    token_ids: int32[num_tokens], read-only, never empty.
    match_len: number of tokens before the draft that matched an earlier place.
    score: sum of each token's estimated probability (SuffixDecoding's score), over the chain that
        the cache proposed, of which these may be the first tokens.
    source: where the match lies, in the request's own prompt and output or in finished requests.
    parents: int32[num_tokens], read-only; index of the token before each, -1 for what follows the
        context itself, and parents first. None for a chain, where each follows the one before.
    """

    token_ids: TokenIds
    match_len: int
    score: float
    source: Literal["request", "shared"]
    parents: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class DraftPlan(NamedTuple):
    """What one request verifies in its next cycle. (A named tuple takes a third of the time of a
    frozen dataclass.)

    cache_draft: the draft to verify when source is CACHE or BOTH, else None.
    payoff: predicted accepted length of the request's cache draft in tokens, bonus token not
        counted; None where nothing was predicted (no cache draft, or a policy without predictor).
    num_model_nodes, num_model_steps: size of the model drafter's draft to verify, root not counted,
        and the steps it comes from, the same for all of a batch; 0 unless source is MODEL or BOTH.
    """

    source: DraftSource
    cache_draft: CacheDraft | None
    payoff: float | None
    num_model_nodes: int = 0
    num_model_steps: int = 0

    @property
    def num_nodes(self) -> int:
        """Nodes to verify, root not counted, if the drafts have none in common."""
        num_cache = 0 if self.cache_draft is None else self.cache_draft.num_tokens
        return num_cache + self.num_model_nodes


@dataclass(frozen=True, slots=True, eq=False)
class VerifyOutcome:
    """What the target model made of one request's cycle.

    token_ids: the tokens committed in this cycle, the bonus token included.
    num_accepted_drafts: how many of them are accepted draft tokens. All of them when the request
        ended inside its draft, else all but the bonus token.
    num_model_accepted: how many tokens of the model drafter's draft were right, where both drafts
        were verified and that is known; else None.

    Raises ValueError when the two disagree.
    """

    token_ids: TokenIds | Sequence[int]
    num_accepted_drafts: int
    num_model_accepted: int | None = None

    def __post_init__(self) -> None:
        if self.num_target_tokens not in (0, 1) or self.num_accepted_drafts < 0:
            raise ValueError(
                f"a cycle commits its accepted drafts and at most one bonus token, got "
                f"{len(self.token_ids)} tokens with {self.num_accepted_drafts} accepted drafts"
            )

    @property
    def num_target_tokens(self) -> int:
        """1 if the target model added its bonus token, else 0."""
        return len(self.token_ids) - self.num_accepted_drafts


@dataclass(frozen=True, slots=True, eq=False)
class VerifyOutcomes:
    """What the target model made of the cycles of a batch; row i belongs to request i.

    token_ids: int32[num_requests, width], the tokens committed, the bonus token included; the first
        lengths[i] entries of a row count.
    lengths: int32[num_requests].
    num_accepted_drafts: int32[num_requests], as in VerifyOutcome.
    num_model_accepted: int32[num_requests], likewise, below 0 where it is not known.

    Raises ValueError when they disagree.
    """

    token_ids: TokenIds
    lengths: npt.NDArray[np.int32]
    num_accepted_drafts: npt.NDArray[np.int32]
    num_model_accepted: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        num = len(self.token_ids)
        for of_requests in (self.lengths, self.num_accepted_drafts, self.num_model_accepted):
            if of_requests.shape != (num,) or of_requests.dtype != np.int32:
                raise ValueError(
                    f"outcomes of {num} requests need int32[{num}], got "
                    f"{of_requests.dtype}{list(of_requests.shape)}"
                )
        num_target = self.lengths - self.num_accepted_drafts
        if num and (
            num_target.min() < 0 or num_target.max() > 1 or self.num_accepted_drafts.min() < 0
        ):
            raise ValueError(
                "a cycle commits its accepted drafts and at most one bonus token, got "
                f"{self.lengths.tolist()} tokens with {self.num_accepted_drafts.tolist()} accepted "
                "drafts"
            )


class MatchOrigin(enum.IntEnum):
    """Where the longest match of a draft lies, by number in the column "origin" of its match."""

    PROMPT = 0  # the request's own prompt
    OUTPUT = 1  # the request's own output
    SHARED = 2  # finished requests


# Columns of DraftBatch.matches, as native/draft_layout.hpp has them.
MATCH_COLUMNS = (
    "match_len",  # longest match among the occurrences of the first draft token
    "score",  # sum of the nodes' probabilities: expected accepted tokens
    "num_tokens",  # nodes of the draft
    "origin",  # MatchOrigin of that longest match
    "age",  # tokens between that match and the end of its text
    "num_occurrences",  # occurrences of the context that were found
    "num_agreeing",  # of them, followed by the first draft token
    "agreement",  # their share of the votes
    "mean_agreement",  # the same share at every node, mean over the draft
)

SCORE = MATCH_COLUMNS.index("score")
_MATCH_LEN, _NUM_TOKENS, _ORIGIN = map(MATCH_COLUMNS.index, ("match_len", "num_tokens", "origin"))

# First tokens of a chain that DraftBatch.evidence tells of.
EVIDENCE_DEPTH = 4
# Columns of DraftBatch.evidence, as native/draft_layout.hpp has them.
EVIDENCE = (
    *(
        f"{name}_{depth}"
        for name in (
            # in the request's own text, of the latest two places in the index's bucket of the two
            # tokens before that something follows: those where these stand, and those of them that
            # this token follows
            "num_seen",
            "num_followed",
            # tokens since the latest place of this token; 65536 if none is among the latest four
            # in its bucket
            "age",
            # of the votes where the chain goes on with this token, 0 for the paper's draft: other
            # tokens that have any, and the estimated probability that the likeliest of them follows
            # if all before it is right
            "num_others",
            "other",
        )
        for depth in range(1, EVIDENCE_DEPTH + 1)
    ),
    # shares of the 32 tokens before the draft that stand before its source too: at the same
    # distance, at any; 0 for the paper's draft
    "aligned",
    "in_common",
)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Preallocated drafts: row i belongs to request i, its first num_nodes[i] entries count.

    Parents stand before their children. A chain is a tree in which node j follows node j - 1.

    token_ids: int32[max_requests, max_nodes].
    parents: int32, same shape: index of the node before, -1 for what follows the context itself.
    depths: int32, same shape: 1 for the tokens that may come next.
    probs: float32, same shape: estimated probability that the node is accepted.
    num_nodes: int32[max_requests], 0 where nothing matches.
    matches: float32[max_requests, len(MATCH_COLUMNS)], what the draft was found by.
    evidence: float32[max_requests, len(EVIDENCE)], of chains, where it was asked for; 0 where
        it tells nothing.
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

    def chains(self, num_tokens: npt.NDArray[np.int32]) -> "CacheDrafts":
        """Copies of rows that hold chains, from the first on, or of their first tokens.

        num_tokens: int32[num_rows], tokens to take of each row, at most num_nodes; where that is 0
            there is no draft.
        """
        num_rows, longest = len(num_tokens), int(num_tokens.max(initial=0))
        parents = np.empty((num_rows, longest), np.int32)
        parents[:] = np.arange(-1, longest - 1)
        return CacheDrafts.read_only(
            token_ids=self.token_ids[:num_rows, :longest] * (parents < num_tokens[:, None] - 1),
            parents=parents,
            num_nodes=num_tokens.copy(),
            are_trees=np.zeros(num_rows, np.bool_),
            matches=self.matches[:num_rows].copy(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class CacheDrafts:
    """What a batch verifies of its cache drafts, in arrays; row i belongs to request i. Iterated
    over it has a CacheDraft for each request, made then, or None. All arrays are read-only.

    token_ids: int32[num_requests, width]; the first num_nodes[i] entries of a row count, 0 behind.
    parents: int32, same shape; as in CacheDraft, but of chains too.
    num_nodes: int32[num_requests], 0 for no draft.
    are_trees: bool[num_requests]; the others are chains.
    matches: float32[num_requests, len(MATCH_COLUMNS)], of what the cache proposed.
    """

    token_ids: TokenIds
    parents: npt.NDArray[np.int32]
    num_nodes: npt.NDArray[np.int32]
    are_trees: npt.NDArray[np.bool_]
    matches: npt.NDArray[np.float32]

    @classmethod
    def read_only(
        cls,
        token_ids: TokenIds,
        parents: npt.NDArray[np.int32],
        num_nodes: npt.NDArray[np.int32],
        are_trees: npt.NDArray[np.bool_],
        matches: npt.NDArray[np.float32],
    ) -> "CacheDrafts":
        """Drafts whose arrays nobody may write into from now on."""
        arrays = token_ids, parents, num_nodes, are_trees, matches
        for array in arrays:
            array.flags.writeable = False
        return cls(*arrays)

    def __len__(self) -> int:
        return len(self.num_nodes)

    def __iter__(self) -> Iterator[CacheDraft | None]:
        for tokens, parents, length, is_tree, (match_len, score, origin) in zip(
            self.token_ids,
            self.parents,
            self.num_nodes.tolist(),
            self.are_trees.tolist(),
            self.matches[:, [_MATCH_LEN, SCORE, _ORIGIN]].tolist(),
            strict=True,
        ):
            source: Literal["request", "shared"] = (
                "shared" if origin == MatchOrigin.SHARED else "request"
            )
            before = parents[:length] if is_tree else None
            draft = CacheDraft(tokens[:length], int(match_len), score, source, before)
            yield draft if length else None

    def select(self, places: Sequence[int]) -> "CacheDrafts":
        """The drafts of some of the requests."""
        return CacheDrafts.read_only(*(getattr(self, name)[places] for name in _OF_DRAFTS))

    @classmethod
    def concatenate(cls, parts: Sequence["CacheDrafts"]) -> "CacheDrafts":
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
        return cls.read_only(
            *(np.concatenate([getattr(part, name) for part in wide]) for name in _OF_DRAFTS)
        )


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlans:
    """What a batch verifies in its next cycles, in arrays; row i belongs to request i. Iterated
    over it has a DraftPlan for each request, made then.

    drafts: parts of the cache drafts to verify.
    predicted: float32[num_requests], predicted accepted length of each proposed cache draft;
        unspecified where none was proposed. None under policies that predict nothing.
    num_model_nodes: int32[num_requests], as in DraftPlan.
    num_model_steps: steps of the model drafter, for all requests that verify its draft.
    """

    drafts: CacheDrafts
    predicted: npt.NDArray[np.float32] | None
    num_model_nodes: npt.NDArray[np.int32]
    num_model_steps: int

    @classmethod
    def plain(cls, num_requests: int) -> "DraftPlans":
        """Nothing to verify for any of them."""
        nothing = np.zeros(num_requests, np.int32)
        return cls(DraftBatch.of_size(num_requests, 0).chains(nothing), None, nothing, 0)

    @property
    def payoffs(self) -> list[float | None]:
        """Predicted accepted lengths as in DraftPlan: list[num_requests]."""
        if self.predicted is None:
            return [None] * len(self)
        were_proposed = (self.drafts.matches[:, _NUM_TOKENS] > 0).tolist()
        return [
            payoff if was_proposed else None
            for payoff, was_proposed in zip(self.predicted.tolist(), were_proposed, strict=True)
        ]

    @property
    def sources(self) -> list[DraftSource]:
        """What each request verifies: list[num_requests]."""
        return sources_of(self.drafts.num_nodes, self.num_model_nodes)

    @property
    def num_nodes(self) -> npt.NDArray[np.int32]:
        """Nodes to verify as in DraftPlan: int32[num_requests]."""
        nodes: npt.NDArray[np.int32] = self.drafts.num_nodes + self.num_model_nodes
        return nodes

    def __len__(self) -> int:
        return len(self.num_model_nodes)

    def __iter__(self) -> Iterator[DraftPlan]:
        for source, draft, payoff, num_model in zip(
            self.sources, self.drafts, self.payoffs, self.num_model_nodes.tolist(), strict=True
        ):
            num_steps = self.num_model_steps if num_model else 0
            yield DraftPlan(source, draft, payoff, num_model, num_steps)


def sources_of(
    num_cache: npt.NDArray[np.int32], num_model: npt.NDArray[np.int32]
) -> list[DraftSource]:
    """What requests verify by the nodes of their two drafts, int32[num_requests] each."""
    return [
        _BY_DRAFTS[of_cache > 0][of_model > 0]
        for of_cache, of_model in zip(num_cache.tolist(), num_model.tolist(), strict=True)
    ]


_BY_DRAFTS = (DraftSource.PLAIN, DraftSource.MODEL), (DraftSource.CACHE, DraftSource.BOTH)
_OF_DRAFTS = tuple(field.name for field in fields(CacheDrafts))


def _widened(rows: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
