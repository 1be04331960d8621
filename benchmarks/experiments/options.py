"""Options of the experiments that replay recorded traces."""

import argparse
from collections.abc import Sequence

from benchmarks.command import parser_of
from sglang_hvd.commands.arguments import add_cache_mode, add_json, add_texts


def replay_options(
    name: str, description: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The options traces, tokenizer, eos_token, cache_mode and json. name: see parser_of."""
    parser = parser_of(name, description)
    add_texts(parser)
    add_cache_mode(parser, default="votes")
    add_json(parser)
    return parser.parse_args(arguments)
