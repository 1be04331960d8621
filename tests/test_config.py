"""Where settings come from, which one wins, and what is said about a wrong one."""

import re
from pathlib import Path

import pytest
import yaml

from sglang_hvd.config import CONFIG_ENV, FLAGS, HvdConfig, load_config, option_name

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "hvd.yaml"
    path.write_text("threshold: 4.5\nmax_draft_tokens: 32\n")
    return path


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_without_flags_file_and_environment_the_defaults_hold() -> None:
    assert load_config(None, {}, {}) == HvdConfig()


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(config_file: Path) -> None:
    config = load_config(config_file, {"max_draft_tokens": 16}, {})
    assert (config.max_draft_tokens, config.threshold, config.policy) == (16, 4.5, "payoff")


def test_a_threshold_alone_asks_for_the_policy_that_has_one() -> None:
    assert load_config(None, {}, {}).policy == "allocate"
    assert load_config(None, {"threshold": 6}, {}).policy == "payoff"
    assert load_config(None, {"threshold": None}, {}).policy == "allocate"
    assert load_config(None, {"threshold": None, "policy": "both"}, {}).policy == "both"
    assert load_config(CONFIGS / "default.yaml", {"threshold": 6}, {}).policy == "payoff"


@pytest.mark.parametrize(
    "change",
    [
        {"polcy": "cache"},
        {"threshold": -3.0},
        {"policy": "cache", "wide_width": 64},
        {"cache_mode": "votes", "max_depth": 32},
    ],
)
def test_a_copy_is_checked_as_the_original_is(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(reversed(change))):
        HvdConfig(policy="payoff").model_copy(update=change)
    with pytest.raises(ValueError, match=next(reversed(change))):
        HvdConfig().for_policy("payoff", **{k: v for k, v in change.items() if k != "policy"})


def test_a_copy_has_what_it_is_given_and_the_rest_of_the_original() -> None:
    config = HvdConfig(verify_width=8, calibrate=False)
    copy = config.model_copy(update={"calibrate": True, "history_window": 4})
    assert copy == HvdConfig(verify_width=8, calibrate=True, history_window=4)
    assert copy.model_fields_set == {"verify_width", "calibrate", "history_window"}


def test_another_policy_does_not_take_what_it_does_not_read() -> None:
    by_cost = HvdConfig(wide_width=64, branches=False, cost_profile="skip", verify_width=8)
    assert by_cost.for_policy("allocate") == by_cost
    assert by_cost.for_policy("cache") == HvdConfig(policy="cache", verify_width=8)
    by_payoff = HvdConfig(threshold=4.5, max_draft_tokens=32)
    assert by_payoff.for_policy("both") == HvdConfig(policy="both", max_draft_tokens=32)
    assert by_payoff.for_policy("payoff") == by_payoff
    assert by_payoff.for_policy("payoff", threshold=None).threshold is None


def test_a_default_that_is_stated_goes_with_every_policy() -> None:
    stated = CONFIGS / "default.yaml"
    assert load_config(stated, {"policy": "cache"}, {}) == HvdConfig(policy="cache")


def test_a_flag_for_the_policy_does_not_take_what_only_another_one_reads(config_file: Path) -> None:
    config = load_config(config_file, {"policy": "model"}, {})
    assert (config.policy, config.threshold, config.max_draft_tokens) == ("model", None, 32)
    (config_file.parent / "by_cost.yaml").write_text("policy: allocate\nbranches: false\n")
    config = load_config(config_file.parent / "by_cost.yaml", {"threshold": 6}, {})
    assert (config.policy, config.branches) == ("payoff", True)
    with pytest.raises(ValueError, match=r"^--hvd-set branches: only policy allocate reads it"):
        load_config(config_file, {"policy": "model", "branches": False}, {})


