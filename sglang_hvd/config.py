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

# The settings that have a flag of their own; every setting is also a key of --hvd-set.
FLAGS = (
    "policy",
    "threshold",
    "predictor",
    "costs",
    "verify_width",
    "shared_cache_tokens",
    "snapshot",
    "warm_from",
    "record",
    "record_prompts",
    "report_cycles",
)

# Predicted accepted length from which the paper verifies a cache draft (section 3.4).
PAPER_THRESHOLD = 6.0
# Number of accepted tokens from which verifying a cache draft is worth its cost.
WORTH_LEN = math.ceil(PAPER_THRESHOLD)
MARGINAL_LEN = 3  # a verified draft of at least this length, below WORTH_LEN, nearly paid

# What names a predictor that ships: SHIPPED_PREFIX + "paper_mlp".
SHIPPED_PREFIX = "shipped:"

# The paper's settings: table 7, section 3.4, a predictor of the kind of table 10. Drafts of up to
# 64 tokens are verified after a root, and predictions are not corrected. The paper states nothing
# of the other settings.
PAPER_SETTINGS: Mapping[str, object] = {
    "policy": "payoff",
    "threshold": PAPER_THRESHOLD,
    "predictor": f"{SHIPPED_PREFIX}paper_mlp",
    "calibrate": False,
    "cache_mode": "paper",
    "max_draft_tokens": 64,
    "min_token_prob": 0.1,
    "max_depth": 64,
    "max_spec_factor": 1.0,
    "max_spec_offset": 0.0,
    "verify_width": 65,
}

# The load_format of an /update_weights_from_disk that means the predictor and not the model.
PREDICTOR_LOAD_FORMAT = "hvd_predictor"

# Names the YAML file where there are no flags (sgl.Engine).
CONFIG_ENV = "HVD_CONFIG"

# Verifying 32 nodes (a root and 31 draft tokens) costs little more than one while a GPU is bound by
# memory bandwidth.
DEFAULT_VERIFY_WIDTH = 32

# Default wide_width (steps of one or two requests), used only if at least 1.5 times verify_width.
_DEFAULT_WIDE_WIDTH, _MIN_WIDE_RATIO = 64, 1.5

# Maximum length of a draft in cache mode votes, which looks no further ahead.
MAX_VOTED_TOKENS = 64

# Settings that only one policy reads.
READER: Mapping[str, Policy] = {
    "threshold": "payoff",
    "costs": "allocate",
    "cost_profile": "allocate",
    "branches": "allocate",
    "wide_width": "allocate",
    "run_ahead": "allocate",
}


