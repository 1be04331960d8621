"""Arrays that cache drafts are written into."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.types import TokenIds

# Columns of DraftBatch.features, as native/proposer.hpp: MatchFeatures has them.
MATCH_FEATURES = (
    "match_len",  # longest match among the occurrences of the first draft token
    "score",  # sum of the nodes' probabilities: expected accepted tokens
    "num_tokens",  # nodes of the draft
    "origin",  # where that longest match lies: 0 prompt, 1 own output, 2 finished requests
    "age",  # tokens between that match and the end of its text
    "num_occurrences",  # occurrences of the context that were found
    "num_agreeing",  # of them, followed by the first draft token
    "agreement",  # their share of the votes
    "mean_agreement",  # the same share at every node, mean over the draft
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
    features: float32[max_requests, len(MATCH_FEATURES)].
    """

    token_ids: TokenIds
    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]
    num_nodes: npt.NDArray[np.int32]
    features: npt.NDArray[np.float32]

    @classmethod
    def of_size(cls, max_requests: int, max_nodes: int) -> "DraftBatch":
        shape = (max_requests, max_nodes)
        return cls(
            token_ids=np.zeros(shape, np.int32),
            parents=np.zeros(shape, np.int32),
            depths=np.zeros(shape, np.int32),
            probs=np.zeros(shape, np.float32),
            num_nodes=np.zeros(max_requests, np.int32),
            features=np.zeros((max_requests, len(MATCH_FEATURES)), np.float32),
        )
