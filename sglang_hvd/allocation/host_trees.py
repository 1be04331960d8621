"""The drafts that the host knows as one tree per request, the most probable nodes first."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import HostTreeJoiner
from sglang_hvd.types import SOURCES, DraftBatch, HostDrafts, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

_CACHE = SOURCES.bit_of("cache")


class HostTrees:
    """The trees of a batch; row i belongs to request i. Reused from step to step.

    join makes the trees of the cache's drafts, and add adds the drafts of another source. The nodes
    of a tree are sorted by probability, each after its parent. So the first n nodes are the best
    draft of n nodes.

    token_ids: int32[max_requests, max_nodes].
    parents: int32, same shape: index of the node before, -1 for a node that follows the context
        itself.
    depths: int32, same shape: 1 for the tokens that may come next.
    probs: float32, same shape: probability that the node is accepted.
    is_chain: bool, same shape: whether the node is of the cache's chain. These nodes stand in the
        order of the chain.
    sources: uint8, same shape: the set of sources that propose the node, as in SourceTable.
    num_nodes: int32[max_requests], 0 if no source proposes a draft.
    """

    def __init__(self, max_requests: int, max_nodes: int) -> None:
        shape = (max_requests, max_nodes)
        self.token_ids: TokenIds = np.zeros(shape, np.int32)
        self.parents: Int32 = np.zeros(shape, np.int32)
        self.depths: Int32 = np.zeros(shape, np.int32)
        self.probs: Float32 = np.zeros(shape, np.float32)
        self.is_chain: npt.NDArray[np.bool_] = np.zeros(shape, np.bool_)
        self.sources: UInt8 = np.zeros(shape, np.uint8)
        self.num_nodes: Int32 = np.zeros(max_requests, np.int32)
        self._joiner = HostTreeJoiner()

    def join(self, chains: DraftBatch, acceptance: Float32, votes: DraftBatch) -> None:
        """Makes the trees of a batch of cache drafts: the chain, whose acceptance is predicted, and
        the branches that the votes of the suffix cache add to it.

        chains: row i belongs to request i.
        acceptance: float32[num_requests, at least the longest chain], probability that more than j
            tokens of a chain are accepted.
        votes: trees that the suffix cache proposes; of 0 nodes if drafts must not branch.

        Raises ValueError for arrays that do not fit.
        """
        self._joiner.join(chains, acceptance, votes, _CACHE, self)

    def add(self, drafts: DraftBatch, num_requests: int, source: int) -> None:
        """Adds the drafts of another source to the trees of a batch. Equal prefixes are shared.

        drafts: row i belongs to request i; probs are the predicted probabilities of acceptance.
        source: bit of the source, as in SourceTable.

        Raises ValueError for arrays that do not fit.
        """
        self._joiner.add(num_requests, drafts, source, self)

    def take(
        self, num_nodes: Int32, acceptance: Float32, chains: DraftBatch, *, width: int
    ) -> "TakenDrafts":
        """The first nodes of each tree.

        num_nodes: int32[num_requests], nodes to take of each row, at most width.
        acceptance: as in join; chain_predicted sums it up over the taken part of each chain.
        chains: as in join.
        """
        num = len(num_nodes)
        token_ids, parents = np.empty((num, width), np.int32), np.empty((num, width), np.int32)
        are_trees, source_sets = np.empty(num, np.bool_), np.empty(num, np.uint8)
        chain_lens, chain_predicted = np.empty(num, np.int32), np.empty(num, np.float32)
        self._joiner.take(
            *(self, acceptance, chains, num_nodes, token_ids, parents),
            *(are_trees, source_sets, chain_lens, chain_predicted),
        )
        matches = chains.matches[:num].copy()
        drafts = HostDrafts(token_ids, parents, num_nodes.copy(), are_trees, matches)
        return TakenDrafts(drafts, source_sets, chain_lens, chain_predicted)


class TakenDrafts(NamedTuple):
    """The first nodes of each request's tree, as the step verifies them.

    source_sets: uint8[num_requests], the set of sources that propose any of the nodes.
    chain_lens: int32[num_requests], tokens of the cache's chain in each; 1 if only a branch was
        taken, since its verification shows whether the chain's first token is right.
    chain_predicted: float32[num_requests], predicted accepted tokens of these.
    """

    drafts: HostDrafts
    source_sets: UInt8
    chain_lens: Int32
    chain_predicted: Float32