class HvdConfig(BaseModel):
    """All settings. Defaults are the paper's where the paper states one (appendices A and B),
    except for the policy, the threshold, the cache mode and min_token_prob."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    policy: Policy = Field(
        default="allocate",
        description="How each request chooses its draft. allocate: the drafts, and as much of "
        "them, that yield the most accepted tokens for the time the step takes. payoff: the "
        "cache draft if it is predicted to pay, else the model drafter's; the default if a "
        "threshold is given. frequency: the cache draft if the suffix cache's score reaches "
        "frequency_threshold, else the model drafter's. cache: the cache draft; without one the "
        "target model decodes one token. model: always the model drafter's. both: always both "
        "drafts in one tree.",
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        description="Policy payoff: the predicted accepted length, in tokens without the bonus "
        "token, from which a cache draft is verified. The paper uses 6. Default: the accepted "
        "length that is predicted for the model drafter's draft of the same request.",
    )
    frequency_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Policy frequency, and policy payoff while its predictor is not used: the "
        "suffix cache's score from which a cache draft is verified. Default: the number of steps "
        "the model drafter runs.",
    )
    costs: Path | None = Field(
        default=None,
        strict=False,
        description="Policy allocate: a table of what steps cost (YAML, see configs/costs). "
        "Default: the engine is timed before the server serves, and the table is refined while it "
        "serves. A table given here is used unchanged.",
    )
    cost_profile: CostProfile = Field(
        default="kept",
        description="Policy allocate without costs: when the engine is timed before it serves. "
        "kept: once; later starts of the same server on the same machine use that table. fresh: at "
        "every start. skip: never.",
    )
    branches: bool = Field(
        default=True,
        description="Policy allocate: cache drafts branch where earlier occurrences continue "
        "differently. false: chains only. In cache mode paper they never branch.",
    )
    predictor: Path | None = Field(
        default=None,
        strict=False,
        description="Policies allocate and payoff: the payoff predictor (safetensors), or "
        "shipped:paper_mlp, the paper's. Default: the one that ships.",
    )
    calibrate: bool = Field(
        default=True,
        description="Correct the payoff predictor while serving, within bounds, and stop using it "
        "while it is off by more than a factor of two. Policy payoff then uses the frequency rule, "
        "policy allocate the suffix cache's own probabilities.",
    )
    cache_mode: CacheMode = Field(
        default="votes",
        description="Suffix cache: how it drafts. votes: every occurrence votes, with weights "
        "fitted to recorded text. paper: SuffixDecoding as the paper uses it, for comparison; it "
        "is slow with a large shared cache.",
    )
    max_draft_tokens: int = Field(
        default=64,
        ge=1,
        le=1024,
        description="Suffix cache: maximum length of a draft, in tokens; at most 64 in cache mode "
        "votes.",
    )
    min_token_prob: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Suffix cache: a draft ends before the first token whose estimated "
        "probability is lower. Default: 0 in cache mode votes, 0.1 in cache mode paper.",
    )
    max_depth: int = Field(
        default=64,
        ge=2,
        le=1024,
        description="Suffix cache, cache mode paper: maximum length of match and draft together, "
        "in tokens.",
    )
    max_spec_factor: float = Field(
        default=1.0,
        ge=0,
        description="Suffix cache, cache mode paper: a draft has at most factor x match length + "
        "offset tokens.",
    )
    max_spec_offset: float = Field(
        default=0.0,
        description="Suffix cache, cache mode paper: a draft has at most factor x match length + "
        "offset tokens.",
    )
    shared_cache_tokens: int = Field(
        default=1_000_000,
        ge=0,
        le=2**30,
        description="Size of the shared cache of finished requests' outputs, in tokens. The oldest "
        "output is dropped first. 0: no shared cache.",
    )
    namespace_cache_tokens: int | None = Field(
        default=None,
        ge=0,
        le=2**30,
        description="Maximum size of each namespace in the shared cache, in tokens. Requests with "
        "the same cache_salt, extra_key and adapter form a namespace. Default: no per-namespace "
        "limit.",
    )
    session_cache_tokens: int = Field(
        default=1_000_000,
        ge=0,
        le=2**30,
        description="Cache mode votes: how many tokens of finished requests' prompts stay indexed "
        "for the next turn of their sessions. The oldest prompt is dropped first. 0: none.",
    )
    snapshot: Path | None = Field(
        default=None,
        strict=False,
        description="File that keeps the shared cache across restarts: clients' outputs, as token "
        "ids. Default: none.",
    )
    snapshot_minutes: float | None = Field(
        default=None,
        gt=0,
        description="Save snapshot every so many minutes. Default: only when SIGTERM or ctrl-C "
        "ends the server.",
    )
    warm_from: Path | None = Field(
        default=None,
        strict=False,
        description="File or folder of texts that enter the shared cache while the server serves. "
        "Default: none.",
    )
    history_window: int = Field(
        default=8,
        ge=1,
        description="How many of a request's latest cycles the predictor's history features cover.",
    )
    verify_width: int | None = Field(
        default=None,
        ge=2,
        description="Maximum number of nodes per request in one verification, the root included. "
        "Default: 32 (8 with linear attention, 16 with trtllm_mha), or the size of the model "
        "drafter's tree if that is larger. Policy model: exactly that tree. Policy both: at least "
        "eight nodes more than that tree.",
    )
    wide_width: int | None = Field(
        default=None,
        ge=2,
        description="Policy allocate: maximum number of nodes per request in steps of one or two "
        "requests. It must exceed verify_width to have an effect. It needs extra GPU memory. "
        "Default: 64 on a GPU if memory allows and neither verify_width nor narrow_widths is "
        "given; verify_width for models with experts or linear attention, with LoRA, with "
        "enable-deterministic-inference and with trtllm_mha.",
    )
    narrow_widths: tuple[int, ...] | None = Field(
        default=None,
        strict=False,
        description="Narrower verifications for steps with short drafts, in nodes per request: a "
        "rising list, [] for none. Each needs extra GPU memory for attention backends and graphs. "
        "Default: powers of two where widths cost nothing (on a CPU with attention backend "
        "torch_native or intel_amx); elsewhere, with policy allocate, the widths that save time at "
        "max-running-requests if memory allows; none with LoRA or enable-deterministic-inference.",
    )
    postpone_extend: PostponeExtend | None = Field(
        default=None,
        description="When the model drafter's KV cache is brought up to date. never: after every "
        "step, for all requests. plain: after every step, except that long runs of steps without "
        "drafts wait until the next step with drafts. always: for each request when it drafts "
        "next. Default: always on a CPU; on a GPU plain if run_ahead is on, else never.",
    )
    run_ahead: bool = Field(
        default=False,
        description="Policy allocate: while no draft pays, launch steps before the tokens of the "
        "previous step are read, as plain serving does under overlap scheduling. Needs overlap "
        "scheduling and a verify width of 1. Off by default: no GPU has confirmed yet that the "
        "output stays the same.",
    )
    report_cycles: bool = Field(
        default=False,
        description="Report the cycles of every request in its response: the sources and lengths "
        "of the drafts, what was expected of them and what was accepted. A request can also ask "
        "for its own.",
    )
    report_figures: bool = Field(
        default=True,
        description="Add each request's figures to its response. They can show whether another "
        "request got the same text.",
    )
    allow_request_overrides: bool = Field(
        default=True,
        description="A request can choose how HVD serves it (custom_params).",
    )
    learn: bool = Field(
        default=True,
        description="Requests enter the shared cache, the calibration and recordings, unless they "
        "ask not to.",
    )
    share: bool = Field(
        default=True,
        description="Requests draft from outputs of other requests, unless they ask not to.",
    )
    record: Path | None = Field(
        default=None,
        strict=False,
        description="Folder to record finished requests in, as token ids, for replay and for "
        "training a predictor. Default: nothing is recorded.",
    )
    record_prompts: bool = Field(
        default=True,
        description="Record prompts too. Without them a recording holds only what the model "
        "generated.",
    )
    record_file_mb: int = Field(
        default=64,
        ge=1,
        le=2**14,
        description="Maximum size of one recorded file, in MiB.",
    )
    record_total_mb: int = Field(
        default=1024,
        ge=2,
        le=2**24,
        validate_default=True,
        description="Maximum size of the record folder, in MiB; at least two files. Files being "
        "written count with their maximum size. The oldest files are removed.",
    )

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "HvdConfig":
        """A copy that is validated like a new configuration. `deep` makes no difference: the values
        are immutable.

        Raises ValidationError, which is a ValueError.
        """
        return type(self).model_validate({**self._given(), **(update or {})})

    def for_policy(self, policy: Policy, **settings: object) -> "HvdConfig":
        """A validated copy with this policy and these settings, without the settings that only
        another policy reads.

        Raises ValidationError, which is a ValueError.
        """
        kept = {
            name: value
            for name, value in self._given().items()
            if READER.get(name, policy) == policy
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
        if field.data.get("cache_mode") == "votes" and value > MAX_VOTED_TOKENS:
            raise ValueError(
                f"in cache mode votes no draft is longer than {MAX_VOTED_TOKENS} tokens: lower it, "
                "or set cache_mode to paper"
            )
        return value

    @field_validator("max_depth", "max_spec_factor", "max_spec_offset")
    @classmethod
    def _needs_paper_mode(cls, value: float, field: ValidationInfo) -> float:
        assert field.field_name is not None
        default = cls.model_fields[field.field_name].default
        if field.data.get("cache_mode") == "votes" and value != default:
            raise ValueError("only cache mode paper reads it: set cache_mode to paper too")
        return value

    @field_validator(*READER)
    @classmethod
    def _needs_its_policy(cls, value: object, field: ValidationInfo) -> object:
        assert field.field_name is not None
        reader, default = READER[field.field_name], cls.model_fields[field.field_name].default
        if value != default and field.data.get("policy") not in (None, reader):
            raise ValueError(
                f"only policy {reader} reads it: set policy to {reader}, or leave it out"
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

    @field_validator("report_figures")
    @classmethod
    def _reports_cycles_in_figures(cls, value: bool, field: ValidationInfo) -> bool:
        if field.data.get("report_cycles") and not value:
            raise ValueError(
                "report_cycles, which `sglang-hvd serve` sets, needs it: give "
                "--hvd-report-cycles false"
            )
        return value

    @field_validator("snapshot_minutes")
    @classmethod
    def _has_a_snapshot(cls, value: float | None, field: ValidationInfo) -> float | None:
        if value is not None and field.data.get("snapshot") is None:
            raise ValueError("there is no snapshot to save: set snapshot too")
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
        """The default wide_width for this verify_width; None if no step is to be wider. The caller
        also considers the device and the model, which are not known here."""
        wide = min(_DEFAULT_WIDE_WIDTH, 1 + self.max_draft_tokens)
        names_widths = self.verify_width is not None or self.narrow_widths is not None
        if self.policy != "allocate" or names_widths:
            return None
        return wide if wide >= _MIN_WIDE_RATIO * verify_width else None

    @property
    def drafts_with_model(self) -> bool:
        """Whether the policy ever verifies the model drafter's draft."""
        return self.policy != "cache"

    @property
    def predicts(self) -> bool:
        """Whether the policy needs a payoff predictor."""
        return self.policy in ("allocate", "payoff")


