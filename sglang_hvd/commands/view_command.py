"""The command view: asks a running server, and shows where each token of its replies came from."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hvd.commands.arguments import count, output_file
from sglang_hvd.commands.files import config_of, open_recordings
from sglang_hvd.commands.running_server import ask, hvd_states
from sglang_hvd.commands.servers import add_server
from sglang_hvd.view.cycles import Cycle
from sglang_hvd.view.replies import ViewedReply, read_replies, replies_json, token_texts
from sglang_hvd.whole_file import write_whole

# A reply may take minutes on a busy server.
_REPLY_SECONDS = 600
_MAX_TITLE = 100


def add_view(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--prompt", action="append", metavar="TEXT", help="ask this; may be given several times"
    )
    asked.add_argument(
        "--prompt-file",
        type=Path,
        action="append",
        metavar="FILE",
        help="ask what this text file holds; may be given several times",
    )
    asked.add_argument(
        "--json", type=Path, metavar="FILE", help="show the replies that --save-json wrote"
    )
    asked.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="replay this folder or file of recordings, and show the last replies of each",
    )
    recorded = parser.add_argument_group("with --traces")
    recorded.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json of the model that generated them",
    )
    recorded.add_argument(
        "--eos-token",
        default="<|im_end|>",
        metavar="TOKEN",
        help="token that ends every output of text traces and chat logs (default: %(default)s)",
    )
    recorded.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of settings, as --hvd-config"
    )
    recorded.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="table of step costs (see configs/costs), for policy allocate (default: the one that "
        "--config names; without one policy payoff decides)",
    )
    recorded.add_argument(
        "--replies",
        type=count,
        default=1,
        metavar="N",
        help="number of replies of each recording (default: %(default)s)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="send each prompt as a user's message of a chat (default: as text to be continued)",
    )
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=256,
        metavar="N",
        help="maximum length of a reply (default: %(default)s)",
    )
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write the page")
    parser.add_argument(
        "--save-json", type=output_file, metavar="FILE", help="write the replies as JSON"
    )


def run_view(options: argparse.Namespace) -> int:
    # Imported here: only a page needs jinja2.
    from sglang_hvd.view.reply_page import write_page

    if options.html is None and options.save_json is None:
        raise ValueError("view has nothing to write: give --html, --save-json or both")
    if options.json is not None:
        replies = read_replies(options.json)
    elif options.traces is not None:
        replies = _replayed(options)
    else:
        replies = _asked(options)
    # They hold what users sent and received.
    if options.save_json is not None:
        write_whole(options.save_json, replies_json(replies).encode(), is_private=True)
    if options.html is not None:
        write_page(options.html, replies, title="Where each token came from", is_private=True)
    for reply in replies:
        print(_summary(reply))
    return 0


def _asked(options: argparse.Namespace) -> list[ViewedReply]:
    prompts = options.prompt or [_read(path) for path in options.prompt_file]
    if any(not prompt.strip() for prompt in prompts):
        raise ValueError("an empty prompt: give --prompt some text")
    url, key = options.url.rstrip("/"), options.api_key
    config = hvd_states(url, key)[0].get("config", {})
    about = f"policy {config.get('policy')}, {url}"
    return [
        _reply(url, key, prompt, about, is_chat=options.chat, max_tokens=options.max_tokens)
        for prompt in prompts
    ]


def _replayed(options: argparse.Namespace) -> list[ViewedReply]:
    from sglang_hvd.costs import StepCosts
    from sglang_hvd.replay.core.model_drafter import ModelDrafter
    from sglang_hvd.replay.report.replayed_replies import replayed_replies

    if options.tokenizer is None:
        raise ValueError("--traces needs --tokenizer: the tokenizer.json of the model")
    config = config_of(options)
    costs = options.costs or config.costs
    with open_recordings(options) as (recordings, tokenizer):
        return replayed_replies(
            recordings,
            tokenizer,
            config=config,
            costs=None if costs is None else StepCosts.load(costs),
            model_drafter=ModelDrafter(),
            num_replies=options.replies,
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"{path}: cannot read the prompt: {reason}") from None


def _reply(
    url: str, api_key: str | None, prompt: str, about: str, *, is_chat: bool, max_tokens: int
) -> ViewedReply:
    """Asks for a greedy reply with a report of its cycles.

    Raises ValueError, in one line, if the server refuses or does not report them.
    """
    start = time.perf_counter()
    custom_params = {"hvd": {"report_cycles": True}}
    if is_chat:
        body: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "custom_params": custom_params,
            "return_meta_info": True,
            "return_token_ids": True,
        }
        answer = _send(f"{url}/v1/chat/completions", body, api_key)["choices"][0]
        token_ids = answer["response_token_ids"]
    else:
        params = {"max_new_tokens": max_tokens, "temperature": 0, "custom_params": custom_params}
        answer = _send(f"{url}/generate", {"text": prompt, "sampling_params": params}, api_key)
        token_ids = answer["output_ids"]
    seconds = time.perf_counter() - start
    figures = (answer["meta_info"].get("hvd") or [{"cycles": []}])[0]
    if "cycles" not in figures:
        raise ValueError(
            f"the server at {url} reports no cycles: it has an older version of sglang-hvd; "
            "install this one there"
        )

    def decode_all(windows: list[list[int]]) -> Sequence[str]:
        body = {"tokens": windows, "skip_special_tokens": False}
        texts: list[str] = _send(f"{url}/detokenize", body, api_key)["text"]
        return texts

    first_line = prompt.strip().splitlines()[0]
    title = first_line if len(first_line) <= _MAX_TITLE else first_line[: _MAX_TITLE - 1] + "…"
    return ViewedReply(
        title=title,
        about=about,
        prompt=prompt,
        tokens=token_texts(token_ids, decode_all),
        cycles=tuple(map(Cycle.from_report, figures["cycles"])),
        seconds=round(seconds, 3),
    )


def _send(url: str, body: dict[str, Any], api_key: str | None) -> dict[str, Any]:
    return ask(url, body, api_key, timeout_s=_REPLY_SECONDS)


def _summary(reply: ViewedReply) -> str:
    sources = reply.sources
    counts = {source: sources.count(source) for source in dict.fromkeys(sources)}
    of_sources = ", ".join(f"{source} {num}" for source, num in counts.items())
    return f"{len(reply.tokens)} tokens in {len(reply.cycles)} cycles: {of_sources}"
