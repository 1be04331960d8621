"""Recordings: files of traces, each from one source."""

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from sglang_hvd.payoff import TokenClasses
from sglang_hvd.traces.chat_templates import ChatTemplate
from sglang_hvd.traces.reader import has_chats, is_recording, read_traces
from sglang_hvd.traces.recording_folder import (
    held_folder,
    is_of_server,
    num_unfinished,
    salvage,
)
from sglang_hvd.traces.text_traces import read_text_traces
from sglang_hvd.traces.tokenizer_json import load_tokenizer, token_strings, tokenizer_fingerprint
from sglang_hvd.traces.trace import Trace, share_prompts

NOTHING_LEFT = (
    "no session is left to judge, because the predictors were trained on all of them: give other "
    "--traces"
)
_NOTHING_AFTER_WARM_UP = (
    "no session is left to judge, because the predictors were trained on all sessions after "
    "--warm-up: lower --warm-up or give other --traces"
)
NOTHING_DECODED = (
    "nothing was decoded in the sessions that are judged, because their replies are empty: give "
    "other --traces"
)

# Name of the mean over all families in results. No file and no family may have it.
MEAN = "mean"

SUFFIXES = (".jsonl", ".hvdt")

# So many tokens at the beginning of a session tell it from sessions of other recordings. They must
# be few, so that the prompts of all its turns contain them.
_NUM_NAMING = 16


@dataclass(frozen=True)
class TraceTokenizer:
    """The tokenizer that traces are read with.

    path: its tokenizer.json.
    eos_token: token that ends every output of a text trace. None or empty: nothing follows the
        text.
    """

    path: Path
    eos_token: str | None

    def check(self) -> None:
        """Loads the file now. Raises ValueError, in one line, if it holds no tokenizer."""
        _ = self.loaded

    def check_chats(self, files: Iterable[Path]) -> None:
        """Says on stderr if chat logs are among the files and the tokenizer has no chat template.

        Raises ValueError, in one line, if its chat template cannot be read.
        """
        if any(map(has_chats, files)) and self.chat_template.is_chatml:
            print(
                f"{self.path.parent} has no chat template (chat_template.jinja or "
                "tokenizer_config.json): chat logs are rendered as ChatML",
                file=sys.stderr,
            )

    @cached_property
    def loaded(self) -> Tokenizer:
        return load_tokenizer(self.path)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.path)

    @cached_property
    def fingerprint(self) -> str:
        return tokenizer_fingerprint(self.loaded)

    @cached_property
    def eos_token_id(self) -> int | None:
        """Raises ValueError if the tokenizer has no such token."""
        if not self.eos_token:
            return None
        token_id = self.loaded.token_to_id(self.eos_token)
        if token_id is None:
            raise ValueError(
                f"{self.path} has no token {self.eos_token}: set --eos-token to one that it has"
            )
        return int(token_id)

    @cached_property
    def token_classes(self) -> TokenClasses:
        return TokenClasses.from_strings(token_strings(self.loaded))


