"""The shared cache of a server as its administrator handles it, without a server."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.io_struct import DumperControlReqInput, msgpack_decode, msgpack_encode
from sglang.srt.runtime_context import get_context
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.requests.served_cache import ServedCache
from sglang_hvd.suffix_cache import SharedOutputs, namespace_name
from sglang_hvd.suffix_cache.orders import (
    AddOutputs,
    Erase,
    ListContents,
    Resize,
    SaveSnapshot,
    read_order,
)
from sglang_hvd.suffix_cache.snapshot import write_snapshot

VOCAB_SIZE = 1000
WORDS = {"a": 0, "b": 1, "c": 2, "<eos>": 3}


@pytest.fixture(autouse=True)
def tokenizer(tmp_path: Path) -> Iterable[Path]:
    """The served tokenizer's folder."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="c"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>").save_pretrained(folder)
    with get_context().override_server_args(tokenizer_path=str(folder)):
        yield folder


def served(*, group: int = 0, ranks: RankGroup | None = None, **settings: Any) -> ServedCache:
    config = HvdConfig(policy="cache", **settings)
    drafter = HybridDrafter.from_config(
        config,
        token_strings=[],
        num_model_steps=3,
        num_model_nodes=3,
        verify_width=32,
        deterministic=True,
    )
    return ServedCache(
        drafter, config, ranks=ranks or RankGroup(), group=group, vocab_size=VOCAB_SIZE
    )


def texts(*lists: list[int], namespace: str = "") -> SharedOutputs:
    return SharedOutputs.of_texts([np.array(ids, np.int32) for ids in lists], namespace)


def give(cache: ServedCache, order: Any) -> dict[str, Any]:
    """Carry out an order as it travels from a client to a scheduler."""
    body = json.loads(json.dumps(order.model_dump()))
    request = msgpack_decode(msgpack_encode(DumperControlReqInput(method="hvd_cache", body=body)))
    answer = cache.answer(read_order(request.body))
    return json.loads(json.dumps(answer))


def held(cache: ServedCache) -> dict[str, int]:
    """Tokens of each namespace."""
    contents = give(cache, ListContents())
    while contents["num_pending_tokens"]:
        contents = give(cache, ListContents())
    return {found["name"]: found["num_tokens"] for found in contents["namespaces"]}


def test_texts_enter_the_namespace_that_requests_of_a_salt_have() -> None:
    cache = served()
    mine = namespace_name("salt")
    give(cache, AddOutputs.of(texts([1, 2, 3], [4]), tokenizer=""))
    give(cache, AddOutputs.of(texts([5, 6], namespace=mine), tokenizer=""))
    assert held(cache) == {"": 4, mine: 2}
    give(cache, Erase(namespace=mine))
    assert held(cache) == {"": 4}
    give(cache, Resize(shared_cache_tokens=2))
    assert held(cache) == {"": 1}
    give(cache, Erase())
    assert held(cache) == {}


def test_without_a_tokenizer_an_order_is_refused_and_no_server_ends(tmp_path: Path) -> None:
    cache = served()
    (tmp_path / "empty").mkdir()
    with (
        get_context().override_server_args(tokenizer_path=str(tmp_path / "empty")),
        pytest.raises(ValueError, match="the model's tokenizer cannot be loaded") as error,
    ):
        give(cache, ListContents())
    assert "\n" not in str(error.value)


