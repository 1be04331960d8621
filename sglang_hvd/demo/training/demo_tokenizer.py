"""The demo tokenizer: byte-level BPE that is trained on the corpus, with ChatML messages."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_hvd.demo.corpus.session import Session

PAD, START, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, START_ID, END_ID = range(3)  # the trainer numbers special tokens first

# A newline includes the line number or indentation after it, and a bar the indentation after it, so
# that lines begin with the same word token at every depth. A word includes one leading space,
# underscore or dot. A number includes no prefix and is split the same way everywhere, so that
# copying it never changes its tokens.
_PIECES = r"\n\p{N}+|\n *|\| *|[ _.]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(sessions: Iterable[Session], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE with at most `vocab_size` tokens. Decoding restores every encoded text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for session in sessions
        for turn in session.turns
        for text in (f"user\n{turn.user}", f"assistant\n{turn.assistant}")
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Spelling:
    """A token as a word and the form in which the word is written.

    For example ` name`, `_name`, `.name` and `Name` are one word in four forms.
    """

    word: str
    form: str


def spellings(tokenizer: Tokenizer) -> list[Spelling]:
    """The spelling of every token."""
    result: list[Spelling] = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        word = text.lstrip(" _.") or text
        if not word.isalpha():
            result.append(Spelling(text, ""))
            continue
        lead = text[: len(text) - len(word)]
        case = "AA" if word.isupper() else "Aa" if word[0].isupper() else "aa"
        result.append(Spelling(word.lower(), lead + case))
    return result


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_length: int) -> None:
    """Writes what `AutoTokenizer.from_pretrained(directory)` reads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
