"""The table of what the parts of a decode step cost, on one machine with one model."""

import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_hvd.yaml_text import parse_yaml

Float64 = npt.NDArray[np.float64]


class StepCosts(BaseModel):
    """A table of times in milliseconds. Between its entries times are on straight lines, and beyond
    the last entry on the last line.

    about: for people; the model, the machine and how the times were found.
    batch_sizes: numbers of requests, rising from 1.
    widths: nodes that one request verifies, root included, rising from 1, a plain step.
    verify: a step of the target model, by batch size and width.
    draft_round: a round of the model drafter, by the number of requests that draft.
    draft_once: what a draft of the model drafter takes in addition to its rounds, by the same
        number; None: nothing.
    draft_extend: the update of the model drafter's KV cache, by batch size and width.
    context: what a step of the target model takes in addition to `verify` for every 1,000 tokens in
        the KV caches of its requests, all together; None: `verify` includes the contexts.
    wait: by batch size, the time that the device waits for the host before a step that is planned
        from the tokens of the last one, where plain steps do not wait; None: no step waits, or
        `verify` includes the wait.

    More requests or more nodes never cost less, except that the wait may be shorter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    about: str
    batch_sizes: tuple[int, ...]
    widths: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft_round: tuple[float, ...]
    draft_extend: tuple[tuple[float, ...], ...]
    draft_once: tuple[float, ...] | None = None
    context: float | None = Field(default=None, ge=0)
    wait: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _is_a_table(self) -> "StepCosts":
        for name in ("batch_sizes", "widths"):
            values = getattr(self, name)
            if len(values) < 2 or values[0] != 1 or any(np.diff(values) < 1):
                raise ValueError(f"{name} must rise from 1 in two or more steps")
        shape = (len(self.batch_sizes), len(self.widths))
        for name, wanted in (
            ("verify", shape),
            ("draft_round", shape[:1]),
            ("draft_extend", shape),
            ("draft_once", shape[:1]),
            ("wait", shape[:1]),
        ):
            rows = getattr(self, name)
            if rows is None:
                continue
            lengths = {len(row) for row in rows} if len(wanted) == 2 else set(wanted[1:])
            if len(rows) != wanted[0] or lengths != set(wanted[1:]):
                raise ValueError(f"{name} must have {' x '.join(map(str, wanted))} entries")
            times = np.asarray(rows, np.float64)
            if name == "wait":
                if (times < 0).any():
                    raise ValueError("wait must not be negative")
                continue
            if (times < 0).any() or any(
                (np.diff(times, axis=axis) < 0).any() for axis in range(times.ndim)
            ):
                raise ValueError(f"{name} must not be negative and never fall along an axis")
        if self.verify[0][0] <= 0:
            raise ValueError("verify: a plain step takes time")
        return self

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "StepCosts":
        """Checked like any other table, without what the original has cached. deep makes no
        difference, since nothing in a table can change."""
        return type(self).model_validate({**self.model_dump(), **(update or {})})

    @classmethod
    def assumed(cls, widths: Sequence[int]) -> "StepCosts":
        """A made-up table for a server that is not timed before it serves.

        widths: nodes per request that its steps can verify, root included.
        """
        batch_sizes, columns = tuple(2**k for k in range(9)), sorted({1, 2, *widths})
        nodes = np.outer(batch_sizes, columns)
        return cls(
            about="assumed",
            batch_sizes=batch_sizes,
            widths=tuple(columns),
            verify=(5.0 + 0.02 * nodes).tolist(),
            draft_round=tuple(0.5 + 0.02 * n for n in batch_sizes),
            draft_extend=(0.5 + 0.002 * nodes).tolist(),
        )

    @classmethod
    def load(cls, path: Path) -> "StepCosts":
        """Reads a YAML or JSON file. Raises ValueError in one line."""
        try:
            return cls.from_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: cannot read the cost table: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}: the cost table is not a text file") from None
        except ValueError as error:
            raise ValueError(f"{path}: cost table: {error}") from None

    @classmethod
    def from_yaml(cls, text: str) -> "StepCosts":
        """The table that to_yaml wrote. Raises ValueError, in one line, for anything else."""
        return cls.of(parse_yaml(text))

    @classmethod
    def of(cls, fields: object) -> "StepCosts":
        """The table of these fields. Raises ValueError, in one line, if they make no table."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{name}: " for name in first["loc"])
            raise ValueError(where + first["msg"].removeprefix("Value error, ")) from None

    def to_yaml(self) -> str:
        """The file that load reads."""
        lines = [
            "# Milliseconds, by batch size; verify and draft_extend a row for each, by width.",
            f"about: {json.dumps(self.about)}",  # one line, whatever it holds
        ]
        if self.context is not None:
            lines.append(f"context: {self.context:g}")
        optional = [name for name in ("draft_once", "wait") if getattr(self, name) is not None]
        for name in ("batch_sizes", "widths", "draft_round", *optional):
            lines.append(f"{name}: {_row(getattr(self, name))}")
        for name in ("verify", "draft_extend"):
            lines.append(f"{name}:")
            lines += [f"  - {_row(row)}" for row in getattr(self, name)]
        return "\n".join(lines) + "\n"

    def verify_ms(self, batch_size: int, widths: Sequence[int]) -> Float64:
        """Milliseconds of a step that verifies so many nodes per request: float64[num_widths]."""
        return self._at(self._verify, batch_size, widths)

    def context_ms(self, num_context: int) -> float:
        """Milliseconds that a step of the target model takes in addition to verify_ms if its
        requests have so many tokens in their KV caches, all together."""
        return (self.context or 0.0) * num_context / 1000

    def draft_extend_ms(self, batch_size: int, widths: Sequence[int]) -> Float64:
        """Milliseconds of a draft-extend over so many tokens per request: float64[num_widths]."""
        return self._at(self._draft_extend, batch_size, widths)

    def catch_up_ms(self, num_requests: Sequence[int], num_tokens: int) -> Float64:
        """Milliseconds of a draft-extend over so many tokens of each request, by the number of
        requests: float64[len(num_requests)], 0 for none."""
        numbers = np.asarray(num_requests)
        [of_batch] = interpolate(np.array([num_tokens]), self.widths, self._draft_extend.T)
        times = interpolate(numbers, self.batch_sizes, np.maximum.accumulate(of_batch))
        return np.where(numbers > 0, times, 0.0)

    def draft_ms(self, num_requests: Sequence[int], num_steps: int) -> Float64:
        """Milliseconds of a draft of the model drafter, by the number of requests that draft:
        float64[len(num_requests)], 0 for none. Draft-extend yields its first tokens, so it runs a
        round less than it has steps."""
        numbers = np.asarray(num_requests)
        times = np.asarray(self.draft_round, np.float64) * (num_steps - 1)
        if self.draft_once is not None:
            times = times + np.asarray(self.draft_once)
        return np.where(numbers > 0, interpolate(numbers, self.batch_sizes, times), 0.0)

    def wait_ms(self, num_requests: int) -> float:
        """Milliseconds between a step of so many requests and one that waits for its tokens."""
        if self.wait is None:
            return 0.0
        [found] = interpolate(np.array([num_requests]), self.batch_sizes, np.array(self.wait))
        return max(float(found), 0.0)

    @cached_property
    def _verify(self) -> Float64:
        return np.array(self.verify, np.float64)

    @cached_property
    def _draft_extend(self) -> Float64:
        return np.array(self.draft_extend, np.float64)

    def _at(self, table: Float64, batch_size: int, widths: Sequence[int]) -> Float64:
        [row] = interpolate(np.array([batch_size]), self.batch_sizes, table)
        # Beyond the last batch size the lines of two widths may cross.
        return interpolate(np.asarray(widths), self.widths, np.maximum.accumulate(row))


