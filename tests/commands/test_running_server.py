"""Requests to a running server, and how its answers are read."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from sglang_hvd.commands.running_server import costs_in_force, reload_predictor
from sglang_hvd.costs import StepCosts

INFO: dict[str, Any] = {"internal_states": [{"hvd": {}}]}
TAKEN: dict[str, Any] = {"success": True, "message": "the predictor is p", "num_paused_requests": 0}


class Server:
    """Answers by path, and records the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {
            "/server_info": (200, json.dumps(INFO)),
            "/update_weights_from_disk": (200, json.dumps(TAKEN)),
        }
        self.asked: list[tuple[str, Any, str | None]] = []
        asked, answers = self.asked, self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                asked.append(
                    (self.path, json.loads(body or b"null"), self.headers.get("Authorization"))
                )
                status, text = answers[self.path]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def refused(url: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        reload_predictor(url, Path("p.safetensors"))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_relative_path_starts_from_the_working_directory(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reload_predictor(server.url + "/", Path("p.safetensors")) == "the predictor is p"
    body = {"model_path": str(tmp_path / "p.safetensors"), "load_format": "hvd_predictor"}
    assert server.asked == [("/server_info", None, None), ("/update_weights_from_disk", body, None)]


def test_every_request_has_the_key(server: Server) -> None:
    reload_predictor(server.url, Path("p"), api_key="secret")
    assert {key for _, _, key in server.asked} == {"Bearer secret"}


def test_admin_requests_have_the_admin_key(server: Server) -> None:
    reload_predictor(server.url, Path("p"), api_key="secret", admin_api_key="admin")
    assert [key for _, _, key in server.asked] == ["Bearer secret", "Bearer admin"]


def test_a_refusal_is_raised_with_its_reason(server: Server) -> None:
    refusal = {"success": False, "message": "predictor p is corrupt", "num_paused_requests": 0}
    server.answers["/update_weights_from_disk"] = (400, json.dumps(refusal))
    assert refused(server.url).endswith("/update_weights_from_disk: predictor p is corrupt")


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, '{"internal_states": [{}]}', "does not run HVD"),
        (200, "{}", "does not run HVD"),
        (200, '{"internal_states": 5}', "does not run HVD"),
        (200, "<html>", "is this an SGLang server?"),
        (200, "[]", "is this an SGLang server?"),
        (401, '{"error": "Unauthorized"}', "401 Unauthorized"),
        (404, "nothing here", "404 Not Found"),
    ],
)
def test_a_server_without_hvd_is_not_asked_to_load_anything(
    server: Server, status: int, answer: str, says: str
) -> None:
    server.answers["/server_info"] = (status, answer)
    assert says in refused(server.url)
    assert [path for path, _, _ in server.asked] == ["/server_info"]


def test_an_unreachable_server_is_named() -> None:
    assert refused("http://127.0.0.1:9") == (
        "http://127.0.0.1:9/server_info: Connection refused: is a server running there? "
        "Otherwise give its --url"
    )


def test_an_invalid_url_is_named() -> None:
    assert "127.0.0.1:30000" in refused("127.0.0.1:30000")
    assert "nonnumeric port" in refused("http://127.0.0.1:abc")


COSTS: dict[str, Any] = {
    "about": "learned",
    "batch_sizes": [1, 2],
    "widths": [1, 8],
    "verify": [[5, 6], [5, 7]],
    "draft_round": [1, 1],
    "draft_extend": [[0, 0], [0, 0]],
}


def test_the_costs_in_force_are_read_from_the_server(server: Server, tmp_path: Path) -> None:
    state = {"hvd": {"costs": {"num_timed_steps": 9, **COSTS}}}
    server.answers["/server_info"] = 200, json.dumps({"internal_states": [state]})
    costs = costs_in_force(server.url)
    assert costs == StepCosts.model_validate(COSTS)
    path = tmp_path / "costs.yaml"
    path.write_text(costs.to_yaml())
    assert StepCosts.load(path) == costs


def test_a_server_without_costs_is_reported(server: Server) -> None:
    state = {"hvd": {"costs": None}}
    server.answers["/server_info"] = 200, json.dumps({"internal_states": [state]})
    with pytest.raises(ValueError, match="uses no costs, because its policy is not allocate"):
        costs_in_force(server.url)


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ({"about": "half"}, "batch_sizes: Field required"),
        ({**COSTS, "verify": [[5, "x"], [5, 7]]}, "verify: 0: 1: "),
        (5, "valid dictionary"),
    ],
)
def test_an_incomplete_cost_table_is_one_line(server: Server, costs: object, says: str) -> None:
    state = {"hvd": {"costs": costs}}
    server.answers["/server_info"] = 200, json.dumps({"internal_states": [state]})
    with pytest.raises(ValueError, match="has a cost table of another version: ") as error:
        costs_in_force(server.url)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
