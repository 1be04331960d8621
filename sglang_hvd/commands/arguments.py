"""Arguments that several commands take, and their types."""

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
    """The type of an argument that names a file to write. argparse says what is wrong with it."""
    try:
        check_place(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def add_cache_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="where the demo models are built on first use (default: sglang_hvd in $XDG_CACHE_HOME "
        "or ~/.cache)",
    )


def add_texts(parser: argparse.ArgumentParser) -> None:
    """`--traces DIR`, `--tokenizer FILE` and `--eos-token TOKEN`."""
    parser.add_argument(
        "--traces",
        "--from",
        type=Path,
        required=True,
        metavar="DIR",
        help="recordings (.hvdt), text traces or chat logs (.jsonl): a folder, or one file",
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json for them"
    )
    parser.add_argument(
        "--eos-token",
        default="<|im_end|>",
        metavar="TOKEN",
        help="ends every output of text traces and chat logs; empty: nothing does "
        "(default: %(default)s)",
    )


def add_cache_mode(
    parser: argparse.ArgumentParser, *, default: CacheMode | None = None, mode_of: str = ""
) -> None:
    """default: None where other options may name the mode, as mode_of says."""
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
        "--config", type=Path, metavar="FILE", help="other settings of the server, as --hvd-config"
    )
    parser.add_argument(
        "--processes",
        type=count,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="replay so many recordings at a time (default: %(default)s)",
    )


def add_predictor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--predictor",
        type=Path,
        metavar="FILE",
        help="default: that of --config, or else the one that ships",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, in a folder that is there: told before hours are spent on the rows."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the rows as JSON")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number, got {text}") from None
