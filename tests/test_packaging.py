"""What the repository tells of itself: version, changelog, citation, security page, hosted CI."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang.srt.entrypoints import http_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.auth import AuthLevel, decide_request_auth
from sglang.srt.utils.common import build_server_info

import sglang_hvd
from sglang_hvd.cli import main

ROOT = Path(__file__).parents[1]


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_version_stands_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["scikit-build"]["metadata"]["version"]["input"] == (
        "sglang_hvd/__init__.py"
    )
    assert "version" not in read_yaml("CITATION.cff")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sglang-hvd {sglang_hvd.__version__}\n"


def test_the_changelog_has_each_version_once_and_the_latest_first() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert headings[0] == "Unreleased"
    assert len(set(headings)) == len(headings)
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= {
        *("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }


def test_the_citation_is_of_the_paper() -> None:
    paper = read_yaml("CITATION.cff")["preferred-citation"]
    assert paper["title"] == (
        "Hybrid Verified Decoding: Learning to Allocate Verification in Speculative Decoding"
    )
    names = [f"{author['given-names']} {author['family-names']}" for author in paper["authors"]]
    assert names == [
        *("Xin Su", "Dawid Majchrowski", "Fangyuan Yu", "Vanshil Atul Shah"),
        *("Sebastian Rogawski", "Pawel Morkisz", "Anahita Bhiwandiwalla", "Phillip Howard"),
    ]


def test_hosted_ci_runs_what_runs_here_and_builds_wheels() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert any(step.get("uses", "").startswith("pypa/cibuildwheel@") for step in steps)


@pytest.mark.parametrize(
    ("tag", "is_published"),
    [(f"v{sglang_hvd.__version__}", True), ("v0.0.1", False), (sglang_hvd.__version__, False)],
)
def test_only_the_tag_of_the_version_is_published(tag: str, is_published: bool) -> None:
    job = read_yaml(".github/workflows/ci.yml")["jobs"]["publish"]
    assert job["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert job["needs"] == ["check", "wheels", "sdist"]
    assert job["permissions"]["id-token"] == "write"
    *before, last = job["steps"]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    (compare,) = (step["run"] for step in before if "run" in step)
    environment = {**os.environ, "GITHUB_REF_NAME": tag}
    done = subprocess.run(
        ["bash", "-e", "-c", compare], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert (done.returncode == 0) == is_published
    assert done.stdout == b"" if is_published else tag.encode() in done.stdout


def test_the_notices_of_what_is_linked_in_are_those_of_the_installed_nanobind() -> None:
    installed = distribution("nanobind")
    (notice,) = (file for file in installed.files or [] if file.name == "LICENSE")
    assert (ROOT / "licenses" / "nanobind.txt").read_text() == notice.read_text()
    headers = Path(str(installed.locate_file("nanobind/ext/robin_map/include/tsl")))
    notice_of_map = re.sub(
        r"^ \* ?", "", (headers / "robin_map.h").read_text().partition("*/")[0], flags=re.M
    )
    assert (ROOT / "licenses" / "robin-map.txt").read_text().strip() in notice_of_map


@pytest.mark.parametrize(
    ("api_key", "admin_key", "opens_client", "opens_admin"),
    [
        (None, None, {None, "A", "B"}, {None, "A", "B"}),
        ("A", None, {"A"}, {"A"}),
        (None, "B", {None, "A", "B"}, {"B"}),
        ("A", "B", {"A"}, {"B"}),
    ],
)
def test_keys_open_what_the_security_page_says(
    api_key: str | None,
    admin_key: str | None,
    opens_client: set[str | None],
    opens_admin: set[str | None],
) -> None:
    def opens(level: AuthLevel, path: str) -> set[str | None]:
        return {
            key
            for key in (None, "A", "B")
            if decide_request_auth(
                method="POST",
                path=path,
                authorization_header=None if key is None else f"Bearer {key}",
                api_key=api_key,
                admin_api_key=admin_key,
                auth_level=level,
            ).allowed
        }

    assert opens(AuthLevel.NORMAL, "/generate") == opens_client
    assert opens(AuthLevel.ADMIN_OPTIONAL, "/update_weights_from_disk") == opens_admin
    assert opens(AuthLevel.NORMAL, "/metrics") == {None, "A", "B"}


def test_the_endpoints_of_administrators_are_guarded_as_the_security_page_says() -> None:
    for name in (
        *("update_weights_from_disk", "update_weights_from_tensor", "load_lora_adapter"),
        *("get_weights_by_name", "flush_cache", "pause_generation", "abort_request"),
        "configure_logging",
    ):
        assert getattr(http_server, name)._auth_level == AuthLevel.ADMIN_OPTIONAL
    assert not hasattr(http_server.server_info, "_auth_level")


def test_server_info_shows_both_keys_as_the_security_page_says() -> None:
    args = ServerArgs(model_path="none", api_key="A", admin_api_key="B")
    shown = build_server_info(args, {})
    assert (shown["api_key"], shown["admin_api_key"]) == ("A", "B")
