"""What a request asks of HVD: custom_params {"hvd": "off"} or {"hvd": {"policy": "cache", ...}}."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_hvd.config import HvdConfig
from sglang_hvd.types import SOURCES, DraftLimits

# Policies that a request can have on a server with another one: the sources that they verify.
_FIXED_SOURCES = {"off": 0, "cache": SOURCES.bit_of("cache"), "model": SOURCES.bit_of("model")}


class RequestControl(BaseModel):
    """How one request wants to be served.

    policy: "off", or one of served_policies; None: the server's.
    max_draft_tokens: of a cycle, all drafts together; None: no limit but the server's.
    learn: its text may enter the shared cache and recordings, and its cycles the calibration.
    share: it drafts from finished requests of its namespace, and they from its output.
    namespace: divides the requests that SGLang's prefix cache does not keep apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: str | None = None
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    learn: bool = True
    share: bool = True
    namespace: str = ""
    report_cycles: bool = False

    @classmethod
    def of(cls, custom_params: object, config: HvdConfig) -> RequestControl:
        """What these custom_params ask of a server with these settings. Whatever does not ask HVD
        is ignored.

        Raises ValueError, in one line, for an unknown key, a wrong type, or a policy that the
        server cannot run.
        """
        asked = _asked_of_hvd(custom_params)
        if asked is None:
            asked = {}
        elif asked == "off":
            asked = {"policy": "off"}
        elif not isinstance(asked, dict):
            raise ValueError(
                'custom_params: "hvd" must be "off" or an object such as {"policy": "cache"}, got '
                f"{reprlib.repr(asked)}"
            )
        defaults = {"learn": config.learn, "share": config.share}
        try:
            control = cls.model_validate({**defaults, **asked})
        except ValidationError as error:
            raise ValueError(f'custom_params: "hvd": {_fault(error)}') from None
        policies = served_policies(config)
        if control.policy not in (None, *policies):
            raise ValueError(
                f'custom_params: "hvd": policy must be one of {", ".join(policies)} on this '
                f"server, got {reprlib.repr(control.policy)}"
            )
        return control

    def limits(self, config: HvdConfig) -> DraftLimits | None:
        """What the request may verify on a server with these settings; None: what the policy of
        the server chooses."""
        sources = None
        if self.policy is not None and self.policy != config.policy:
            sources = _FIXED_SOURCES[self.policy]
        if sources is None and self.max_draft_tokens is None:
            return None
        return DraftLimits(sources, self.max_draft_tokens)


def served_policies(config: HvdConfig) -> tuple[str, ...]:
    """The policies that a request can have on a server with these settings."""
    others = [
        name
        for name, is_served in (
            ("off", True),
            ("cache", config.policy != "model"),
            ("model", config.drafts_with_model),
        )
        if is_served and name != config.policy
    ]
    return (*others, config.policy)


def check_custom_params(custom_params: object, config: HvdConfig, *, is_own: bool = True) -> None:
    """Checks the custom_params of a request before the scheduler sees them.

    is_own: the request gave them, and not the server's --preferred-sampling-params.

    Raises ValueError, in one line, if the server cannot serve what they ask of HVD.
    """
    if custom_params is None:
        return
    control, asked = RequestControl.of(custom_params, config), _asked_of_hvd(custom_params)
    overrides = asked if isinstance(asked, str) else (asked or {}).keys() - {"report_cycles"}
    if overrides and is_own and not config.allow_request_overrides:
        but = ", except for report_cycles" if config.report_figures else ""
        raise ValueError(
            "custom_params: this server lets no request choose how HVD serves it: leave out "
            f'"hvd"{but}'
        )
    if control.report_cycles and not config.report_figures:
        raise ValueError("custom_params: this server reports no figures: leave out report_cycles")


def _asked_of_hvd(custom_params: object) -> Any:
    """The value of the key "hvd"; None without one. SGLang does not check the type of either."""
    return custom_params.get("hvd") if isinstance(custom_params, dict) else None


def _fault(error: ValidationError) -> str:
    first = error.errors()[0]
    key = reprlib.repr(first["loc"][0]) if first["loc"] else "it"
    if first["type"] == "extra_forbidden":
        return f"there is no key {key}; the keys are {', '.join(RequestControl.model_fields)}"
    message = first["msg"]
    return f"{key}: {message[0].lower()}{message[1:]}, got {reprlib.repr(first['input'])}"
