"""Flags and a file mean the same, and help tells the defaults as they would be given."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml
from sglang.srt.server_args import ServerArgs

from sglang_hvd.config import FLAGS, HvdConfig, load_config, option_name
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
    assert given[::2] == [option_name(name) for name in FLAGS]
    _, overrides = config_file_and_overrides(parsed(*given))
    assert HvdConfig(**overrides) == HvdConfig()


def test_flags_are_read_as_a_file_is(tmp_path: Path) -> None:
    settings = {"threshold": 6.5, "calibrate": False, "narrow_widths": [4, 8], "policy": "payoff"}
    file = tmp_path / "hvd.yaml"
    file.write_text(yaml.safe_dump(settings))
    flags = [*("--hvd-threshold", "6.5", "--hvd-set", "calibrate=false")]
    flags += [*("--hvd-set", "narrow_widths=[4, 8]", "--hvd-policy", "payoff")]
    path, overrides = config_file_and_overrides(parsed("--hvd-config", str(file), *flags))
    assert path == file
    assert overrides == settings == yaml.safe_load(file.read_text())


def test_a_value_that_yaml_cannot_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"^--hvd-set narrow_widths: cannot read the value '\[4'$"):
        config_file_and_overrides(parsed("--hvd-set", "narrow_widths=[4"))


def test_every_setting_can_be_set_by_its_key() -> None:
    pairs = [f"{name}={value}" for name, value in HvdConfig().model_dump(mode="json").items()]
    flags = [word for pair in pairs for word in ("--hvd-set", pair.replace("None", "null"))]
    _, overrides = config_file_and_overrides(parsed(*flags))
    assert HvdConfig(**overrides) == HvdConfig()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--hvd-set", "calibrate"), "^--hvd-set calibrate: give a key and a value"),
        (("--hvd-set", "=1"), "^--hvd-set =1: give a key and a value"),
        (("--hvd-set", "max_depth=8", "--hvd-set", "max_depth=9"), "max_depth is given twice"),
        (("--hvd-policy", "model", "--hvd-set", "policy=cache"), "policy is given twice"),
    ],
)
def test_a_setting_that_is_no_pair_or_is_given_twice_is_refused(
    flags: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        config_file_and_overrides(parsed(*flags))


def test_a_key_that_does_not_exist_is_named_with_those_that_do() -> None:
    _, overrides = config_file_and_overrides(parsed("--hvd-set", "max_dept=8"))
    with pytest.raises(ValueError, match=r"^--hvd-set max_dept: unknown key; the keys are policy"):
        load_config(None, overrides, {})


def test_a_record_that_no_command_line_made_has_no_flags() -> None:
    made = ServerArgs(model_path="none", device="cpu")
    assert not is_from_command_line(made)
    assert config_file_and_overrides(made) == (None, {})
    assert is_from_command_line(parsed())
    assert config_file_and_overrides(parsed()) == (None, {})
