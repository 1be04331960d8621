"""Flags and a file mean the same, and help tells the defaults as they would be given."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml
from sglang.srt.server_args import ServerArgs

from sglang_hvd.config import HvdConfig, flag_name
from sglang_hvd.plugin.startup.flags import (
    add_hvd_flags,
    config_file_and_overrides,
    is_from_command_line,
    keep_hvd_flags,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_hvd_flags(None, made)
    return made


def parsed(*arguments: str) -> ServerArgs:
    """SGLang's record with our flags; of its own it has none here."""

    def from_cli_args(cls: type[ServerArgs], _args: argparse.Namespace) -> ServerArgs:
        return cls(model_path="none", device="cpu")

    return keep_hvd_flags(from_cli_args, ServerArgs, parser().parse_args(arguments))


def test_the_default_in_the_help_is_the_default() -> None:
    given = []
    for action in parser()._actions:
        if found := re.search(r"\(default: (.*)\)$", action.help or ""):
            given += [action.option_strings[0], found[1]]
    assert given[::2] == [flag_name(name) for name in HvdConfig.model_fields]
    _, overrides = config_file_and_overrides(parsed(*given))
    assert HvdConfig(**overrides) == HvdConfig()


def test_flags_are_read_as_a_file_is(tmp_path: Path) -> None:
    settings = {"threshold": 6.5, "calibrate": False, "narrow_widths": [4, 8], "policy": "payoff"}
    file = tmp_path / "hvd.yaml"
    file.write_text(yaml.safe_dump(settings))
    flags = [*("--hvd-threshold", "6.5", "--hvd-calibrate", "false")]
    flags += [*("--hvd-narrow-widths", "[4, 8]", "--hvd-policy", "payoff")]
    path, overrides = config_file_and_overrides(parsed("--hvd-config", str(file), *flags))
    assert path == file
    assert overrides == settings == yaml.safe_load(file.read_text())


def test_a_value_that_yaml_cannot_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"^--hvd-narrow-widths: cannot read the value '\[4'$"):
        config_file_and_overrides(parsed("--hvd-narrow-widths", "[4"))


def test_a_record_that_no_command_line_made_has_no_flags() -> None:
    made = ServerArgs(model_path="none", device="cpu")
    assert not is_from_command_line(made)
    assert config_file_and_overrides(made) == (None, {})
    assert is_from_command_line(parsed())
    assert config_file_and_overrides(parsed()) == (None, {})
