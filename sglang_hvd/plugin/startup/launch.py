"""HvdLaunch: the resolved configuration of a server that runs HVD. It travels on SGLang's arguments
record to every process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_context

from sglang_hvd.allocation import VerifyWidths
from sglang_hvd.config import HvdConfig
from sglang_hvd.plugin.startup.attention_support import TargetAttention

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class HvdLaunch:
    """What a scheduler process needs to know to run HVD.

    Attributes:
        config: the settings in force.
        model_tree_width: nodes of the model drafter's tree, root included.
        widths: nodes per request in one verification.
        has_width_states: each width has its own attention backends and graphs.
        attention: the target model's. Whether it has a window is certain once the model is loaded.
    """

    config: HvdConfig
    model_tree_width: int
    widths: VerifyWidths
    has_width_states: bool
    attention: TargetAttention

    @property
    def num_model_nodes(self) -> int:
        """Nodes of the model drafter's tree, root not included."""
        return self.model_tree_width - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, tuple(getattr(self, field.name) for field in fields(self))


def launch_of(server_args: ServerArgs) -> HvdLaunch | None:
    """The launch that was resolved for these arguments; None on a server without HVD."""
    return server_args.__dict__.get("_hvd_launch")


def served_launch() -> HvdLaunch | None:
    """The launch of the server that this process belongs to; None on a server without HVD, and in a
    process without a server."""
    try:
        server_args = get_context().server_args
    except ValueError:
        return None
    return launch_of(server_args)


def _arrive(*launch: Any) -> HvdLaunch:
    # Runs when a scheduler process unpickles its arguments. Without this check, a process in which
    # the plugin failed to load would serve plain EAGLE3 under the name of HVD.
    from sglang_hvd.plugin.startup.supported import require_hooks

    require_hooks()
    return HvdLaunch(*launch)
