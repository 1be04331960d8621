"""When a server runs draft-extend."""

from __future__ import annotations

from sglang_hvd.allocation import DraftExtend
from sglang_hvd.config import HvdConfig, PostponeExtend


def draft_extend_of(
    config: HvdConfig, *, device: str, has_mrope: bool, runs_ahead: bool
) -> DraftExtend:
    """The mode of a server.

    has_mrope: positions depend on more than a token's place, which catching up does not know.
    runs_ahead: steps without drafts may be launched before the tokens of the last are known.
    """
    # On a GPU draft-extend runs while the host reads what was accepted; postponed, it waits for it.
    # Behind a step without drafts that is no secret, and the next may be launched at once.
    on_gpu: PostponeExtend = "plain" if runs_ahead else "never"
    found = DraftExtend.of(config, default="always" if device == "cpu" else on_gpu)
    return DraftExtend.EVERY_STEP if has_mrope and found.catches_up else found
