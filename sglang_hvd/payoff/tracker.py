"""Follows requests cycle by cycle and computes the features of their cache drafts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd._native import Tracker
from sglang_hvd.payoff.features import FEATURE_NAMES, MAX_DRAFT_LEN, POSITION_FEATURES
from sglang_hvd.payoff.token_classes import TokenClasses
from sglang_hvd.types import DraftBatch, TokenIds

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class DraftFeatures:
    """The inputs of a predictor, one row per request; unspecified in rows without a draft.

    draft_lens: int32[num_requests], 0 without a draft.
    features: float32[num_requests, len(FEATURE_NAMES)].
    positions: float32[num_requests, len(POSITION_FEATURES), MAX_DRAFT_LEN], of each draft
        token; entries after the last one are unspecified.
    """

    draft_lens: Int32
    features: Float32
    positions: Float32

    @classmethod
    def of_size(cls, num_requests: int) -> "DraftFeatures":
        return cls(
            draft_lens=np.zeros(num_requests, np.int32),
            features=np.zeros((num_requests, len(FEATURE_NAMES)), np.float32),
            positions=np.zeros((num_requests, len(POSITION_FEATURES), MAX_DRAFT_LEN), np.float32),
        )

    def first(self, num_requests: int) -> "DraftFeatures":
        """The first num_requests rows, as views."""
        return DraftFeatures(
            self.draft_lens[:num_requests],
            self.features[:num_requests],
            self.positions[:num_requests],
        )


class RequestTracker:
    """Call start for a new request, write_features and commit for each cycle, then finish. start
    returns the slot that stands for the request.

    history_window: how many of the latest cycles the recent_* features cover.
    """

    def __init__(self, history_window: int, token_classes: TokenClasses) -> None:
        self.native = Tracker(history_window, token_classes.flags)

    def start(self, prompt_ids: TokenIds, *, namespace: str = "", teaches: bool = True) -> int:
        """Registers a request and returns its slot.

        namespace: requests of one namespace share how often drafts had tokens right.
        teaches: whether this request adds to what they share.
        """
        return self.native.start(np.ascontiguousarray(prompt_ids), namespace, teaches)

    def extend(self, slot: int, token_ids: TokenIds) -> None:
        """Appends tokens committed outside a cycle. Raises ValueError for an unused slot."""
        self.native.extend(slot, np.ascontiguousarray(token_ids))

    def write_features(
        self, out: DraftFeatures, slots: Int32, drafts: DraftBatch, votes: DraftBatch
    ) -> None:
        """Writes the features of each request's draft, and keeps the draft until the commit.

        drafts, votes: row i belongs to slots[i]. votes: the drafts that the votes propose; in cache
            mode votes the same batch.

        Raises ValueError for an unused slot, or arrays that do not fit.
        """
        self.native.write(slots, drafts, votes, out.features, out.positions)
        np.minimum(drafts.num_nodes[: len(slots)], MAX_DRAFT_LEN, out=out.draft_lens[: len(slots)])

    def commit(
        self, slots: Int32, token_ids: TokenIds, lengths: Int32, verified_lens: Int32
    ) -> Int32:
        """Ends a cycle and appends its committed tokens.

        token_ids: int32[num_requests, width]; the first lengths[i] entries of row i were committed.
        verified_lens: int32[num_requests], how many first tokens of each draft were verified, 0 for
            none.

        Returns int32[num_requests]: how many of these were accepted; -1 if none was verified.
        Raises ValueError for an unused slot, or arrays that do not fit.
        """
        accepted_lens = np.empty(len(slots), np.int32)
        self.native.commit(slots, token_ids, lengths, verified_lens, accepted_lens)
        return accepted_lens

    def forget(self) -> None:
        """Forgets what requests share. Active requests keep what they observed themselves."""
        self.native.forget()

    def finish(self, slot: int) -> None:
        """Forgets a request. Raises ValueError for an unused slot."""
        self.native.finish(slot)
