"""A line of a JSONL file."""

import json
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
