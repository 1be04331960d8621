"""Statistics of prompts: length, repetition and classes of tokens (paper, section 5.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hvd.payoff import TokenClasses
from sglang_hvd.payoff.token_classes import PAPER_CLASSES
from sglang_hvd.traces.trace import Trace
from sglang_hvd.types import TokenIds

# A place counts as repeated if so many tokens from it on occurred before.
_REPEATED_LEN = 4

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptCounts:
    """Counts over some requests, one entry per request. Requests that were recorded without their
    prompts have no entry in the first three.

    prompt_lens: int64[num_prompts], tokens.
    num_repeated: int64[num_prompts], runs of four tokens that occurred earlier in the prompt.
    num_of_class: int64[num_prompts, len(PAPER_CLASSES)], tokens of each class.
    output_lens: int64[num_requests], tokens.
    """

    prompt_lens: Counts
    num_repeated: Counts
    num_of_class: Counts
    output_lens: Counts

    @classmethod
    def of_traces(cls, traces: Sequence[Trace], token_classes: TokenClasses) -> "PromptCounts":
        prompts = [trace.prompt_ids for trace in traces if trace.has_prompt]
        by_class = [_num_of_class(prompt, token_classes) for prompt in prompts]
        return cls(
            np.array([len(prompt) for prompt in prompts], np.int64),
            np.array([num_repeated(prompt) for prompt in prompts], np.int64),
            np.array(by_class, np.int64).reshape(len(prompts), len(PAPER_CLASSES)),
            np.array([len(trace.output_ids) for trace in traces], np.int64),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["PromptCounts"]) -> "PromptCounts":
        """All requests of the parts, in order."""
        return cls(
            np.concatenate([part.prompt_lens for part in parts]),
            np.concatenate([part.num_repeated for part in parts]),
            np.concatenate([part.num_of_class for part in parts]),
            np.concatenate([part.output_lens for part in parts]),
        )

    @property
    def repeated_share(self) -> float | None:
        """Share of the prompts' runs of four tokens that occurred earlier in the same prompt."""
        num_runs = np.maximum(self.prompt_lens - _REPEATED_LEN + 1, 0).sum()
        return float(self.num_repeated.sum() / num_runs) if num_runs else None

    @property
    def class_shares(self) -> dict[str, float | None]:
        """Share of the prompts' tokens in each class. A token may be in several classes."""
        num_tokens = self.prompt_lens.sum()
        return {
            str(token_class.name).lower(): float(number / num_tokens) if num_tokens else None
            for token_class, number in zip(
                PAPER_CLASSES, self.num_of_class.sum(axis=0), strict=True
            )
        }


def num_repeated(token_ids: TokenIds) -> int:
    """Number of runs of four tokens that are equal to an earlier run."""
    num_runs = len(token_ids) - _REPEATED_LEN + 1
    if num_runs < 1:
        return 0
    # Number the pairs, then the pairs of pairs: exact, and faster than sorting rows of four.
    ids = token_ids.astype(np.int64)
    _, pairs = np.unique((ids[:-1] << 32) | ids[1:], return_inverse=True)
    return num_runs - len(np.unique((pairs[:-2] << 32) | pairs[2:]))


def _num_of_class(token_ids: TokenIds, token_classes: TokenClasses) -> list[int]:
    known = token_ids[token_ids < len(token_classes.flags)]
    flags = token_classes.flags[known]
    return [int(np.count_nonzero(flags & token_class)) for token_class in PAPER_CLASSES]
