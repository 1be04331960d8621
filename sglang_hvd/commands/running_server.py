"""Requests to a running server: reload its predictor, read its step costs, order its cache."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hvd.config import PREDICTOR_LOAD_FORMAT
from sglang_hvd.costs import StepCosts
from sglang_hvd.suffix_cache.orders import CACHE_LOAD_FORMAT, Order

_TIMEOUT_SECONDS = 60


def reload_predictor(
    url: str, path: Path, *, api_key: str | None = None, admin_api_key: str | None = None
) -> str:
    """Loads a predictor into a server, and returns the server's answer.

    url: address of the server, such as http://127.0.0.1:30000.
    path: the predictor's path on the server's machine. A relative path is taken from the working
        directory of this process.
    api_key: the server's API key, if it has one.
    admin_api_key: the server's admin key, if it has one; it is then required.

    Raises ValueError, in one line, if the server cannot be reached or refuses. It then keeps its
    predictor.
    """
    url = url.rstrip("/")
    hvd_states(url, api_key)  # a server without HVD would load the file as a model
    answer = ask(
        f"{url}/update_weights_from_disk",
        {"model_path": str(path.absolute()), "load_format": PREDICTOR_LOAD_FORMAT},
        admin_api_key or api_key,
    )
    return str(answer.get("message", answer))


def order_cache(
    url: str, order: Order, *, api_key: str | None = None, admin_api_key: str | None = None
) -> list[dict[str, Any]]:
    """Gives an order to the shared cache of a server, and returns the answers of its data-parallel
    groups.

    url, api_key, admin_api_key: see reload_predictor. The server must run HVD; otherwise it would
        take the order for an update of its weights.

    Raises ValueError, in one line, if the server cannot be reached or refuses.
    """
    url = url.rstrip("/")
    body = {
        "model_path": "",
        "load_format": CACHE_LOAD_FORMAT,
        "manifest": order.model_dump(),
    }
    answer = ask(f"{url}/update_weights_from_disk", body, admin_api_key or api_key)
    return list(json.loads(answer["message"]))


def costs_in_force(url: str, *, api_key: str | None = None) -> StepCosts:
    """The table of step costs that a server uses now.

    url, api_key: see reload_predictor.

    Raises ValueError, in one line, if the server cannot be reached, uses no costs or has a cost
    table of another version.
    """
    url = url.rstrip("/")
    costs = hvd_states(url, api_key)[0].get("costs")
    if costs is None:
        raise ValueError(f"the server at {url} uses no costs, because its policy is not allocate")
    if isinstance(costs, dict):
        costs = {name: costs[name] for name in costs if name in StepCosts.model_fields}
    try:
        return StepCosts.of(costs)
    except ValueError as error:
        raise ValueError(
            f"the server at {url} has a cost table of another version: {error}: use the version of "
            f"sglang-hvd that the server has"
        ) from None


def hvd_states(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """The HVD part of /server_info of each scheduler.

    Raises ValueError, in one line, if the server cannot be reached or does not run HVD.
    """
    info = ask(f"{url}/server_info", None, api_key)
    states = info.get("internal_states")
    if not (isinstance(states, list) and states) or not all(
        isinstance(state, dict) and isinstance(state.get("hvd"), dict) for state in states
    ):
        raise ValueError(f"the server at {url} does not run HVD: give the --url of one that does")
    return [state["hvd"] for state in states]


def ask(
    url: str,
    body: Mapping[str, Any] | None,
    api_key: str | None,
    *,
    timeout_s: float = _TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """The JSON object that a server answers to a GET, or to a POST of this body.

    Raises ValueError, in one line, if the server cannot be reached or refuses.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"{url}: not an address of a server: give one such as http://127.0.0.1:30000"
        )
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: {_reason(error)}") from None
    except json.JSONDecodeError:
        raise ValueError(f"{url}: the answer is not JSON: is this an SGLang server?") from None
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        raise ValueError(
            f"{url}: {reason or error.reason}: is a server running there? Otherwise give its --url"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # such as an invalid URL
        raise ValueError(f"{url}: {error}") from None
    if not isinstance(answer, dict):
        raise ValueError(f"{url}: the answer is not a JSON object: is this an SGLang server?")
    return answer


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's message, or the HTTP status if it has none."""
    try:
        answer = json.load(error)
        return str(answer.get("error", answer)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{error.code} {error.reason}"
