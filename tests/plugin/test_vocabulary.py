"""The served vocabulary's tokens as text."""

from pathlib import Path

import pytest
from sglang.srt.runtime_context import get_context
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_hvd.plugin.vocabulary import token_strings
from sglang_hvd.traces import tokenizer as tokenizer_file


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
