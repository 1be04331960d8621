"""A test that runs its module as two ranks, each a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sglang_hvd.plugin.device.rank_group import RankGroup
from tests.e2e.forked_server import Nursery


def found_by_ranks(module: str, folder: Path, nursery: Nursery) -> list[Any]:
    """What rank 0 and rank 1 of the module found. Each is `python -m MODULE FOLDER RANK`, and calls
    `run_as_rank`."""
    logs = [folder / f"{rank}.log" for rank in range(2)]
    with ExitStack() as stack:
        ranks = [
            nursery.launch(
                [sys.executable, "-m", module, str(folder), str(rank)],
                {**os.environ},
                stack.enter_context(log.open("wb")),
            )
            for rank, log in enumerate(logs)
        ]
        assert [rank.wait() for rank in ranks] == [0, 0], [log.read_text() for log in logs]
    return [json.loads(_found(folder, rank).read_text()) for rank in range(2)]


def run_as_rank(find: Callable[[Path, int, RankGroup], object]) -> None:
    """Runs this process as the rank of its command line, and keeps what it finds.

    find: gets the folder, the rank and the group of both ranks.
    """
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    found = find(folder, rank, RankGroup(torch.distributed.group.WORLD))
    _found(folder, rank).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _found(folder: Path, rank: int) -> Path:
    return folder / f"found-{rank}.json"
