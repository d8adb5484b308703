"""Reads small files that may be hostile. They must be regular files and not too large; every error names the file.

`within` limits the time of a download.
"""

from __future__ import annotations

import json
import re
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from ppserve.errors import CheckpointError

T = TypeVar("T")

TINY = Path(__file__).parent / "assets" / "tiny"
"""The directory of the built-in model."""

MAX_JSON_BYTES = 256 << 20
"""The greatest size of JSON files. It is more than that of any tokenizer.json, and a wrong file cannot fill the
memory."""

KINDS = {
    rb"\Z": "an empty file",
    rb"GGUF": "a GGUF file",
    rb"(?i)\s*<(!doctype|html|\?xml|head|body)": "a web page, as a failed download leaves it",
    rb".{7}\0\{": "a safetensors file",
    rb"\s*[{\[]": "a text of JSON",
    rb"PK\x03\x04": "a zip archive",
    rb"\x80[\x02-\x05]": "a pickle",
    rb"\x1f\x8b|BZh|7z\xbc\xaf|\xfd7zXZ|\x28\xb5\x2f\xfd|Rar!|.{257}ustar": "a packed archive: unpack it",
    rb"lmgg|tjgg|fmgg|ggml": "a model of llama.cpp from before GGUF: convert it",
    rb"\x89HDF": "an HDF5 file, as of TensorFlow or Keras",
    rb"\x93NUMPY": "an array of NumPy",
    rb"\x08[\x01-\x20]\x12.[a-zA-Z]": "an ONNX model",
}
"""Kinds of files, by a pattern of their first bytes."""


def file_size(path: Path) -> int:
    """Return how many bytes a regular file has. Raises CheckpointError for another kind of file: opening a pipe
    would block."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read ({reason(error)})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(path, "is not a regular file")
    if status.st_size < 1024 and read_start(path, 1024).startswith(b"version https://git-lfs"):
        raise CheckpointError(path, "only says where Git LFS keeps the file: fetch it with `git lfs pull`")
    return status.st_size


def misread(path: Path, expected: str, error: object, *begins_as: str) -> CheckpointError:
    """Return the error for a file that is not what was expected. It names the file's kind by its first bytes, or
    shows these if the kind is unknown. begins_as: kinds as which files of the expected kind may begin."""
    start = read_start(path, 512)
    found = next((kind for pattern, kind in KINDS.items() if re.match(pattern, start, re.DOTALL)), None)
    why = reason(error) if isinstance(error, BaseException) else str(error)
    if found is None:
        return CheckpointError(path, f"is not {expected} ({why}); it begins with {bytes_shown(start[:8])}")
    if found in (expected, *begins_as):
        return CheckpointError(path, f"cannot be read as {expected} ({why})")
    return CheckpointError(path, f"is {found}, not {expected}")


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a small file whole. Raises CheckpointError if it is larger than `limit` bytes."""
    if file_size(path) > limit:
        raise CheckpointError(path, f"is larger than {limit >> 20} MiB, the most that such a file may have")
    return read_start(path, limit)


def read_start(path: Path, num_bytes: int) -> bytes:
    """Read the first bytes of a regular file, or fewer if it is shorter. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({reason(error)})") from error


def read_json(path: Path, schema: type[T]) -> T:
    """Read a JSON file as a value of a msgspec schema. Raises CheckpointError if it does not fit."""
    try:
        value = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, endless digits, endless nesting
        raise CheckpointError(path, f"is not valid JSON ({reason(error)})") from error
    return checked(path, value, schema)


def checked(path: Path, value: object, schema: type[T]) -> T:
    """Convert a file's value to a msgspec schema. Raises CheckpointError, which names the field, if it does not
    fit."""
    try:
        return msgspec.convert(value, schema, str_keys=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # JSON can spell half a surrogate pair
        problem, _, place = str(error).partition(" - at ")
        # `$.a.b[0]` is the value's place. The problem itself names a field that is missing or unknown.
        field = re.sub(r"^\$\.?|\[.*", "", place.strip("`"))
        if named := re.search(r" field `(.*)`$", problem, re.DOTALL):
            problem = problem[: named.start()].removeprefix("Object ")
            field = f"{field}.{named[1]}".lstrip(".")
        raise CheckpointError(path, shown(problem), field=shown(field) or None) from error


def within(seconds: float, fetch: Callable[[], T]) -> T:
    """Call `fetch` in a thread, and return or raise what it does. Raises TimeoutError after `seconds`; the thread
    goes on."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(fetch())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:g} s") from error


def shown(value: object, limit: int = 80) -> str:
    """Return a value from an untrusted file in a form that may stand in a message of one line."""
    try:
        text = value if isinstance(value, str) and value.isprintable() else repr(value)
    except ValueError:  # an integer with more digits than Python is willing to print
        text = "a huge number"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def bytes_shown(content: bytes) -> str:
    """Show bytes as a quoted text if they are printable ASCII, else as hexadecimal numbers."""
    text = content.decode("ascii", "replace")
    return repr(text) if text.isascii() and text.isprintable() else content.hex(" ")


def reason(error: BaseException) -> str:
    """Return an error's text, in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip()
    return shown((text or type(error).__name__).splitlines()[0], 120)