@dataclass(frozen=True, slots=True)
class Source:
    """repository: OWNER/NAME on GitHub."""

    repository: str
    licence: str


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of traces from one source.

    source: origin of the text; None for recordings of a server.
    link: hard link through which the file is read; see held.
    """

    path: Path
    source: Source | None
    link: Path | None = None

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def licence(self) -> str:
        return "" if self.source is None else self.source.licence

    @property
    def is_permissive(self) -> bool:
        """The licence is MIT or Apache-2.0, and all of the text may be used commercially."""
        return self.licence.startswith(("MIT", "Apache-2.0")) and "NC" not in self.licence

    def traces(self, tokenizer: TraceTokenizer) -> list[Trace]:
        """All traces of the file. Raises ValueError, in one line, if it is cut off or corrupt."""
        with self._named() as path:
            # Recordings contain token ids, so only text needs the token that ends an output.
            eos_token_id = None if is_recording(path) else tokenizer.eos_token_id
            traces = read_traces(
                path, tokenizer.loaded, eos_token_id, template=tokenizer.chat_template
            )
            return list(share_prompts(traces))

    def session_fingerprints(self) -> list[str]:
        """Fingerprints of its sessions, in order, without tokenizing text, which takes long. Raises
        ValueError as `traces` does."""
        with self._named() as path:
            tokenizer = None if is_recording(path) else Tokenizer(WordLevel({"": 0}, unk_token=""))
            return list(session_fingerprints(read_traces(path, tokenizer)).values())

    @contextlib.contextmanager
    def _named(self) -> Iterator[Path]:
        """The file to read. Errors name the file as the user knows it."""
        path = self.link or self.path
        try:
            yield path
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), str(self.path))) from None


def find_recordings(traces: Path) -> list[Recording]:
    """The recordings of a folder, sorted by name, or the one file. Files that a killed server left
    unfinished are completed first.

    Raises ValueError, in one line, if there are no recordings or they cannot be listed.
    """
    try:
        if traces.is_dir():
            with contextlib.suppress(OSError):  # the folder is read-only
                salvage(traces)
            paths = sorted(path for path in traces.iterdir() if path.suffix in SUFFIXES)
        else:
            paths = [traces]
    except OSError as error:
        raise ValueError(f"{traces}: cannot read the folder: {error.strerror}") from None
    if not paths and (num_growing := num_unfinished(traces)):
        raise ValueError(
            f"{traces}: {num_growing} recording(s) are still being written, and none is complete: "
            "wait for record_file_mb or an hour, or stop the server"
        )
    if not paths:
        raise ValueError(
            f"{traces}: no traces ({', '.join('*' + s for s in SUFFIXES)}): give another folder"
        )
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.stem == MEAN:
            raise ValueError(
                f"{path}: results use the name {MEAN} for the mean of all files: rename the file"
            )
        if path.stem in by_name:
            raise ValueError(
                f"{path}: results would call both this file and {by_name[path.stem].name} "
                f"{path.stem}: rename one of them"
            )
        by_name[path.stem] = path
    return [Recording(path, _source_of(path)) for path in paths]


@contextlib.contextmanager
def held(recordings: Sequence[Recording]) -> Iterator[list[Recording]]:
    """The same recordings, which can be read even if a server that records into their folder
    removes the oldest ones meanwhile. Recordings that it has already removed are left out.

    Files that a server wrote are read through hard links in a hidden folder next to them. All other
    recordings, and those on a file system without links, are returned as they are.
    """
    with contextlib.ExitStack() as stack:
        folders: dict[Path, Path] = {}
        kept = []
        for recording in recordings:
            path = recording.path
            if not is_of_server(path):
                kept.append(recording)
                continue
            try:
                if path.parent not in folders:
                    folders[path.parent] = stack.enter_context(held_folder(path.parent))
                link = folders[path.parent] / path.name
                link.hardlink_to(path)
                kept.append(replace(recording, link=link))
            except FileNotFoundError:
                continue
            except OSError:  # a read-only folder, or a file system without links
                kept.append(recording)
        yield kept


def session_fingerprints(traces: Iterable[Trace]) -> dict[str, str]:
    """Fingerprint of each session of a file, by the session's name. It does not depend on the
    file's name.

    A session of text is known by its first turn, so every tokenizer gives the same fingerprint.
    A session of tokens is known by its name, since a recording may continue in another file and
    split the session, and by its first tokens, since other recordings may use the same names.
    """
    fingerprints: dict[str, str] = {}
    for trace in traces:
        if trace.session not in fingerprints:
            fingerprints[trace.session] = (trace.text_digest or _token_digest(trace))[:12]
    return fingerprints


def mean_over_families(values: Iterable[tuple[str, float | None]]) -> float | None:
    """The mean over the families of each family's mean over its files: a family of many files
    counts no more than a family of one.

    values: family and value of each file. Files whose value is None are left out. Returns None if
        no value is left.
    """
    families: dict[str, list[float]] = {}
    for family, value in values:
        if value is not None:
            families.setdefault(family, []).append(value)
    means = [sum(of_family) / len(of_family) for of_family in families.values()]
    return sum(means) / len(means) if means else None


def tell_trained_on(
    recordings: Sequence[Recording], trained_on: frozenset[str], *, warm_up: float = 0.0
) -> None:
    """Prints on stderr how many sessions a predictor was trained on, and in which files. Such
    sessions only fill the shared cache.

    trained_on: fingerprints of the sessions that a predictor was trained on.
    warm_up: share of each recording's sessions, from the first on, that are not judged either.

    Raises ValueError, in one line, if no session is left to judge or a file cannot be read.
    """
    sessions = {recording.path: recording.session_fingerprints() for recording in recordings}
    judged = [
        fingerprint
        for of_file in sessions.values()
        for fingerprint in of_file[int(len(of_file) * warm_up) :]
        if fingerprint not in trained_on
    ]
    num_sessions = sum(map(len, sessions.values()))
    if num_sessions and not judged:
        raise ValueError(_NOTHING_AFTER_WARM_UP if warm_up else NOTHING_LEFT)
    num_trained = {
        path.stem: sum(fingerprint in trained_on for fingerprint in of_file)
        for path, of_file in sessions.items()
    }
    names = [name for name, num in num_trained.items() if num]
    if names:
        print(
            f"{sum(num_trained.values())} of {num_sessions} sessions (in {', '.join(names)}) only "
            "fill the cache: a predictor was trained on them",
            file=sys.stderr,
        )


def _token_digest(trace: Trace) -> str:
    digest = hashlib.sha256(trace.session.encode("utf-8", "surrogatepass"))
    digest.update(trace.text_ids[:_NUM_NAMING].tobytes())
    return digest.hexdigest()


def _source_of(path: Path) -> Source | None:
    try:
        first = next(read_text_traces(path), None)
    except ValueError:
        return None  # not a text trace; its own reader reports what is wrong with it
    return None if first is None else Source(first.source_repo, first.licence)
