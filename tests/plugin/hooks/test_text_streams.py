"""The pieces of a stream join to the reply's text, whatever the tokens and wherever pieces end."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict
from sglang.srt.managers.io_struct import BatchTokenIDOutput, unwrap_from_pickle, wrap_as_pickle
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_hvd.plugin.hooks.text_streams import STOPS_KEY, new_texts

WORDS = [
    " the",
    "a",
    "b ",
    "STOP",
    "ST",
    "OP",
    "\n",
    "中",
    "é",
    "👩",
    "\N{ZERO WIDTH JOINER}",
    "e\u0301",
]
END, PAD = "</s>", "<pad>"
STOPS = ["STOP", "OPa", "ab", "中S", "é", "the\n", "aab"]

Decode = Callable[[DetokenizerManager, BatchTokenIDOutput], list[str]]


def decode_as_sglang(manager: DetokenizerManager, output: BatchTokenIDOutput) -> list[str]:
    """SGLang's own method, whether plugins have been loaded or not."""
    decode: Decode = inspect.unwrap(DetokenizerManager._decode_batch_token_id_output)
    return decode(manager, output)


def _byte_level() -> Tokenizer:
    """Every byte is a token, as are the words, some of which end inside a character."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    for word in WORDS:
        spelled = to_bytes.pre_tokenize_str(word)[0][0]
        pieces += [spelled, spelled[:-1], spelled[1:], spelled + spelled[:1]]
    unique = [piece for piece in dict.fromkeys(pieces) if piece]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(unique)}, []))
    tokenizer.pre_tokenizer = to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """Words with spaces as in Llama 2, and a token for each byte that is in none of them."""
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [*(word.replace(" ", "▁") for word in WORDS), "▁", "b"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            *(decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)),
        ]
    )
    return tokenizer


def _manager(tokenizer: Tokenizer) -> DetokenizerManager:
    """SGLang's detokenizer without its sockets."""
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    manager = object.__new__(DetokenizerManager)
    manager.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD
    )
    manager.vocab_size = len(manager.tokenizer)
    manager.decode_status = LimitedCapacityDict(capacity=64)
    manager.disable_tokenizer_batch_decode = False
    manager.is_tool_call_parser_gpt_oss = False
    manager.tool_close_token_ids = set()
    return manager


TOKENIZERS = {"byte level": _byte_level, "byte fallback": _byte_fallback}
NO_FIELDS = {each.name: None for each in msgspec.structs.fields(BatchTokenIDOutput)}


def _output(requests: Sequence[dict[str, Any]]) -> BatchTokenIDOutput:
    """What the scheduler sends of these requests."""
    columns = {name: [request[name] for request in requests] for name in requests[0]}
    stops = columns.pop("stops")
    return BatchTokenIDOutput(
        **{
            **NO_FIELDS,
            **columns,
            "customized_info": wrap_as_pickle({"of_another": [], STOPS_KEY: stops}),
        }
    )


def _request(rid: str, token_ids: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "rids": rid,
        "decode_ids": array("q", token_ids),
        "decoded_texts": "",
        "read_offsets": 0,
        "finished_reasons": None,
        "no_stop_trim": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "stops": [],
        **fields,
    }


def _ends(length: int, last: int) -> st.SearchStrategy[list[int]]:
    """Where pieces of an output end. Pieces may be empty; the last has `last` tokens or more."""
    ends = st.lists(st.integers(0, length - last), max_size=8)
    return ends.map(lambda ends: [*sorted(ends), length])


