"""The served vocabulary's tokens as text."""

import json
from pathlib import Path

import pytest
from sglang.srt.runtime_context import get_context
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_hvd.plugin.startup.token_strings import served_fingerprint, token_strings
from sglang_hvd.traces import tokenizer_json as tokenizer_file
from sglang_hvd.traces.reader import read_traces
from sglang_hvd.traces.writer import TraceWriter


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "he", "Ġhe", "ĊĠ"]
    made = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("h", "e"), ("Ġ", "he"), ("Ċ", "Ġ")])
    )
    made.decoder = decoders.ByteLevel()
    return made


def sentencepiece() -> Tokenizer:
    made = Tokenizer(models.BPE({"a": 0, "\u2581a": 1, "\u2581": 2, ".": 3}, []))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@pytest.mark.parametrize(
    ("made", "texts"),
    [(byte_level(), {" he", "\n "}), (sentencepiece(), {"a", " a"})],
    ids=["byte-level", "pieces"],
)
def test_a_server_sees_the_tokens_that_training_saw(
    tmp_path: Path, made: Tokenizer, texts: set[str]
) -> None:
    made.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>").save_pretrained(tmp_path)
    # As SGLang resolves the path where it downloads the tokenizer itself.
    with get_context().override_server_args(tokenizer_path=str(tmp_path)):
        served = list(token_strings())
    assert served == tokenizer_file.token_strings(made)
    assert texts <= set(served)


def test_what_a_server_recorded_is_read_with_its_tokenizer_as_it_was_saved(tmp_path: Path) -> None:
    # Its tokenizer_config.json adds a token that its tokenizer.json lacks.
    file, saved = tmp_path / "tokenizer.json", tmp_path / "saved"
    byte_level().save(str(file))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with get_context().override_server_args(tokenizer_path=str(tmp_path)):
        recorded = served_fingerprint()
    path = tmp_path / "x.hvdt"
    with TraceWriter(path, tokenizer_fingerprint=recorded):
        pass
    with pytest.raises(
        ValueError, match=r"AutoTokenizer\.from_pretrained\(MODEL\)\.save_pretrained"
    ):
        list(read_traces(path, file))
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(saved)
    assert list(read_traces(path, saved / "tokenizer.json")) == []
