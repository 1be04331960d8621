"""The settings: flags, YAML file, environment and defaults meet here and nowhere else."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sglang_hvd.yaml_text import parse_yaml

Policy = Literal["allocate", "payoff", "frequency", "cache", "model", "both"]
CacheMode = Literal["votes", "paper"]
CostProfile = Literal["kept", "fresh", "skip"]
PostponeExtend = Literal["never", "plain", "always"]

# Predicted accepted length from which the paper verifies a cache draft (section 3.4).
PAPER_THRESHOLD = 6.0
# Accepted tokens from which a cache draft is worth its verification.
WORTH_LEN = math.ceil(PAPER_THRESHOLD)

# Names the YAML file where there are no flags (sgl.Engine).
CONFIG_ENV = "HVD_CONFIG"

# Verification of 32 tokens costs little more than of one while a GPU is bound by memory. 31 of
# them are drafted, beside the root.
DEFAULT_VERIFY_WIDTH = 32

# Default wide_width (steps of one or two requests), used only if at least 1.5 times verify_width.
_DEFAULT_WIDE_WIDTH, _LEAST_OVER_VERIFY_WIDTH = 64, 1.5

# Longest draft of the votes cache mode, which looks no further ahead.
MOST_VOTED_TOKENS = 64

# Settings that one policy alone reads.
_READER: Mapping[str, Policy] = {
    "threshold": "payoff",
    "costs": "allocate",
    "cost_profile": "allocate",
    "branches": "allocate",
    "wide_width": "allocate",
    "run_ahead": "allocate",
}


class HvdConfig(BaseModel):
    """All settings. A default is the paper's where the paper states one (appendices A and B), but
    for the policy, the threshold, the cache mode and min_token_prob."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    policy: Policy = Field(
        default="allocate",
        description="How a request chooses its draft. allocate: the cache draft, the model "
        "drafter's, both or none, and as much of them, as brings most in the time it takes. "
        "payoff: the cache draft if it is predicted to pay, else the model drafter; the default "
        "where a threshold is given. frequency: the "
        "cache draft if the suffix cache's score reaches frequency_threshold, else the model "
        "drafter. cache: the cache draft, a plain step without one. model: always the model "
        "drafter. both: always both drafts in one tree.",
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        description="payoff policy: accepted length, in tokens without the bonus token, from which "
        "a cache draft pays; the paper's is 6. Default: what the model drafter is predicted to "
        "bring this request now.",
    )
    frequency_threshold: float | None = Field(
        default=None,
        ge=0,
        description="frequency policy, and payoff while the predictor is off: suffix-cache score "
        "from which a cache draft is verified. "
        "Default: the number of steps the model drafter runs.",
    )
    costs: Path | None = Field(
        default=None,
        strict=False,
        description="allocate policy: table of what steps cost (YAML, see configs/costs). Default: "
        "timed before this server serves, and refined by its steps.",
    )
    cost_profile: CostProfile = Field(
        default="kept",
        description="allocate policy without costs: time the engine before it serves. kept: once, "
        "and use that table at later starts of the same server on the same machine. fresh: at "
        "every start. skip: not at all.",
    )
    branches: bool = Field(
        default=True,
        description="allocate policy: cache drafts branch where the suffix cache's votes differ. "
        "false: chains only. In the paper cache mode they never branch.",
    )
    predictor: Path | None = Field(
        default=None,
        strict=False,
        description="Payoff predictor (safetensors). Default: the one that ships in the package.",
    )
    calibrate: bool = Field(
        default=True,
        description="Correct the payoff predictor by what it gets wrong, within bounds, and do not "
        "heed it while it is off by more than twice: the frequency rule decides then, or under "
        "allocate the suffix cache's own probabilities.",
    )
    cache_mode: CacheMode = Field(
        default="votes",
        description="Suffix cache: how it drafts. votes: every occurrence votes, with weights "
        "fitted to recorded text. paper: SuffixDecoding, as the paper uses it, to compare with; "
        "slow where the shared cache is large.",
    )
    max_draft_tokens: int = Field(
        default=64,
        ge=1,
        le=1024,
        description="Suffix cache: longest draft, in tokens; at most 64 in the votes cache mode.",
    )
    min_token_prob: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Suffix cache: a draft ends before the first token whose estimated "
        "probability is lower. Default: 0 for votes, 0.1 for paper.",
    )
    max_depth: int = Field(
        default=64,
        ge=2,
        le=1024,
        description="Suffix cache, paper only: longest run of tokens, match and draft together.",
    )
    max_spec_factor: float = Field(
        default=1.0,
        ge=0,
        description="Suffix cache, paper only: a draft has at most factor x match length + "
        "offset tokens.",
    )
    max_spec_offset: float = Field(
        default=0.0,
        description="Suffix cache, paper only: a draft has at most factor x match length + "
        "offset tokens.",
    )
    shared_cache_tokens: int = Field(
        default=1_000_000,
        ge=0,
        le=2**30,
        description="Budget, in tokens, of the shared cache of finished requests' outputs. The "
        "oldest output leaves first. 0 switches it off.",
    )
    namespace_cache_tokens: int | None = Field(
        default=None,
        ge=0,
        le=2**30,
        description="Budget, in tokens, of each namespace in the shared cache. A namespace is "
        "what requests with the same cache_salt, extra_key and adapter share. Default: no other "
        "than that of all together.",
    )
    session_cache_tokens: int = Field(
        default=1_000_000,
        ge=0,
        le=2**30,
        description="Votes cache mode: budget, in tokens, of finished requests' prompts that stay "
        "indexed for the next turn of their session. The oldest leaves first. 0 switches it off.",
    )
    history_window: int = Field(
        default=8,
        ge=1,
        description="How many of a request's latest cycles the predictor's recent-history "
        "features cover.",
    )
    verify_width: int | None = Field(
        default=None,
        ge=2,
        description="Most nodes per request that one verification takes, root included, but for "
        "wide_width. Default: "
        "32 (8 with linear attention, 16 with trtllm_mha), or the model drafter's tree if that is "
        "larger; with policy model exactly that tree, with policy both at least eight nodes more.",
    )
    wide_width: int | None = Field(
        default=None,
        ge=2,
        description="allocate policy: most nodes per request in steps of one or two requests, if "
        "more than verify_width, which all other steps keep to. Takes memory on a GPU as narrow "
        "widths do. Default: 64 on a GPU, as far as memory goes, if neither verify_width nor "
        "narrow_widths is given, but for models with experts or linear attention, with LoRA, "
        "enable-deterministic-inference and trtllm_mha; else verify_width.",
    )
    narrow_widths: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        description="Narrower verifications, in nodes per request, for steps with short drafts: a "
        "list that rises, [] for none. Each takes memory on a GPU, for its attention backends and "
        "graphs. Default: powers of two where widths cost nothing, on a CPU with attention backend "
        "torch_native or intel_amx; elsewhere, with the allocate policy, those that save time with "
        "max-running-requests, as far as memory goes, and none with LoRA or "
        "enable-deterministic-inference.",
    )
    postpone_extend: PostponeExtend | None = Field(
        default=None,
        description="Whether bringing the model drafter's KV cache up to date is postponed. never: "
        "it is done behind every step, for all requests. plain: likewise, but in long runs of "
        "steps without drafts not before the next step that has some. always: for a request when "
        "it drafts. Default: always on a CPU; on a GPU, where that would wait for the host, plain "
        "if steps run ahead, else never.",
    )
    run_ahead: bool = Field(
        default=False,
        description="allocate policy: where no draft pays, launch steps before the tokens of the "
        "last are read, as plain serving does under overlap scheduling. Needs that, and a verify "
        "width of 1. Off by default: no GPU has shown yet that output stays the same.",
    )
    report_cycles: bool = Field(
        default=False,
        description="Add every cycle's draft source and accepted draft tokens to a response's "
        "meta_info.",
    )
    record: Path | None = Field(
        default=None,
        strict=False,
        description="Folder to record finished requests in, as token ids, to replay them and to "
        "train a predictor on them. Default: nothing is recorded.",
    )
    record_prompts: bool = Field(
        default=True,
        description="Record the prompts too. Without them a recording has only what the model "
        "generated.",
    )
    record_file_mb: int = Field(
        default=64,
        ge=1,
        le=2**14,
        description="Size of one recorded file, in MiB; the next one begins then.",
    )
    record_total_mb: int = Field(
        default=1024,
        ge=2,
        le=2**24,
        validate_default=True,
        description="Size of all files in the record folder, in MiB, those being written at "
        "their largest; the oldest are removed. At least two files.",
    )

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "HvdConfig":
        """The copy is checked as a new one is. deep makes no difference: nothing in it can change.

        Raises ValidationError, which is a ValueError.
        """
        return type(self).model_validate({**self._given(), **(update or {})})

    def for_policy(self, policy: Policy, **settings: object) -> "HvdConfig":
        """A checked copy with this policy and these settings, and without those that only another
        policy reads.

        Raises ValidationError, which is a ValueError.
        """
        kept = {
            name: value
            for name, value in self._given().items()
            if _READER.get(name, policy) == policy
        }
        return type(self).model_validate({**kept, **settings, "policy": policy})

    def _given(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.model_fields_set}

    @model_validator(mode="before")
    @classmethod
    def _a_threshold_is_of_payoff(cls, data: Any) -> Any:
        return _with_policy(data) if isinstance(data, dict) else data

    @field_validator("max_draft_tokens")
    @classmethod
    def _votes_have_an_end(cls, value: int, field: ValidationInfo) -> int:
        if field.data.get("cache_mode") == "votes" and value > MOST_VOTED_TOKENS:
            raise ValueError(
                f"by votes no draft is longer than {MOST_VOTED_TOKENS} tokens: lower it, or set "
                "cache_mode to paper"
            )
        return value

    @field_validator("max_depth", "max_spec_factor", "max_spec_offset")
    @classmethod
    def _needs_paper_mode(cls, value: float, field: ValidationInfo) -> float:
        assert field.field_name is not None
        default = cls.model_fields[field.field_name].default
        if field.data.get("cache_mode") == "votes" and value != default:
            raise ValueError("only the paper cache mode reads it: set cache_mode to paper too")
        return value

    @field_validator(*_READER)
    @classmethod
    def _needs_its_policy(cls, value: object, field: ValidationInfo) -> object:
        assert field.field_name is not None
        reader, default = _READER[field.field_name], cls.model_fields[field.field_name].default
        if value != default and field.data.get("policy") not in (None, reader):
            raise ValueError(
                f"only the {reader} policy reads it: set policy to {reader}, or leave it out"
            )
        return value

    @field_validator("narrow_widths")
    @classmethod
    def _rises(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and any(
            later <= earlier for earlier, later in itertools.pairwise((0, *value))
        ):
            raise ValueError("widths must rise, from 1 or more")
        return value

    @field_validator("record_total_mb")
    @classmethod
    def _holds_two_files(cls, value: int, field: ValidationInfo) -> int:
        file_mb = field.data.get("record_file_mb")
        if file_mb is not None and value < 2 * file_mb:
            raise ValueError(f"at least {2 * file_mb} (two files of record_file_mb)")
        return value

    @property
    def lowest_token_prob(self) -> float:
        """min_token_prob, or its default in this cache mode."""
        if self.min_token_prob is not None:
            return self.min_token_prob
        return 0.1 if self.cache_mode == "paper" else 0.0

    def default_wide_width(self, verify_width: int) -> int | None:
        """The wide_width of a server that is given none, beside this verify_width; None: no step is
        wider. The device and the model, which decide too, are not known here."""
        wide = min(_DEFAULT_WIDE_WIDTH, 1 + self.max_draft_tokens)
        names_widths = self.verify_width is not None or self.narrow_widths is not None
        if self.policy != "allocate" or names_widths:
            return None
        return wide if wide >= _LEAST_OVER_VERIFY_WIDTH * verify_width else None

    @property
    def drafts_with_model(self) -> bool:
        """Whether the policy ever verifies the model drafter's draft."""
        return self.policy != "cache"

    @property
    def predicts(self) -> bool:
        """Whether the policy needs a payoff predictor."""
        return self.policy in ("allocate", "payoff")


def flag_name(field: str) -> str:
    """The command line flag of a field: max_depth -> --hvd-max-depth."""
    return "--hvd-" + field.replace("_", "-")


def load_config(
    yaml_path: Path | None, overrides: Mapping[str, object], environ: Mapping[str, str]
) -> HvdConfig:
    """Merges flags, YAML file and defaults: a flag wins over YAML, YAML over the default.

    yaml_path: the file of --hvd-config; None: the file that HVD_CONFIG in environ names, if any.
    overrides: field name -> value of each flag that was given.

    Where a flag names the policy, or implies it, what only another policy reads is not taken from
    the file.

    A relative path in a YAML file (costs, predictor, record) starts from that file's folder.

    Raises ValueError with one line that names the file or flag, the key and what is wrong.
    """
    if yaml_path is None and environ.get(CONFIG_ENV):
        yaml_path = Path(environ[CONFIG_ENV])
    from_yaml = {} if yaml_path is None else _read_yaml(yaml_path)
    flags = _with_policy(overrides)
    if "policy" in flags:
        read = (None, flags["policy"])
        from_yaml = {name: v for name, v in from_yaml.items() if _READER.get(name) in read}
    try:
        return HvdConfig.model_validate({**from_yaml, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        is_from_yaml = key in from_yaml and key not in overrides
        where = f"{yaml_path}: {key}" if is_from_yaml else flag_name(key)
        reason = _reason(first["type"], first["msg"], first["input"])
        raise ValueError(f"{where}: {reason}") from None


def _with_policy(settings: Mapping[str, object]) -> dict[str, object]:
    """The same settings; a threshold without a policy asks for the one that reads it."""
    implied = {"policy": "payoff"} if settings.get("threshold") is not None else {}
    return {**implied, **settings}


def _read_yaml(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"{path}: cannot read the HVD config: {reason}") from None
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: an HVD config is a mapping of field to value, got {type(content).__name__}"
        )
    for name in ("costs", "predictor", "record"):
        if isinstance(content.get(name), str):
            content[name] = path.parent / content[name]
    return {str(key): value for key, value in content.items()}


def _reason(kind: str, message: str, value: object) -> str:
    if kind == "extra_forbidden":
        return f"unknown key; the keys are {', '.join(HvdConfig.model_fields)}"
    message = message.removeprefix("Value error, ")
    got = str(value) if isinstance(value, Path) else repr(value)
    return f"{message[0].lower()}{message[1:]}, got {got}"
