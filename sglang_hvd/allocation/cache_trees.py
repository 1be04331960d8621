"""Cache drafts as trees: where the votes of the suffix cache differ, a draft may branch."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hvd.allocation._native import CacheTreeJoiner
from sglang_hvd.types import DraftBatch, HostDrafts, TokenIds

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class CacheTrees:
    """A batch of cache drafts; row i belongs to request i. Reused from step to step.

    A draft is the chain of which the payoff predictor knows how far it is right, and the branches
    that the votes add to it: its most probable nodes, the most probable first, each after its
    parent. So its first nodes are the draft to verify with less room.

    token_ids: int32[max_requests, max_nodes].
    parents: int32, same shape: index of the node before, -1 for what follows the context itself.
    depths: int32, same shape: 1 for the tokens that may come next.
    probs: float32, same shape: probability that the node is accepted.
    is_chain: bool, same shape: nodes of the chain; in its order.
    num_nodes: int32[max_requests], 0 where nothing matches.
    """

    def __init__(self, max_requests: int, max_nodes: int) -> None:
        shape = (max_requests, max_nodes)
        self.token_ids: TokenIds = np.zeros(shape, np.int32)
        self.parents: Int32 = np.zeros(shape, np.int32)
        self.depths: Int32 = np.zeros(shape, np.int32)
        self.probs: Float32 = np.zeros(shape, np.float32)
        self.is_chain: npt.NDArray[np.bool_] = np.zeros(shape, np.bool_)
        self.num_nodes: Int32 = np.zeros(max_requests, np.int32)
        self._joiner = CacheTreeJoiner()

    def join(self, chains: DraftBatch, survival: Float32, votes: DraftBatch) -> None:
        """Makes the drafts of a batch.

        chains: row i belongs to request i.
        survival: float32[num_requests, at least the longest chain], probability that more than j
            tokens of a chain are accepted.
        votes: trees that the suffix cache proposes; of 0 nodes where drafts shall not branch.

        Raises ValueError for arrays that do not fit.
        """
        self._joiner.join(
            chains.token_ids,
            chains.num_nodes,
            survival,
            votes.token_ids,
            votes.parents,
            votes.depths,
            votes.probs,
            votes.num_nodes,
            self.token_ids,
            self.parents,
            self.depths,
            self.probs,
            self.is_chain,
            self.num_nodes,
        )

    def take(
        self,
        num_nodes: Int32,
        survival: Float32,
        chains: DraftBatch,
        *,
        width: int,
    ) -> "TakenDrafts":
        """The first nodes of each draft that was joined last.

        num_nodes: int32[num_requests], nodes to take of each row, at most width.
        survival: as in join, but what is expected of the chains is by this one.
        chains: as in join.
        """
        num = len(num_nodes)
        token_ids, parents = np.empty((num, width), np.int32), np.empty((num, width), np.int32)
        are_trees, chain_lens = np.empty(num, np.bool_), np.empty(num, np.int32)
        expected = np.empty(num, np.float32)
        self._joiner.take(
            self.token_ids,
            self.parents,
            self.is_chain,
            survival,
            chains.num_nodes,
            num_nodes,
            token_ids,
            parents,
            are_trees,
            chain_lens,
            expected,
        )
        matches = chains.matches[:num].copy()
        drafts = HostDrafts.read_only(token_ids, parents, num_nodes.copy(), are_trees, matches)
        return TakenDrafts(drafts, chain_lens, expected)


class TakenDrafts(NamedTuple):
    """Parts of a batch of drafts, by request.

    chain_lens: int32[num_requests], tokens of the chain in each; 1 where a branch alone was taken,
        which tells of the chain's first token.
    chain_predicted: float32[num_requests], accepted tokens expected of these.
    """

    drafts: HostDrafts
    chain_lens: Int32
    chain_predicted: Float32
