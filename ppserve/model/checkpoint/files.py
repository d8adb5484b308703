"""Reading small files that may be hostile: regular files only, bounded, and every failure names the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ppserve.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
"""Larger than any tokenizer.json in use; a bound, so that a wrong file cannot fill the memory."""


def file_size(path: Path) -> int:
    """Bytes of a regular file. Refuses what `open` would wait on for ever (a pipe) or not at all."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read ({_reason(error)})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(path, "is not a regular file")
    if not os.access(path, os.R_OK):
        raise CheckpointError(path, "may not be read by this user")
    return status.st_size


def is_file(path: Path) -> bool:
    """Whether something of this name is there to be opened, a broken or looping link included.

    A link that leads nowhere is a fault to report, not an absent file to pass over.
    """
    return path.is_symlink() or path.exists()


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole small file. Raises CheckpointError when it is larger than `limit` bytes."""
    size = file_size(path)
    if size > limit:
        raise CheckpointError(path, f"is {size} bytes long, more than the {limit} that such a file may have")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({_reason(error)})") from error


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON file that holds an object; a name given twice in an object is refused, not silently resolved."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(path, "is given twice", field=shown(twice))
        return members

    try:
        value = json.loads(read_bytes(path, limit), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, endless digits, endless nesting
        raise CheckpointError(path, f"is not valid JSON ({_reason(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, f"holds a JSON {type(value).__name__}, not an object")
    return value


def shown(value: object, limit: int = 80) -> str:
    """A value from an untrusted file as it may appear in a one-line message."""
    try:
        text = value if isinstance(value, str) and value.isprintable() else repr(value)
    except ValueError:  # an integer with more digits than Python is willing to print
        text = "a huge number"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return shown(text or type(error).__name__, 120)
