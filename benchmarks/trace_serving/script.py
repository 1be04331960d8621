"""The script of a server: the texts to generate, and the acceptance of the model drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_hvd.traces.trace import Trace

Int32 = npt.NDArray[np.int32]

_RID = "trace"
_ACCEPTED = "accepted_"


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """Concatenated texts.

    token_ids: int32[num_tokens], prompts and outputs.
    starts: int64[num_texts], the place of each text's first token.
    accepted: int32[num_tokens] by the size of the model drafter's tree in nodes, root not counted:
        accepted tokens of a cycle that starts at this token; 0 in prompts.
    """

    token_ids: Int32
    starts: npt.NDArray[np.int64]
    accepted: Mapping[int, Int32]

    @classmethod
    def of(cls, traces: Sequence[Trace], accepted: Mapping[int, Sequence[Int32]]) -> "Script":
        """accepted: by size and trace, int32[num_output] for cycles that start at each token."""
        lengths = [len(trace.text_ids) for trace in traces]
        by_size = {
            size: np.concatenate(
                [
                    np.concatenate((np.zeros_like(trace.prompt_ids), of_trace))
                    for trace, of_trace in zip(traces, of_size, strict=True)
                ]
            )
            for size, of_size in accepted.items()
        }
        starts = np.cumsum([0, *lengths[:-1]])
        return cls(np.concatenate([trace.text_ids for trace in traces]), starts, by_size)

    def save(self, path: Path) -> None:
        """Writes the file that load reads."""
        accepted = {f"{_ACCEPTED}{size}": values for size, values in self.accepted.items()}
        np.savez(path, token_ids=self.token_ids, starts=self.starts, **accepted)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "Script":
        with np.load(path, allow_pickle=False) as file:
            accepted = {
                int(name.removeprefix(_ACCEPTED)): file[name]
                for name in file.files
                if name.startswith(_ACCEPTED)
            }
            return cls(file["token_ids"], file["starts"], accepted)

    def start_of(self, rid: str) -> int | None:
        """Place of the first token of a request's text; None if the request has no text."""
        name, _, rest = rid.partition("-")
        return int(self.starts[int(rest.partition("-")[0])]) if name == _RID else None


def rid_of(text: int, nonce: str) -> str:
    """A request id that tells the server which text the request generates."""
    return f"{_RID}-{text}-{nonce}"