def test_a_flag_can_bring_back_a_default_of_null(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("verify_width: 48\n")
    assert load_config(tmp_path / "wide.yaml", {}, {}).verify_width == 48
    assert load_config(tmp_path / "wide.yaml", {"verify_width": None}, {}).verify_width is None


def test_the_environment_names_the_file_where_no_flag_does(config_file: Path) -> None:
    assert load_config(None, {}, {CONFIG_ENV: str(config_file)}).max_draft_tokens == 32


def test_the_flag_for_the_file_wins_over_the_environment(config_file: Path) -> None:
    assert load_config(config_file, {}, {CONFIG_ENV: "/missing.yaml"}).max_draft_tokens == 32


def test_an_empty_environment_variable_names_no_file() -> None:
    assert load_config(None, {}, {CONFIG_ENV: ""}) == HvdConfig()


@pytest.mark.parametrize("key", ["predictor", "record"])
def test_a_path_in_a_file_starts_from_the_folder_of_the_file(config_file: Path, key: str) -> None:
    config_file.write_text(f"{key}: models/mine")
    assert getattr(load_config(config_file, {}, {}), key) == config_file.parent / "models" / "mine"


def test_a_predictor_in_a_flag_starts_from_the_working_directory() -> None:
    assert load_config(None, {"predictor": "mine.safetensors"}, {}).predictor == Path(
        "mine.safetensors"
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("treshold: 4", r"treshold: unknown key; the keys are policy, threshold"),
        ("threshold: high", r"threshold: input should be a valid number, got 'high'"),
        ("threshold: .nan", r"threshold: input should be a finite number, got nan"),
        ("threshold: true", r"threshold: input should be a valid number, got True"),
        ("threshold: -1", r"threshold: input should be greater than or equal to 0, got -1"),
        (
            "policy: best",
            r"policy: input should be 'allocate', 'payoff', 'frequency', 'cache', 'model' or "
            "'both'",
        ),
        ("{policy: payoff, wide_width: 64}", r"wide_width: only policy allocate reads it"),
        ("{policy: payoff, costs: c.yaml}", r"costs: only policy allocate reads it"),
        ("{policy: both, costs: /c.yaml}", r"policy allocate reads it.*, got /c\.yaml$"),
        ("{policy: both, threshold: 6}", r"threshold: only policy payoff reads it: set policy"),
        ("{policy: cache, branches: false}", r"branches: only policy allocate reads it"),
        ("{threshold: 6, cost_profile: skip}", r"cost_profile: only policy allocate reads it"),
        ("{policy: payoff, run_ahead: true}", r"run_ahead: only policy allocate reads it"),
        ("narrow_widths: [4, 2]", r"narrow_widths: widths must rise"),
        ("narrow_widths: [0, 2]", r"narrow_widths: widths must rise"),
        (
            "max_draft_tokens: 65",
            r"max_draft_tokens: in cache mode votes no draft is longer than 64 tokens",
        ),
        ("max_depth: 1", r"max_depth: input should be greater than or equal to 2, got 1"),
        ("max_depth: 32", r"max_depth: only cache mode paper reads it: set cache_mode"),
        ("max_depth: 8.5", r"max_depth: input should be a valid integer, got 8.5"),
        ("min_token_prob: 2", r"min_token_prob: input should be less than or equal to 1"),
        ("record_file_mb: 0", r"record_file_mb: input should be greater than or equal to 1"),
        (
            "record_total_mb: 100",
            r"record_total_mb: at least 128 \(two files of record_file_mb\), got 100",
        ),
        ("verify_width: 1", r"verify_width: input should be greater than or equal to 2"),
        ("1: 2", r"1: unknown key"),
        ("- threshold", r"is a mapping of field to value, got list"),
        ("threshold: [", r"not valid YAML"),
        ("threshold: 6\npolicy: payoff\nthreshold: 7", r"line 3: the key threshold is there twice"),
        ("\x00", r"not valid YAML"),
        ("threshold: 2024-13-45", r"not valid YAML: month must be in 1..12"),
        ("[" * 10_000, r"not valid YAML: too deeply nested"),
        ("threshold: !!int ''", r"not valid YAML"),
        ("threshold: !!bool x", r"not valid YAML"),
        ("threshold: !!timestamp x", r"not valid YAML"),
    ],
)
def test_a_wrong_file_is_named_with_key_and_value_in_one_line(
    config_file: Path, content: str, says: str
) -> None:
    config_file.write_text(content)
    with pytest.raises(ValueError, match=says) as error:
        load_config(config_file, {}, {})
    assert one_line(error).startswith(f"{config_file}: ")


def test_a_file_that_is_not_text_is_named(config_file: Path) -> None:
    config_file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="not a text file"):
        load_config(config_file, {}, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ValueError, match="cannot read the HVD config: No such file") as error:
        load_config(missing, {}, {})
    assert one_line(error).startswith(str(missing))


def test_a_wrong_flag_is_named_as_the_user_typed_it(config_file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^--hvd-set max_depth: input should be .* got 1$"
    ) as error:
        load_config(config_file, {"max_depth": 1}, {})
    one_line(error)


def test_a_default_that_a_flag_makes_wrong_is_named_as_its_flag() -> None:
    with pytest.raises(
        ValueError, match=r"^--hvd-set record_total_mb: at least 1200 \(two files of"
    ):
        load_config(None, {"record_file_mb": 600}, {})


def test_a_flag_heals_a_wrong_value_in_the_file(config_file: Path) -> None:
    config_file.write_text("threshold: high")
    assert load_config(config_file, {"threshold": 2.0}, {}).threshold == 2.0


def test_every_field_has_a_description_for_its_flag() -> None:
    assert all(field.description for field in HvdConfig.model_fields.values())
    assert option_name("max_draft_tokens") == "--hvd-set max_draft_tokens"


def test_every_field_is_told_of_in_a_document() -> None:
    root = CONFIGS.parent
    told = "".join(path.read_text() for path in (root / "README.md", *root.glob("docs/*.md")))
    names = {
        field: option_name(field) if field in FLAGS else rf"(`|set '?){field}\b"
        for field in HvdConfig.model_fields
    }
    assert [field for field, name in names.items() if not re.search(name, told)] == []


def test_default_yaml_explains_every_setting_as_the_help_does() -> None:
    paragraphs = (CONFIGS / "default.yaml").read_text().strip().split("\n\n")[1:]
    for name, paragraph in zip(HvdConfig.model_fields, paragraphs, strict=True):
        *comment, setting = paragraph.splitlines()
        assert setting.startswith(f"{name}: ")
        text = " ".join(line.removeprefix("# ") for line in comment)
        assert text == HvdConfig.model_fields[name].description


def test_default_yaml_states_every_default() -> None:
    stated = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert stated == HvdConfig().model_dump()
    assert load_config(CONFIGS / "default.yaml", {}, {}) == HvdConfig()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_is_a_valid_configuration(path: Path) -> None:
    load_config(path, {}, {})
