"""README.md and docs/ name what exists: links, flags, settings, metrics, commands, files."""

import argparse
import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sglang
import yaml
from sglang.srt.server_args import ServerArgs

from sglang_hvd.cli import _commands
from sglang_hvd.config import FLAGS, HvdConfig, option_name
from sglang_hvd.plugin.requests import metrics
from sglang_hvd.request_stats import RequestStats
from tests.test_architecture import is_there

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_WORDS, MAX_README_LINES = 10_000, 120

EVERY_PAGE = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
# What docs/experiments/ tells of is past: flags and files of its time.
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

# Files and folders of the reader's own, by the names that the pages give them.
_OF_THE_READER = {"my.yaml", "mine.safetensors", "page.html", "recordings/", "rows.json"}
# Subcommands that pass other flags on to the server.
_TAKE_SERVER_FLAGS = ("serve", "doctor")
# Flags of other programs than SGLang's server and ours.
_OF_OTHERS = {"--editable"}

_OUR_SOURCES = ("sglang_hvd", "scripts", "benchmarks", "patches", "tests")

_FLAG = re.compile(r"(?<![\w-])--[a-z](?:-?[a-z0-9])*(?![\w*-])")  # not --hvd-*
_LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
_NAME = re.compile(r"[a-z]+(?:_[a-z0-9]+)+|[A-Z]+(?:_[A-Z0-9]+)+")
_FILE = re.compile(r"[\w./-]+/|[\w./-]*\w\.(?:py|pyi|hpp|cpp|md|toml|ya?ml|sh|svg|json|html)")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


of_pages = pytest.mark.parametrize("page", PAGES, ids=ids)


# What the pages say.


def blocks(page: Path) -> list[str]:
    """The page's code blocks, with continued lines joined."""
    text = page.read_text().replace("\\\n", " ")
    fenced = re.findall(r"^( *)```\w*\n(.*?)^\1```", text, re.S | re.M)
    indented = re.findall(
        r"(?:^(?: {4}|\t).*\n)+", re.sub(r"```.*?```", "", text, flags=re.S), re.M
    )
    return [block for _, block in fenced] + indented


def spans(page: Path) -> list[str]:
    """What the page writes in backticks, outside code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", text)]


def command_lines(page: Path) -> Iterator[str]:
    for text in (*(line for block in blocks(page) for line in block.splitlines()), *spans(page)):
        yield text.partition(" # ")[0].strip()


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    return [target or image for target, image in _LINK.findall(text)]


@cache
def anchors(page: Path) -> set[str]:
    """Those of the headings, as the site and GitHub name them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}


# What the code has.


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


@cache
def command_flags() -> dict[str, set[str]]:
    """The flags of each subcommand of sglang-hvd."""
    found = {}
    for name, command in _commands().items():
        parser = argparse.ArgumentParser()
        command.add(parser)
        found[name] = options_of(parser)
    return found


@cache
def server_flags() -> set[str]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    of_hvd = {"--hvd-config", "--hvd-set", *map(option_name, FLAGS)}
    return options_of(parser) | of_hvd


@cache
def flags_in(*folders: str) -> set[str]:
    """The flags that Python files in these folders, or these files, add to a parser."""
    files = [
        file
        for name in folders
        for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    ]
    calls = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {
        argument.value
        for call in calls
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    }


def flags_of_program(line: str) -> set[str] | None:
    """The flags of the program that the line calls; None if it is none of ours or SGLang's server.

    Raises KeyError for a program, subcommand or target that does not exist.
    """
    match line.split():
        case ["sglang-hvd", command, *_] if command != "...":
            flags = command_flags()[command]
            return flags | server_flags() if command in _TAKE_SERVER_FLAGS else flags
        case ["python", "-m", "sglang.launch_server", *_]:
            return server_flags()
        case ["python", "-m", module, *_] if module.startswith("benchmarks."):
            place = module.replace(".", "/")
            places = [name for name in (f"{place}.py", place) if (ROOT / name).exists()]
            if not places:
                raise KeyError(module)
            shared = ("benchmarks/command.py", "sglang_hvd/commands/arguments.py")
            return flags_in(*places, *shared) | server_flags()
        case ["make", target, *_]:
            if not re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M):
                raise KeyError(target)
            if target in ("demo", "serve"):
                return flags_of_program(f"sglang-hvd {target}")
            return None
    return None


