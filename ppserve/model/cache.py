"""The directories where a user keeps what is made once per machine: compiled kernels, measurements, downloads.

This module imports neither torch nor numba, so that a command can check before it starts anything that there is
such a place.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ppserve.errors import ConfigError

KERNELS = "NUMBA_CACHE_DIR"


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return ppserve's directory in the user's cache, which need not exist. For a user without a home it is below
    `/`, where nothing is made. A relative XDG_CACHE_HOME is ignored, as its specification demands."""
    chosen = environment.get("XDG_CACHE_HOME", "")
    base = chosen if os.path.isabs(chosen) else os.path.expanduser("~/.cache")
    return Path(base if os.path.isabs(base) else "/", "ppserve")


def kernel_directory(environment: Mapping[str, str], temporary: tuple[str, ...] = ("/tmp", "/var/tmp")) -> Path:
    """Choose a directory that can be written to: below the operator's NUMBA_CACHE_DIR, whoever owns it; else in
    the user's cache; else below TMPDIR or `temporary`. Apart from the first, nobody else may be able to write to
    it, because cached kernels are code. Raises ConfigError if there is none.

    numba is never given a directory that cannot be written to: it would use another one instead, whose name has no
    digest.
    """
    name = _directory_name()
    if chosen := environment.get(KERNELS):
        # A process passes its own on to its children.
        own = Path(chosen) if Path(chosen).name == name else Path(chosen) / name
        if _make(own):
            return own
    shared = [place for place in (environment.get("TMPDIR", ""), *temporary) if os.path.isabs(place)]
    places = [user_cache(environment), *(Path(place, f"ppserve-{os.getuid()}") for place in shared)]
    for parent in places:
        if _make(parent / name) and _is_private(parent / name):
            return parent / name
    tried = ", ".join(map(str, places))
    raise ConfigError(
        KERNELS, f"no directory for compiled kernels that this user alone can write to; tried {tried}"
    )


def precompiled_mark(environment: Mapping[str, str]) -> Path:
    """Return the file that exists once the kernels of draws and masks are kept on this machine. Raises
    ConfigError."""
    return kernel_directory(environment) / "precompiled"


def _directory_name() -> str:
    """Return a name with a digest of the sources of all kernels, and of what they are made with. To decide whether
    a kernel is stale, numba looks only at the kernel's own file, and not at the files of functions that it
    calls."""
    model = Path(__file__).parent
    folders = sorted(path for folder in ("compiled", "cpu") for path in (model / folder).rglob("*.py"))
    sources = [model / "sampling_kernels.py", *folders]
    return f"kernels-{hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:16]}"


def _make(path: Path) -> bool:
    """Make `path` and its parent if they are missing. Return whether `path` can be written to."""
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        for each in (path.parent, path):
            each.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _is_private(path: Path) -> bool:
    status, parent = path.stat(), path.parent.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    # The parent's owner can replace the directory; without the sticky bit, so can all who may write to the parent.
    safe = parent.st_mode & stat.S_ISVTX or not parent.st_mode & stat.S_IWOTH
    return parent.st_uid in (0, os.getuid()) and bool(safe)
