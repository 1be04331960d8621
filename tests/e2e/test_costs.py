"""The engine times its steps before it serves, once for each kind of server and machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hvd.costs import StepCosts

TIMED = "timed on this server before it served"


def test_costs_are_timed_kept_and_used_at_the_next_start(
    start_hvd: Callable[..., Any], tmp_path: Path
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    wide = ("--hvd-set", "wide_width=48")
    server = start_hvd("allocate", *wide, environment=environment)
    assert server.hvd_state()["costs"]["about"].startswith(TIMED)
    [kept] = (tmp_path / "sglang_hvd" / "costs").iterdir()
    costs = StepCosts.load(kept)
    # Up to the largest batch, with the one up to which requests may verify the widest.
    assert costs.batch_sizes == (1, 2, 4, 16)
    assert costs.widths[-1] == 48  # the most that one request can verify
    assert costs.verify[-1][-1] > costs.verify[0][0]
    assert costs.draft_round[0] > 0
    assert costs.draft_extend[0][0] > 0

    kept.write_text(costs.model_copy(update={"about": "by hand"}).to_yaml())
    reported = ("--hvd-report-cycles", "true")
    again = start_hvd("allocate", *wide, *reported, environment=environment)
    assert again.hvd_state()["costs"]["about"].startswith("by hand")

    kept.write_text("verify: nothing")
    unreported = ("--hvd-report-cycles", "false")
    mended = start_hvd("allocate", *wide, *unreported, environment=environment)
    assert mended.hvd_state()["costs"]["about"].startswith(TIMED)
    assert "Costs are timed again" in mended.process.log
    assert StepCosts.load(kept).batch_sizes[-1] == 16


def test_without_a_profile_the_first_steps_tell(start_hvd: Callable[..., Any]) -> None:
    server = start_hvd("allocate", "--hvd-set", "cost_profile=skip")
    server.generate("1 2 3", max_new_tokens=24)
    assert server.hvd_state()["costs"]["about"] == "assumed, refined by its steps"
