"""What an administrator asks of the shared cache of a running server, as JSON objects."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sglang_hvd.suffix_cache.outputs import SharedOutputs

# The load_format of an /update_weights_from_disk that means the cache and not the model. Its
# `manifest` is the order.
CACHE_LOAD_FORMAT = "hvd_cache"

_Name = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]  # as outputs.namespace_name makes them
_Numbers = Annotated[list[int], Field(max_length=1 << 20)]


class _Order(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AddOutputs(_Order):
    """Share these outputs. See SharedOutputs.

    tokenizer: fingerprint of the tokenizer of the tokens; empty: not known.
    token_ids: base64 of int32, little-endian, which a server reads faster than numbers.
    """

    do: Literal["add"] = "add"
    tokenizer: str = ""
    namespaces: list[_Name]
    spaces: _Numbers
    lengths: _Numbers
    kept_at: _Numbers
    token_ids: str

    @classmethod
    def of(cls, outputs: SharedOutputs, *, tokenizer: str) -> AddOutputs:
        token_ids = outputs.token_ids.astype("<i4", copy=False)
        return cls(
            tokenizer=tokenizer,
            namespaces=list(outputs.namespaces),
            spaces=outputs.spaces.tolist(),
            lengths=outputs.lengths.tolist(),
            kept_at=outputs.kept_at.tolist(),
            token_ids=base64.b64encode(token_ids.tobytes()).decode(),
        )

    def outputs(self) -> SharedOutputs:
        """Raises ValueError for outputs that cannot be."""
        try:
            content = base64.b64decode(self.token_ids, validate=True)
            return SharedOutputs(
                namespaces=self.namespaces,
                spaces=np.array(self.spaces, np.int32),
                lengths=np.array(self.lengths, np.int32),
                kept_at=np.array(self.kept_at, np.int64),
                token_ids=np.frombuffer(content, "<i4").astype(np.int32, copy=False),
            )
        except (binascii.Error, OverflowError) as error:
            raise ValueError(f"the outputs to add are not sound: {error}") from None


class ListContents(_Order):
    """Say what the cache holds."""

    do: Literal["list"] = "list"


class Erase(_Order):
    """Forget what a namespace shares. None: everything, and how accurate its drafts were."""

    do: Literal["erase"] = "erase"
    namespace: _Name | None = None


class Resize(_Order):
    """Change the budgets until the server ends. See SuffixCache.resize."""

    do: Literal["resize"] = "resize"
    shared_cache_tokens: Annotated[int, Field(ge=0, le=2**30)]
    namespace_cache_tokens: Annotated[int, Field(ge=0, le=2**30)] | None = None


class SaveSnapshot(_Order):
    """Write a snapshot.

    path: absolute, on the server's machine.
    """

    do: Literal["save"] = "save"
    path: str


Order = AddOutputs | ListContents | Erase | Resize | SaveSnapshot

_ORDERS: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="do")])


def read_order(body: Any) -> Order:
    """Raises ValueError, in one line, for anything that is no order."""
    try:
        return _ORDERS.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not an order to the cache: {where}: {first['msg']}") from None
