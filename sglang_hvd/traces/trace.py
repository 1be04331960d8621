"""One recorded generation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sglang_hvd.types import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One generation: the whole prompt and what the target model generated from it.

    prompt_ids, output_ids: int32[num_tokens].
    session, turn: the conversation it belongs to, and its place there.
    family: kind of workload, as in the paper's section 4.1; "recorded" from a live server.
    sampling: what the request asked of the sampler (temperature, top_p, top_k); empty: greedy, or
        not known.
    model: name of the target model; "": not known.
    tokenizer_fingerprint: see tokenizer.tokenizer_fingerprint; "": not known.
    namespace: requests of other namespaces share no suffix cache with it; "": the common one.
    is_cut: the output ends because it was long enough, not because the model ended it: what would
        have followed is not known.
    has_prompt: False where the prompt was left out; prompt_ids is empty then.
    text_digest: digest of what was read as text, equal with every tokenizer; "": read as tokens.
    """

    prompt_ids: TokenIds
    output_ids: TokenIds
    session: str
    turn: int
    family: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    tokenizer_fingerprint: str = ""
    namespace: str = ""
    is_cut: bool = False
    has_prompt: bool = True
    text_digest: str = ""

    def __post_init__(self) -> None:
        assert self.has_prompt or not len(self.prompt_ids), "left out, but there"

    @property
    def text_ids(self) -> TokenIds:
        """int32[num_tokens]; the prompt and the output."""
        return np.concatenate((self.prompt_ids, self.output_ids))
