"""The demo tokenizer: byte-level BPE in which the words of the corpus are whole tokens."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_hvd.demo.corpus.session import Session

PAD, START, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, START_ID, END_ID = range(3)  # special tokens are numbered first

# A newline includes the line number or indentation after it, and a bar the indentation after it, so
# that lines begin with the same word token at every depth. A word includes one leading space,
# underscore or dot. A number includes no prefix and is split the same way everywhere, so that
# copying it never changes its tokens.
_PIECES = r"\n\p{N}+|\n *|\| *|[ _.]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(sessions: Iterable[Session], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE with at most `vocab_size` tokens. Decoding restores every encoded text.

    Every piece of the sessions is one token, as far as there is room. A word that is copied in
    another form is then still one token, which a small model copies without error. The rest of the
    vocabulary are the first merges of BPE, for other texts.
    """
    texts = [
        text
        for session in sessions
        for turn in session.turns
        for text in (f"user\n{turn.user}", f"assistant\n{turn.assistant}")
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = _tokenizer(models.WordLevel())
    pieces.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=vocab_size, show_progress=False)
    )
    by_frequency = sorted(pieces.get_vocab().items(), key=lambda item: item[1])
    bpe = _tokenizer(models.BPE())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    merges = [tuple(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]

    tokens = dict.fromkeys((*SPECIAL_TOKENS, *alphabet, *(piece for piece, _ in by_frequency)))
    tokens = dict.fromkeys(list(tokens)[:vocab_size])
    num_merges = 0
    for left, right in merges:
        if left + right not in tokens and len(tokens) == vocab_size:
            break
        tokens[left + right] = None
        num_merges += 1
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = _tokenizer(
        models.BPE(vocabulary, merges[:num_merges], ignore_merges=True)  # a known piece is a token
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _tokenizer(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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