def option_name(field: str) -> str:
    """How a field is given on a command line: --hvd-verify-width, or --hvd-set max_depth."""
    if field in FLAGS:
        return "--hvd-" + field.replace("_", "-")
    return f"--hvd-set {field}"


def option(field: str, value: object) -> str:
    """A field with its value, for messages: --hvd-verify-width 8, or --hvd-set max_depth=8."""
    return f"{option_name(field)}{' ' if field in FLAGS else '='}{value}"


def load_config(
    yaml_path: Path | None, overrides: Mapping[str, object], environ: Mapping[str, str]
) -> HvdConfig:
    """Merges the command line, the YAML file and the defaults: the command line overrides the file,
    and the file overrides the defaults.

    yaml_path: the file of --hvd-config; None: the file that HVD_CONFIG in environ names, if any.
    overrides: field name -> value of each setting given on the command line.

    If the command line names or implies a policy, settings in the file that only another policy
    reads are ignored.

    A relative path in a YAML file starts from that file's folder.

    Raises ValueError with one line that names the file or flag, the key and what is wrong.
    """
    if yaml_path is None and environ.get(CONFIG_ENV):
        yaml_path = Path(environ[CONFIG_ENV])
    from_yaml = {} if yaml_path is None else _read_yaml(yaml_path)
    flags = _with_policy(overrides)
    if "policy" in flags:
        read = (None, flags["policy"])
        from_yaml = {name: v for name, v in from_yaml.items() if READER.get(name) in read}
    try:
        return HvdConfig.model_validate({**from_yaml, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        is_from_yaml = key in from_yaml and key not in overrides
        where = f"{yaml_path}: {key}" if is_from_yaml else option_name(key)
        reason = _reason(first["type"], first["msg"], first["input"])
        raise ValueError(f"{where}: {reason}") from None


def _with_policy(settings: Mapping[str, object]) -> dict[str, object]:
    """The same settings, with policy payoff if there is a threshold and no policy."""
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
    for name in ("costs", "predictor", "record", "snapshot", "warm_from"):
        value = content.get(name)
        if isinstance(value, str) and not value.startswith(SHIPPED_PREFIX):
            content[name] = path.parent / value
    return {str(key): value for key, value in content.items()}


def _reason(kind: str, message: str, value: object) -> str:
    if kind == "extra_forbidden":
        return f"unknown key; the keys are {', '.join(HvdConfig.model_fields)}"
    message = message.removeprefix("Value error, ")
    got = str(value) if isinstance(value, Path) else repr(value)
    return f"{message[0].lower()}{message[1:]}, got {got}"