@cache
def metric_names() -> set[str]:
    tables = [value for value in vars(metrics).values() if isinstance(value, tuple)]
    rows = [row for table in tables for row in table if isinstance(row, metrics.Metric)]
    sums = {f"{row.name}_sum" for row in rows if row.buckets}  # Prometheus's name for them
    return sums | {f"{row.name}{'_total' if row.merged is None else ''}" for row in rows}


@cache
def words_of_the_code() -> set[str]:
    """Every word of our sources and of the parts of SGLang that a user meets."""
    ours = [
        *(ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "configs/default.yaml"),
        *(f for name in _OUR_SOURCES for f in (ROOT / name).rglob("*.*")),
    ]
    srt = Path(sglang.__file__).parent / "srt"
    parts = ("arg_groups", "entrypoints", "managers", "sampling", "observability", "parser")
    theirs = [f for part in parts for f in (srt / part).rglob("*.py")]
    texts = [
        file.read_text()
        for file in (*ours, *theirs, srt / "environ.py")
        if file.suffix in (".py", ".hpp", ".cpp", ".sh", ".yaml", ".toml", "")
    ]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return words | {file.stem for file in ours} | {*RequestStats().figures()}


# The rules.


@pytest.mark.parametrize("page", EVERY_PAGE, ids=ids)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for link in links(page):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_of_site = not page.is_relative_to(DOCS) or target.is_relative_to(DOCS)
        if not target.exists() or not is_of_site or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


@of_pages
def test_every_flag_exists(page: Path) -> None:
    known = server_flags() | flags_in("benchmarks", "scripts") | _OF_OTHERS
    known = known.union(*command_flags().values())
    assert sorted({*_FLAG.findall(page.read_text())} - known) == []


@of_pages
def test_every_command_exists_and_has_its_flags(page: Path) -> None:
    wrong = []
    for line in command_lines(page):
        try:
            known = flags_of_program(line)
        except KeyError:
            wrong.append(line)
            continue
        # What follows a pipe or a closing quote belongs to another program.
        given = _FLAG.findall(line.partition(" | ")[0])
        wrong += [f"{line}: {flag}" for flag in given if known is not None and flag not in known]
    assert wrong == []


@of_pages
def test_every_setting_exists(page: Path) -> None:
    text = page.read_text()
    given = {*re.findall(r"--hvd-set '?(\w+)=", text)}
    assert given - {*HvdConfig.model_fields, "KEY"} == set()
    for block in re.findall(r"```yaml\n(.*?)```", text, re.S):
        HvdConfig.model_validate(yaml.safe_load(block))


@of_pages
def test_every_metric_exists(page: Path) -> None:
    named = set(re.findall(r"sglang:hvd_([a-z_]*[a-z])\b", page.read_text()))
    assert named - metric_names() == set()


@of_pages
def test_every_name_in_backticks_is_a_name_of_the_code(page: Path) -> None:
    """Keys of /server_info and YAML files, sampling parameters, environment variables."""
    names = {word for span in spans(page) for word in re.split(r"[^\w]+", span)}
    made_up = {word for word in names if _NAME.fullmatch(word)} - words_of_the_code()
    assert sorted(made_up - metric_names() - {f"hvd_{name}" for name in metric_names()}) == []


@of_pages
def test_every_file_exists(page: Path) -> None:
    files = {span for span in spans(page) if _FILE.fullmatch(span)} - _OF_THE_READER
    of_models = {"tokenizer.json", "generation_config.json"}
    assert sorted(file for file in files - of_models if not is_there(file)) == []


def test_the_pages_stay_short() -> None:
    words = [word for page in DOCS.glob("*.md") for word in page.read_text().split()]
    assert sum(bool(re.search(r"\w", word)) for word in words) <= MAX_WORDS
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_pictures_are_what_their_source_draws() -> None:
    for name, draw in runpy.run_path(str(DOCS / "assets/draw.py"))["DRAWN"].items():
        drawn = draw()
        assert (DOCS / "assets" / name).read_text() == drawn, "run python docs/assets/draw.py"
        assert ElementTree.fromstring(drawn).find("{http://www.w3.org/2000/svg}title") is not None


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        flags_of_program("sglang-hvd polish --fast")
    with pytest.raises(KeyError):
        flags_of_program("make coffee")
    assert "--fast" not in flags_of_program("sglang-hvd demo --fast")
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n\n    run --x\n\n`one_name` [l](no.md) `[l](code.md)`\n")
    assert (spans(page), links(page)) == (["b", "one_name", "[l](code.md)"], ["no.md"])
    assert anchors(page) == {"a-b-c"}
    assert next(command_lines(page)) == "run --x"
