"""The commands on a shared cache, against a server that has one and no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from sglang.srt.runtime_context import get_context
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_hvd.cli import main
from sglang_hvd.config import HvdConfig
from sglang_hvd.drafter import HybridDrafter
from sglang_hvd.plugin.device.rank_group import RankGroup
from sglang_hvd.plugin.requests.served_cache import ServedCache
from sglang_hvd.suffix_cache import namespace_name
from sglang_hvd.suffix_cache.orders import read_order

KEY = "admin"
INFO = {"internal_states": [{"hvd": {}}]}


class Server:
    """Answers the requests of the commands, as a server's HTTP front and its scheduler do."""

    def __init__(self, tokenizer: Path) -> None:
        drafter = HybridDrafter.from_config(
            HvdConfig(policy="cache"),
            token_strings=[],
            num_model_steps=3,
            num_model_nodes=3,
            verify_width=32,
            deterministic=True,
        )
        self.cache = cache = ServedCache(
            drafter, HvdConfig(policy="cache"), ranks=RankGroup(), group=0, vocab_size=100
        )

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, INFO)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert body["load_format"] == "hvd_cache"
                if self.headers.get("Authorization") != f"Bearer {KEY}":
                    self.answer(401, {"error": "Unauthorized"})
                    return
                try:
                    with get_context().override_server_args(tokenizer_path=str(tokenizer)):
                        said = cache.answer(read_order(body["manifest"]))
                except ValueError as error:
                    self.answer(400, {"success": False, "message": str(error)})
                else:
                    self.answer(200, {"success": True, "message": json.dumps([said])})

            def answer(self, status: int, content: object) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *args: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def run(self, *arguments: str, key: str | None = KEY) -> int:
        keys = () if key is None else ("--admin-api-key", key)
        return main([*arguments, "--url", self.url, *keys])

    def tokens(self) -> dict[str, int]:
        """Tokens of each namespace."""
        return {found.name: found.num_tokens for found in self.cache._cache.contents()}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The folder of the served tokenizer."""
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "<eos>": 3}, unk_token="c"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture
def server(tokenizer: Path) -> Iterator[Server]:
    made = Server(tokenizer)
    thread = Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def test_texts_of_every_kind_enter_the_cache(
    server: Server, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, plain, chats = tmp_path / "ids.jsonl", tmp_path / "plain.txt", tmp_path / "chats.jsonl"
    ids.write_text('{"prompt_ids": [7, 8], "output_ids": [3, 4, 5]}\n')
    plain.write_text("a b c a\n")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b a"}]
    chats.write_text(json.dumps({"messages": chat}) + "\n")
    assert server.run("warm", "--from", str(ids)) == 0
    assert server.tokens() == {"": 3}
    assert server.run("warm", "--from", str(ids), "--with-prompts", "--cache-salt", "s") == 0
    assert server.tokens() == {"": 3, namespace_name("s"): 5}
    assert server.run("warm", "--from", str(plain), "--namespace", "n") == 2
    assert "text needs a tokenizer" in capsys.readouterr().err
    of_text = ("--tokenizer", str(tokenizer / "tokenizer.json"), "--eos-token", "<eos>")
    of_part = ("--namespace", "n", "--extra-key", "e")
    assert server.run("warm", "--from", str(plain), str(chats), *of_text, *of_part) == 0
    assert server.tokens()[namespace_name("", "e", "n")] == 4 + 3
    assert "2 of 2 files, 7 tokens" in capsys.readouterr().err


def test_a_text_of_another_tokenizer_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"z": 0}, unk_token="z")).save(str(other))
    plain = tmp_path / "plain.txt"
    plain.write_text("z z\n")
    given = ("--tokenizer", str(other), "--eos-token", "")
    assert server.run("warm", "--from", str(plain), *given) == 2
    assert "the one that is served is" in capsys.readouterr().err
    assert server.tokens() == {}


def test_what_more_texts_than_fit_leave_is_said(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.run("cache", "resize", "--tokens", "50", "--namespace-tokens", "40") == 0
    assert "at most 50 tokens, 40 in each namespace" in capsys.readouterr().out
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(f"{json.dumps([i] * 10)}\n" for i in range(20)))
    assert server.run("warm", "--from", str(ids)) == 0
    said = capsys.readouterr()
    assert said.out == "the shared cache holds 40 of at most 50 tokens\n"
    assert "200 tokens were more than it may hold" in said.err


def test_a_snapshot_goes_from_server_to_file_and_back(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, path = tmp_path / "ids.jsonl", tmp_path / "cache"
    ids.write_text("[1, 2, 3]\n[4]\n")
    for salt in ("s", "t"):
        assert server.run("warm", "--from", str(ids), "--cache-salt", salt) == 0
    before = server.tokens()
    capsys.readouterr()
    # Flags may stand between the words.
    given = ("--url", server.url, "--admin-api-key", KEY)
    assert main(["snapshot", "save", *given, str(path)]) == 0
    assert capsys.readouterr().out == f"8 tokens in {path}\n"
    assert server.run("cache", "erase", "--all") == 0
    assert server.tokens() == {}
    assert main(["snapshot", "load", *given, str(path)]) == 0
    assert server.tokens() == before
    path.write_bytes(path.read_bytes()[:-1])
    assert server.run("snapshot", "load", str(path)) == 2
    assert "cut off or damaged" in capsys.readouterr().err
    ids.chmod(0o600)
    assert server.run("snapshot", "save", str(ids)) == 2
    assert "is not replaced" in capsys.readouterr().err


def test_a_namespace_is_listed_and_erased_by_the_name_of_the_list_or_by_what_requests_give(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text("[1, 2, 3]\n")
    for salt in ("", "s", "t"):
        assert server.run("warm", "--from", str(ids), "--cache-salt", salt) == 0
    capsys.readouterr()
    assert server.run("cache", "list") == 0
    _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["namespace", "outputs", "tokens"]
    names = [row.split()[0] for row in rows]
    assert sorted(names) == sorted(["(none)", *(namespace_name(s)[:12] for s in "st")])
    assert server.run("cache", "erase", "--listed", namespace_name("s")[:12]) == 0
    assert set(server.tokens()) == {"", namespace_name("t")}
    assert server.run("cache", "erase", "--listed", "nothing") == 2
    assert "0 namespaces are called nothing" in capsys.readouterr().err
    assert server.run("cache", "erase", "--cache-salt", "t") == 0
    assert set(server.tokens()) == {""}
    assert server.run("cache", "erase") == 2  # of which namespace is not said
    assert server.run("cache", "erase", "--all", "--cache-salt", "t") == 2
    assert server.run("cache", "erase", "--listed", "(none)") == 0
    assert server.tokens() == {}


def test_without_the_admin_key_nothing_is_told_or_changed(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ("cache", "list"),
        ("cache", "erase", "--all"),
        ("snapshot", "save", str(tmp_path / "cache")),
    ):
        assert server.run(*arguments, key=None) == 2
        assert "401" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
