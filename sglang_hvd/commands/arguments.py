"""Arguments that several commands have, and types of arguments."""

import argparse
import math
import os
from pathlib import Path
from typing import get_args

from sglang_hvd.config import CacheMode, HvdConfig
from sglang_hvd.whole_file import check_place


def count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, got {text}")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to below 2^32, got {text}")
    return int(text)


def not_negative(text: str) -> float:
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"at least 0, got {text}")
    return number


def share(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"from 0 to below 1, got {text}")
    return number


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write. argparse reports errors."""
    try:
        check_place(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Adds --traces DIR, --tokenizer FILE and --eos-token TOKEN."""
    parser.add_argument(
        "--traces",
        "--from",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder or file of recordings (.hvdt), text traces or chat logs (.jsonl)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="FILE",
        help="tokenizer.json of the model that generated them",
    )
    parser.add_argument(
        "--eos-token",
        default="<|im_end|>",
        metavar="TOKEN",
        help="token that ends every output of text traces and chat logs; empty: no such token "
        "(default: %(default)s)",
    )


def add_cache_mode(
    parser: argparse.ArgumentParser, *, default: CacheMode | None = None, mode_of: str = ""
) -> None:
    """Adds --cache-mode.

    default: None if other options may name the mode; mode_of says which.
    """
    parser.add_argument(
        "--cache-mode",
        choices=get_args(CacheMode),
        default=default,
        help=f"how the suffix cache drafts{mode_of} (default: {default or HvdConfig().cache_mode})",
    )


def add_traces(parser: argparse.ArgumentParser, *, mode_of: str = "") -> None:
    add_texts(parser)
    add_cache_mode(parser, mode_of=mode_of)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of other settings, as --hvd-config"
    )
    parser.add_argument(
        "--processes",
        type=count,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="number of recordings that are replayed at a time (default: %(default)s)",
    )


def add_predictor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--predictor",
        type=Path,
        metavar="FILE",
        help="predictor (.safetensors) that decides (default: that of --config, or the one that "
        "ships)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json FILE. Its folder must exist, which is checked before hours are spent."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows as JSON")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number, got {text}") from None
