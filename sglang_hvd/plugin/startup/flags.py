"""The `--hvd-*` flags, generated from HvdConfig so that defaults stand in one place."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from sglang_hvd.config import HvdConfig, flag_name
from sglang_hvd.yaml_text import parse_yaml

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_PREFIX = "hvd_"
_CONFIG_FLAG = "--hvd-config"


def add_hvd_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER hook of ServerArgs.add_cli_args: one flag per HvdConfig field, and --hvd-config."""
    group = parser.add_argument_group(
        "Hybrid Verified Decoding", "Used with --speculative-algorithm HVD."
    )
    group.add_argument(
        _CONFIG_FLAG,
        metavar="FILE",
        help="YAML file with HVD settings. A flag overrides the file, the file the default.",
    )
    for name, field in HvdConfig.model_fields.items():
        # Values stay strings here: HvdConfig checks them, with one line instead of a usage page.
        group.add_argument(
            flag_name(name),
            metavar="VALUE",
            help=f"{field.description} (default: {_as_yaml(field.default)})",
        )


def _as_yaml(default: object) -> str:
    """As the flag would have to be given."""
    return yaml.safe_dump(default).partition("\n")[0]


def keep_hvd_flags(
    from_cli_args: Callable[..., ServerArgs], cls: type[ServerArgs], args: argparse.Namespace
) -> ServerArgs:
    """AROUND hook of ServerArgs.from_cli_args: the flags ride on the record to every process."""
    server_args = from_cli_args(cls, args)
    server_args._hvd_flags = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX) and value is not None
    }
    return server_args


def config_file_and_overrides(server_args: ServerArgs) -> tuple[Path | None, dict[str, object]]:
    """Split the recorded flags into the --hvd-config path and the settings given one by one.

    A setting is read as YAML reads it, so that a flag and a file mean the same by `6` or `true`.
    """
    given: dict[str, str] = dict(server_args.__dict__.get("_hvd_flags", {}))
    config_file = given.pop("config", None)
    overrides = {name: _read(name, value) for name, value in given.items()}
    return (Path(config_file) if config_file is not None else None), overrides


def _read(name: str, value: str) -> object:
    try:
        return parse_yaml(value)
    except ValueError:
        raise ValueError(f"{flag_name(name)}: cannot read the value {value!r}") from None


def is_from_command_line(server_args: ServerArgs) -> bool:
    """Whether the record was parsed from a command line (else: sgl.Engine and other callers)."""
    return "_hvd_flags" in server_args.__dict__