def test_texts_of_another_tokenizer_and_unknown_tokens_are_refused() -> None:
    cache = served()
    ours = give(cache, ListContents())["tokenizer"]
    give(cache, AddOutputs.of(texts([1]), tokenizer=ours))
    with pytest.raises(ValueError, match=f"of tokenizer f+, the one that is served is {ours}"):
        give(cache, AddOutputs.of(texts([1]), tokenizer="f" * 16))
    with pytest.raises(ValueError, match="token 1000 is not in the model's vocabulary"):
        give(cache, AddOutputs.of(texts([1, VOCAB_SIZE]), tokenizer=ours))
    assert held(cache) == {"": 1}


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"do": "dance"},
        {"do": "erase", "namespace": "a client's"},
        {"do": "resize", "shared_cache_tokens": -1},
        {"do": "list", "more": 1},
        {**AddOutputs.of(texts([1]), tokenizer="").model_dump(), "token_ids": "#"},
        {**AddOutputs.of(texts([1]), tokenizer="").model_dump(), "token_ids": "AAA="},
        {**AddOutputs.of(texts([1]), tokenizer="").model_dump(), "lengths": [2]},
        {**AddOutputs.of(texts([1]), tokenizer="").model_dump(), "lengths": [2**40]},
        {**AddOutputs.of(texts([1]), tokenizer="").model_dump(), "spaces": [1]},
        {**AddOutputs.of(texts([1]), tokenizer="").model_dump(), "spaces": [-1]},
    ],
)
def test_what_is_no_order_is_refused_in_one_line(body: Any) -> None:
    cache = served()
    with pytest.raises(ValueError) as error:  # noqa: PT011
        cache.answer(read_order(body))
    assert "\n" not in str(error.value)
    assert held(cache) == {}


def test_a_server_starts_with_its_snapshot_and_saves_it_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    for num_tokens in (3, 6):
        cache = served(snapshot=path)
        cache.close()  # it ends while it starts
        cache.fill()
        give(cache, AddOutputs.of(texts([1, 2, 3]), tokenizer=""))
        cache.close()
        assert held(cache) == {"": num_tokens}
    # Data-parallel groups have a snapshot each.
    other = served(snapshot=path, group=1)
    other.fill()
    assert held(other) == {}
    other.close()
    assert sorted(file.name for file in tmp_path.glob("kept*")) == ["kept", "kept.1"]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT acts as in a terminal; a shell may have started the tests without it."""
    before = (
        signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.getsignal(signal.SIGTERM),
    )
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_the_snapshot_and_goes_on_to_what_it_did_before(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    cache = served(snapshot=path)
    cache.fill()
    give(cache, AddOutputs.of(texts([1, 2, 3]), tokenizer=""))
    assert not path.exists()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    again = served(snapshot=path)
    again.fill()
    assert held(again) == {"": 3}
    again.close()


def test_a_snapshot_that_does_not_fit_is_said_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kept"
    write_snapshot(path, [texts([1])], fingerprint="f" * 16)
    cache = served(snapshot=path)
    cache.fill()
    assert "is of tokenizer ffffffffffffffff" in caplog.text
    assert "the shared cache starts cold" in caplog.text
    ours = give(cache, ListContents())["tokenizer"]
    cache.close()
    write_snapshot(path, [texts([VOCAB_SIZE])], fingerprint=ours)
    cache = served(snapshot=path)
    cache.fill()
    assert "has tokens that the model does not know" in caplog.text
    assert held(cache) == {}
    cache.close()


def test_the_texts_of_a_folder_enter_after_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "ids.jsonl").write_text('[1, 2]\n{"prompt_ids": [7], "output_ids": [3, 4, 5]}\n')
    (folder / "plain.txt").write_text("a b\nc a\n")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b a"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    cache = served(warm_from=folder)
    cache.fill()
    while not give(cache, ListContents())["warm_up"]["is_done"]:
        cache.warm(is_idle=True)
    assert held(cache) == {"": 2 + 3 + 4 + 3}
    # What cannot be read ends no server: the start refuses it before.
    lacking = served(warm_from=tmp_path / "none")
    lacking.fill()
    while (state := give(lacking, ListContents())["warm_up"])["error"] is None:
        lacking.warm(is_idle=False)
    assert "cannot read the texts: No such file" in state["error"]
    assert served().describe() == {"snapshot": None, "warm_up": None}


def test_a_snapshot_is_saved_where_an_administrator_says(tmp_path: Path) -> None:
    cache = served()
    with pytest.raises(ValueError, match="give the absolute path"):
        give(cache, SaveSnapshot(path="here"))
    give(cache, AddOutputs.of(texts([1, 2]), tokenizer=""))
    assert held(cache) == {"": 2}
    give(cache, SaveSnapshot(path=str(tmp_path / "one")))
    cache.close()
    saved = give(cache, ListContents())["snapshot"]
    assert (saved["num_done"], saved["num_tokens"]) == (1, 2)
    assert saved["path"] == str(tmp_path / "one")