@st.composite
def _replies(draw: st.DrawFn, manager: DetokenizerManager) -> dict[str, Any]:
    """A request's prompt, its output, how it ends, and where its pieces end."""
    size = manager.vocab_size
    encode = manager.tokenizer.backend_tokenizer.encode
    texts = st.text(st.sampled_from("aé中👩\u200d\u0301 \nST\ufffd"), max_size=8)
    token = st.one_of(
        st.integers(0, size - 1).map(lambda token_id: [token_id]),
        texts.map(lambda text: encode(text).ids),
        st.sampled_from([*WORDS, "STOP"]).map(lambda text: encode(text).ids),
    )
    tokens = st.lists(token, max_size=12).map(lambda parts: [i for part in parts for i in part])
    prompt, output = draw(tokens)[-5:], draw(tokens.filter(bool))
    stops = draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True))
    reason = draw(st.sampled_from(["length", "token", *stops]))
    matched = {"length": None, "token": output[-1]}.get(reason, reason)
    return {
        "prompt": prompt,
        "output": output,
        # A token that ends a request is in its last piece.
        "ends": draw(_ends(len(output), last=int(reason == "token"))),
        "reason": {"type": "stop", "matched": matched},
        "stops": stops,
        "no_stop_trim": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
    }


def _text(
    manager: DetokenizerManager, reply: dict[str, Any], decode: Decode, ends: Sequence[int]
) -> str:
    """The text of all pieces that end at these tokens of the output."""
    settings = {key: reply[key] for key in ("stops", "no_stop_trim", "skip_special_tokens")}
    manager.decode_status.clear()
    pieces = []
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        token_ids = reply["output"][start:end]
        request = _request(
            *("a", [*reply["prompt"], *token_ids] if number == 0 else token_ids),
            read_offsets=len(reply["prompt"]),
            finished_reasons=reply["reason"] if number == len(ends) - 1 else None,
            **settings,
        )
        pieces += decode(manager, _output([request]))
    assert not manager.decode_status
    return "".join(pieces)


@pytest.fixture(scope="module")
def managers() -> dict[str, DetokenizerManager]:
    """A detokenizer per kind of tokenizer. Every test leaves it without requests."""
    return {kind: _manager(make()) for kind, make in TOKENIZERS.items()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_text_of_all_tokens_at_once(
    managers: dict[str, DetokenizerManager], kind: str, data: st.DataObject
) -> None:
    manager = managers[kind]
    reply = data.draw(_replies(manager))
    whole = _text(manager, reply, decode_as_sglang, [len(reply["output"])])
    assert _text(manager, reply, new_texts, reply["ends"]) == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_is_sent_as_soon_as_it_cannot_change(
    managers: dict[str, DetokenizerManager], kind: str
) -> None:
    manager = managers[kind]
    manager.decode_status.clear()
    encode = manager.tokenizer.backend_tokenizer.encode
    sent = []
    for text in ("ab", " ST", "O", "a", "OP"):
        output = _output([_request("a", encode(text).ids, stops=["STOP", "OPa"])])
        sent += new_texts(manager, output)
    assert sent == ["ab", " ", "", "STOa", ""]


def test_requests_of_a_batch_are_decoded_apart_and_keep_their_stop_strings_to_themselves(
    managers: dict[str, DetokenizerManager],
) -> None:
    manager = managers["byte level"]
    manager.decode_status.clear()
    encode = manager.tokenizer.backend_tokenizer.encode
    stops = [["STOP"], [], ["x"]]
    texts = ["a 中 ST", "a 中 ST", "👩é"]
    requests = [
        _request(rid, encode(text).ids, stops=each, skip_special_tokens=rid != "b")
        for rid, text, each in zip("abc", texts, stops, strict=True)
    ]
    output = _output(requests)
    assert new_texts(manager, output) == ["a 中 ", "a 中 ST", "👩é"]
    assert unwrap_from_pickle(output.customized_info) == {"of_another": []}


def test_sglang_itself_repeats_characters(managers: dict[str, DetokenizerManager]) -> None:
    # Without this fault the detokenizer would need no hook.
    manager = managers["byte level"]
    text = "a 中é👩"
    output = manager.tokenizer.backend_tokenizer.encode(text).ids
    reply = {"prompt": [], "output": output, "reason": {"type": "length"}}
    reply |= {"stops": [], "no_stop_trim": False, "skip_special_tokens": True}
    ends = [6, 8, len(output)]  # both pieces end inside a character
    assert _text(manager, reply, decode_as_sglang, ends) == "a 中中é👩"
    assert _text(manager, reply, new_texts, ends) == text
