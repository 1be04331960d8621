"""Recordings: files of traces from one source each."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from sglang_hvd.replay.trace_tokenizer import TraceTokenizer
from sglang_hvd.traces.reader import is_recording, read_traces
from sglang_hvd.traces.recording_folder import (
    held_folder,
    is_of_server,
    num_unfinished,
    salvage,
)
from sglang_hvd.traces.text_traces import read_text_traces
from sglang_hvd.traces.trace import Trace, share_prompts

# What the mean over all families is called in results: no file and no family may be called so.
MEAN = "mean"

SUFFIXES = (".jsonl", ".hvdt")

# Tokens at the beginning of a session that tell it from one of another recording. Few: they are in
# the prompt of its later turns too.
_NUM_NAMING = 16


@dataclass(frozen=True, slots=True)
class Source:
    """repository: on GitHub, its owner's name before its own."""

    repository: str
    licence: str


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of traces from one source.

    source: where the text of a file of text traces is from.
    link: another name of the file, by which it is read; see held.
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
        """The repository is MIT or Apache-2.0, and no text in it is for non-commercial use only."""
        return self.licence.startswith(("MIT", "Apache-2.0")) and "NC" not in self.licence

    def traces(self, tokenizer: TraceTokenizer) -> list[Trace]:
        """All traces of the file. Raises ValueError, in one line, if it is not whole and sound."""
        with self._named() as path:
            # Recordings hold token ids: only text needs the token that ends an output.
            eos_token_id = None if is_recording(path) else tokenizer.eos_token_id
            traces = read_traces(
                path, tokenizer.loaded, eos_token_id, template=tokenizer.chat_template
            )
            return list(share_prompts(traces))

    def session_fingerprints(self) -> list[str]:
        """Those of its sessions, in their order, without the time that tokens of text take. Raises
        ValueError as `traces` does."""
        with self._named() as path:
            tokenizer = None if is_recording(path) else Tokenizer(WordLevel({"": 0}, unk_token=""))
            return list(session_fingerprints(read_traces(path, tokenizer)).values())

    @contextlib.contextmanager
    def _named(self) -> Iterator[Path]:
        """The file to read. What is wrong with it is told of the name that the user knows."""
        path = self.link or self.path
        try:
            yield path
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), str(self.path))) from None


def find_recordings(traces: Path) -> list[Recording]:
    """The files of a folder, by name, or the one file. What a killed server left unfinished there
    is completed first. Raises ValueError, in one line, if there are none or they cannot be listed.
    """
    try:
        if traces.is_dir():
            with contextlib.suppress(OSError):  # a folder that may only be read
                salvage(traces)
            paths = sorted(path for path in traces.iterdir() if path.suffix in SUFFIXES)
        else:
            paths = [traces]
    except OSError as error:
        raise ValueError(f"{traces}: cannot read the folder: {error.strerror}") from None
    if not paths and (num_growing := num_unfinished(traces)):
        raise ValueError(
            f"{traces}: {num_growing} recording(s) still being written, none complete: one is "
            "after --hvd-record-file-mb, after an hour, or when its server is ended"
        )
    if not paths:
        raise ValueError(
            f"{traces}: no traces ({', '.join('*' + s for s in SUFFIXES)}): give another folder"
        )
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.stem == MEAN:
            raise ValueError(f"{path}: {MEAN} is what the mean of all files is called: rename it")
        if path.stem in by_name:
            raise ValueError(
                f"{path}: results call it {path.stem}, as they do {by_name[path.stem].name}: "
                "rename one"
            )
        by_name[path.stem] = path
    return [Recording(path, _source_of(path)) for path in paths]


@contextlib.contextmanager
def held(recordings: Sequence[Recording]) -> Iterator[list[Recording]]:
    """The same, to be read until the end even if a server that records into their folder removes
    the oldest meanwhile. Those that it has removed already are left out.

    They are hard links in a hidden folder beside them. Where that cannot be, the recordings stay as
    they are; what no server writes does so anyway.
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
            except OSError:  # a folder that may only be read, a file system without links
                kept.append(recording)
        yield kept


def session_fingerprints(traces: Iterable[Trace]) -> dict[str, str]:
    """Names each session of a file, whatever the file is called.

    Text: by its first turn, so the name is the same with every tokenizer.
    Tokens: by the name that the recording gave it, since a recording that goes on in another file
    splits sessions, and by its first tokens, since other recordings may give the same names.
    """
    fingerprints: dict[str, str] = {}
    for trace in traces:
        if trace.session not in fingerprints:
            fingerprints[trace.session] = (trace.text_digest or _token_digest(trace))[:12]
    return fingerprints


def _token_digest(trace: Trace) -> str:
    digest = hashlib.sha256(trace.session.encode("utf-8", "surrogatepass"))
    digest.update(trace.text_ids[:_NUM_NAMING].tobytes())
    return digest.hexdigest()


def _source_of(path: Path) -> Source | None:
    try:
        first = next(read_text_traces(path), None)
    except ValueError:
        return None  # another form; what is wrong with it, if anything, its reader says
    return None if first is None else Source(first.source_repo, first.licence)
