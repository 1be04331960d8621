"""What the commands on recordings read and write: settings, recordings and results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hvd.config import HvdConfig, load_config
from sglang_hvd.payoff.predictor import AcceptancePredictor, feature_settings
from sglang_hvd.whole_file import write_whole

if TYPE_CHECKING:
    from sglang_hvd.replay.core.recordings import Recording, TraceTokenizer


def config_of(options: argparse.Namespace, *, has_predictor: bool = True) -> HvdConfig:
    """The settings of the command line and of --config. Settings that neither names are those for
    which the predictor was trained.

    has_predictor: False: the command trains a predictor, so a given one is ignored.

    Raises ValueError, in one line, if a setting differs from the predictor's.
    """
    given = {name: getattr(options, name, None) for name in ("cache_mode", "predictor")}
    settings = {name: value for name, value in given.items() if value is not None}
    asked = load_config(options.config, settings, {})
    if asked.predictor is None or not has_predictor:
        return asked
    trained = AcceptancePredictor.load(asked.predictor).settings
    unasked = {name: trained[name] for name in trained.keys() - asked.model_fields_set}
    # Some settings of a predictor only make sense with its cache mode.
    is_of_mode = "cache_mode" in unasked or asked.cache_mode == trained["cache_mode"]
    config = asked.model_copy(update=unasked) if is_of_mode else asked
    for name, wanted in feature_settings(config).items():
        if wanted != trained[name]:
            raise ValueError(
                f"predictor {asked.predictor} was trained for {name} {trained[name]}, but {wanted} "
                f"was given: drop that setting, or give another --predictor"
            )
    return config


@contextmanager
def open_recordings(
    options: argparse.Namespace,
) -> Iterator[tuple[list[Recording], TraceTokenizer]]:
    """The recordings and the tokenizer of the command line.

    Raises ValueError, in one line, if they cannot be used.
    """
    from sglang_hvd.replay.core.recordings import TraceTokenizer, find_recordings, held

    tokenizer = TraceTokenizer(options.tokenizer, options.eos_token)
    tokenizer.check()
    found = find_recordings(options.traces)
    _check_outputs(options, [recording.path for recording in found])
    tokenizer.check_chats(recording.path for recording in found)
    with held(found) as recordings:
        yield recordings, tokenizer


def _check_outputs(options: argparse.Namespace, recordings: list[Path]) -> None:
    """Checks the files that the command will write.

    Raises ValueError, in one line, if one would replace a file that the command reads or another
    one that it writes, or if it would be read as a recording the next time.
    """
    from sglang_hvd.replay.core.recordings import SUFFIXES

    names = ("tokenizer", "predictor", "config", "costs")
    given = [getattr(options, name, None) for name in names]
    read = [*recordings, *(path for path in given if path is not None)]
    taken = {path.resolve(): "read" for path in read}
    folder = options.traces.resolve()
    for name in ("json", "html", "output"):
        path: Path | None = getattr(options, name, None)
        if path is None:
            continue
        if (place := path.resolve()) in taken:
            raise ValueError(f"--{name} {path} is also {taken[place]}: name another file")
        if place.parent == folder and place.suffix in SUFFIXES:
            raise ValueError(
                f"--{name} {path} would be read as a recording the next time: write it to another "
                f"folder"
            )
        taken[place] = f"written by --{name}"


def write_results(options: argparse.Namespace, table: str, rows: list[dict[str, object]]) -> int:
    """Writes the rows to --json and prints the table."""
    # Write the file first: printing fails if the reader of stdout has closed it.
    if options.json is not None:
        write_whole(options.json, json.dumps(rows, indent=1, allow_nan=False).encode())
    print(table)
    return 0
