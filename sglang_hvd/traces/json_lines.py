"""JSONL files: a JSON object in each line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_object(line: str | bytes) -> dict[str, Any]:
    """The object that the line holds. Raises ValueError that says what it is instead."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError("not text") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"wanted an object, got {type(fields).__name__}")
    return fields


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of text, each with the place where it stands.

    Raises ValueError with file and line for anything that is no such line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    fields = json_object(line)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                yield where, fields
    except OSError as error:
        raise ValueError(f"{path}: cannot read the traces: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None


def check_text(text: str) -> None:
    """Raises ValueError for half of a surrogate pair: JSON can write it, no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not text: half of a surrogate pair") from None
