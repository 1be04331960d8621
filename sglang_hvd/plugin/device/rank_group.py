"""The tensor-parallel ranks of a server, which exchange values on the host."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed

_T = TypeVar("_T")


class RankGroup:
    """Exchanges values between ranks. All of them call its methods in the same order.

    process_group: their group on the host; None for a single process.
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.is_first = process_group is None or torch.distributed.get_rank(process_group) == 0

    def of_first(self, value: _T) -> _T:
        """The first rank's value, which is pickled for the others."""
        if self.process_group is None:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, group=self.process_group, group_src=0)
        return values[0]

    def of_all(self, value: _T) -> list[_T]:
        """Each rank's value, in the order of the ranks."""
        if self.process_group is None:
            return [value]
        values: list[Any] = [None] * torch.distributed.get_world_size(self.process_group)
        torch.distributed.all_gather_object(values, value, group=self.process_group)
        return values
