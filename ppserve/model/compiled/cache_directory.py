"""Where compiled kernels are kept: a directory that is ours and writable, one for each state of their sources.

numba decides whether a cached kernel is stale by the modification time of the file it was written in,
and does not see a change in a file that it calls into. So the directory's name carries a digest of every
file that takes part: other sources, other directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"


def directory_name() -> str:
    """Names the sources of all kernels, and what they are made with."""
    model = Path(__file__).parents[1]
    folders = sorted(path for folder in ("compiled", "cpu") for path in (model / folder).rglob("*.py"))
    sources = [model / "sampling_kernels.py", *folders]
    return f"kernels-{hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:16]}"


def cache_directory(environment: Mapping[str, str], temporary: Path) -> Path:
    """In the operator's NUMBA_CACHE_DIR, whoever owns it; else in the user's cache directory, else under
    `temporary`, where nobody else can write (cached kernels are code); else new.

    It can be written to: numba would use another, without a digest, for one that cannot.
    """
    name = directory_name()
    if chosen := environment.get(VARIABLE):
        # A process passes its own on to those that it starts.
        own = Path(chosen) if Path(chosen).name == name else Path(chosen) / name
        if _make(own):
            return own
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (Path(base) / "ppserve", temporary / f"ppserve-{os.getuid()}"):
        if _make(parent / name) and _is_private(parent / name):
            return parent / name
    return Path(tempfile.mkdtemp(prefix="ppserve-kernels-", dir=temporary))


def _make(path: Path) -> bool:
    """`path` and its parent, if need be; whether it can be written to."""
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
    # Who owns the parent, or may write there without the sticky bit, can put another directory in our place.
    safe = parent.st_mode & stat.S_ISVTX or not parent.st_mode & stat.S_IWOTH
    return parent.st_uid in (0, os.getuid()) and bool(safe)
