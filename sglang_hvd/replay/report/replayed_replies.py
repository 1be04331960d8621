"""The last replies of recordings, as a server under this policy would have drafted them."""

from collections.abc import Sequence

from sglang_hvd.config import DEFAULT_VERIFY_WIDTH, HvdConfig
from sglang_hvd.costs import StepCosts
from sglang_hvd.replay.core.model_drafter import ModelDrafter
from sglang_hvd.replay.core.recordings import Recording, TraceTokenizer
from sglang_hvd.replay.core.walk import WalkSettings, report_last
from sglang_hvd.view.replies import ViewedReply, token_texts


def replayed_replies(
    recordings: Sequence[Recording],
    tokenizer: TraceTokenizer,
    *,
    config: HvdConfig,
    costs: StepCosts | None,
    model_drafter: ModelDrafter,
    num_replies: int,
) -> list[ViewedReply]:
    """The last replies of each recording, replayed after all replies before them.

    config: the server's configuration. Without costs policy allocate becomes payoff.
    num_replies: replies of each recording.

    Raises ValueError, in one line, for a recording or predictor that cannot be used.
    """
    if costs is None and config.policy == "allocate":
        config = config.for_policy("payoff")
    width = DEFAULT_VERIFY_WIDTH if config.verify_width is None else config.verify_width
    settings = WalkSettings(
        config, model_drafter=model_drafter, draft_limits=(width - 1,), costs=costs
    )
    about = (
        f"policy {config.policy}, replayed; the model drafter is simulated with "
        f"{model_drafter.mean_accepted:g} accepted tokens per cycle"
    )

    def decode_all(windows: list[list[int]]) -> Sequence[str]:
        texts: list[str] = tokenizer.loaded.decode_batch(windows, skip_special_tokens=False)
        return texts

    return [
        ViewedReply(
            title=f"{recording.name}, session {trace.session}, turn {trace.turn}",
            about=about,
            prompt=decode_all([trace.prompt_ids.tolist()])[0],
            tokens=token_texts(trace.output_ids.tolist(), decode_all),
            cycles=tuple(cycles),
        )
        for recording in recordings
        for trace, cycles in report_last(recording, tokenizer, settings, num_replies=num_replies)
    ]
