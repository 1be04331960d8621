"""When draft-extend runs, which brings the model drafter's KV cache up to date."""

from __future__ import annotations

import enum

from sglang_hvd.config import HvdConfig


class DraftExtend(enum.Enum):
    """When draft-extend runs in decode steps.

    EVERY_STEP: behind each verification, for all of its requests.
    WHEN_DRAFTING: for a request when it drafts next.
    NEVER: the policy does not draft with the model drafter.
    """

    EVERY_STEP = enum.auto()
    WHEN_DRAFTING = enum.auto()
    NEVER = enum.auto()


def draft_extend_of(config: HvdConfig, *, device: str, has_mrope: bool) -> DraftExtend:
    """The mode of a server.

    has_mrope: positions depend on more than a token's place, which catching up does not know.
    """
    if not config.drafts_with_model:
        return DraftExtend.NEVER
    # On a GPU draft-extend runs while the host reads what was accepted; postponed, it waits for it.
    is_postponed = device == "cpu" if config.postpone_extend is None else config.postpone_extend
    return DraftExtend.WHEN_DRAFTING if is_postponed and not has_mrope else DraftExtend.EVERY_STEP
