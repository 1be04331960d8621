"""What can be asked of a running server."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from sglang_hvd.costs import StepCosts

# Tells plugin/reload.py that an /update_weights_from_disk means the predictor.
PREDICTOR_LOAD_FORMAT = "hvd_predictor"

_TIMEOUT_SECONDS = 60


def reload_predictor(
    url: str, path: Path, *, api_key: str | None = None, admin_api_key: str | None = None
) -> str:
    """Asks a server to use a predictor from now on; returns what it answers.

    url: of the server, as http://127.0.0.1:30000.
    path: as the server's machine has it; a relative one starts from the working directory.
    api_key: the server's, if it has one.
    admin_api_key: likewise its admin key, without which nobody changes its predictor.

    Raises ValueError, in one line, if the server cannot be asked or refuses; it then goes on with
    the predictor it has.
    """
    url = url.rstrip("/")
    _hvd_states(url, api_key)  # another SGLang server would take the file for a model
    answer = _ask(
        f"{url}/update_weights_from_disk",
        {"model_path": str(path.absolute()), "load_format": PREDICTOR_LOAD_FORMAT},
        admin_api_key or api_key,
    )
    return str(answer.get("message", answer))


def costs_in_force(url: str, *, api_key: str | None = None) -> StepCosts:
    """The table of what steps cost by which a server allocates now.

    url, api_key: likewise.

    Raises ValueError, in one line, if the server cannot be asked, weighs no costs or has others
    than this version.
    """
    url = url.rstrip("/")
    costs = _hvd_states(url, api_key)[0].get("costs")
    if costs is None:
        raise ValueError(f"the server at {url} weighs no costs: its policy is not allocate")
    if isinstance(costs, dict):
        costs = {name: costs[name] for name in costs if name in StepCosts.model_fields}
    try:
        return StepCosts.of(costs)
    except ValueError as error:
        raise ValueError(
            f"the server at {url} has no cost table of this version: {error}: ask with the server's"
        ) from None


def _hvd_states(url: str, api_key: str | None) -> list[dict[str, Any]]:
    info = _ask(f"{url}/server_info", None, api_key)
    states = info.get("internal_states")
    if not (isinstance(states, list) and states) or not all(
        isinstance(state, dict) and isinstance(state.get("hvd"), dict) for state in states
    ):
        raise ValueError(f"the server at {url} does not run HVD")
    return [state["hvd"] for state in states]


def _ask(url: str, body: dict[str, str] | None, api_key: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: no address of a server: give one as http://127.0.0.1:30000")
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: {_reason(error)}") from None
    except json.JSONDecodeError:
        raise ValueError(f"{url}: the answer is no JSON: is this an SGLang server?") from None
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        raise ValueError(
            f"{url}: {reason or error.reason}: is a server running there? else give its --url"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # no such url
        raise ValueError(f"{url}: {error}") from None
    if not isinstance(answer, dict):
        raise ValueError(f"{url}: the answer is no JSON object: is this an SGLang server?")
    return answer


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says, or else the status."""
    try:
        return str(json.load(error)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
