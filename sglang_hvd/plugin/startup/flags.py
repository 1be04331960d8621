"""The `--hvd-*` flags. Their texts and defaults come from HvdConfig, the one place that has
them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sglang_hvd.config import FLAGS, HvdConfig, option_name
from sglang_hvd.yaml_text import parse_yaml

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_PREFIX = "hvd_"
_CONFIG_FLAG, _SET_FLAG = "--hvd-config", "--hvd-set"


def add_hvd_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER hook of ServerArgs.add_cli_args."""
    group = parser.add_argument_group(
        "Hybrid Verified Decoding", "Used with --speculative-algorithm HVD."
    )
    group.add_argument(
        _CONFIG_FLAG,
        metavar="FILE",
        help="YAML file with settings; configs/default.yaml explains all of them. The command line "
        "overrides the file.",
    )
    # Values stay strings here: HvdConfig checks them, and answers with one line instead of a usage
    # page.
    for name in FLAGS:
        field = HvdConfig.model_fields[name]
        group.add_argument(
            option_name(name),
            metavar="VALUE",
            help=f"{field.description} (default: {_as_yaml(field.default)})",
        )
    others = [name for name in HvdConfig.model_fields if name not in FLAGS]
    group.add_argument(
        _SET_FLAG,
        metavar="KEY=VALUE",
        action="append",
        help="Any setting of the YAML file, for example --hvd-set calibrate=false; can be given "
        f"several times. Besides those that have flags: {', '.join(others)}.",
    )


def _as_yaml(default: object) -> str:
    """The default as it would be given to the flag."""
    return yaml.safe_dump(default).partition("\n")[0]


def keep_hvd_flags(
    from_cli_args: Callable[..., ServerArgs], cls: type[ServerArgs], args: argparse.Namespace
) -> ServerArgs:
    """AROUND hook of ServerArgs.from_cli_args: the flags travel on the record to every process."""
    server_args = from_cli_args(cls, args)
    server_args._hvd_flags = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX) and value is not None
    }
    return server_args


def config_file_and_overrides(server_args: ServerArgs) -> tuple[Path | None, dict[str, object]]:
    """The path of --hvd-config, and the settings of the other flags by field name.

    Values are read as YAML, so that a flag and a file mean the same by `6` or `true`.

    Raises ValueError for a value that YAML cannot read, and for a --hvd-set without a key or with a
    key that was given before.
    """
    given: dict[str, Any] = dict(server_args.__dict__.get("_hvd_flags", {}))
    config_file = given.pop("config", None)
    settings: dict[str, str] = {}
    for pair in given.pop("set", []):
        key, is_pair, value = pair.partition("=")
        if not key or not is_pair:
            raise ValueError(f"{_SET_FLAG} {pair}: give a key and a value, as in calibrate=false")
        if key in settings or key in given:
            raise ValueError(f"{_SET_FLAG} {pair}: {key} is given twice")
        settings[key] = value
    overrides = {name: _read(name, value) for name, value in {**given, **settings}.items()}
    return (Path(config_file) if config_file is not None else None), overrides


def _read(name: str, value: str) -> object:
    try:
        return parse_yaml(value)
    except ValueError:
        raise ValueError(f"{option_name(name)}: cannot read the value {value!r}") from None


def is_from_command_line(server_args: ServerArgs) -> bool:
    """Whether the record was parsed from a command line, not made by sgl.Engine or another
    caller."""
    return "_hvd_flags" in server_args.__dict__