def interpolate(places: npt.NDArray[np.int64], knots: Sequence[int], values: Float64) -> Float64:
    """Values at places along their first axis, on lines between the knots. Places before the first
    knot have its value, those beyond the last follow the last line."""
    found = np.asarray(knots, np.float64)
    left = np.clip(np.searchsorted(found, places, side="right") - 1, 0, len(found) - 2)
    share = (np.maximum(places, found[0]) - found[left]) / (found[left + 1] - found[left])
    share = share.reshape(-1, *[1] * (values.ndim - 1))
    # In this form what is level stays level to the last bit.
    return np.asarray(values[left] + share * (values[left + 1] - values[left]))


def shares_of(places: npt.NDArray[np.int64], knots: Sequence[int]) -> Float64:
    """What each knot counts for at each place, float64[num_places, num_knots]. Beyond the last knot
    it is that one alone."""
    return interpolate(np.minimum(places, knots[-1]), knots, np.eye(len(knots)))


def rising(times: Float64) -> Float64:
    """The least table of two axes that is nowhere below these times and never falls."""
    found: Float64 = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
    return found


def capped(times: Float64, weights: Float64) -> Float64:
    """Limits each entry to the larger entries, of as many requests and nodes or more, that have as
    much weight: an entry that was timed on a disturbed machine must not raise all of them."""
    has_weight = weights.ravel() >= weights.ravel()[:, None]
    caps = np.where(_are_larger(times.shape) & has_weight, times.ravel(), np.inf).min(axis=1)
    found: Float64 = np.minimum(times, caps.reshape(times.shape))
    return found


@cache
def _are_larger(shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Whether entry j of a table is of as many requests and nodes as entry i, or more."""
    rows, columns = (place.ravel() for place in np.indices(shape))
    are_larger: npt.NDArray[np.bool_] = (rows >= rows[:, None]) & (columns >= columns[:, None])
    return are_larger


def _row(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"
