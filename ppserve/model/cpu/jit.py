"""Compiling kernels: numba, once per machine, kept in a cache directory that is ours and writable.

numba decides whether a cached kernel is stale by the modification time of the file it was written in,
and does not see a change in a file that it calls into. So the directory's name carries a digest of every
file that takes part: other sources, other directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def _digest() -> str:
    """Names the sources of all kernels."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _private_directory(path: Path) -> Path | None:
    """`path`, made if need be, when nobody else can write there (cached kernels are code); else None."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        return None
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return None if status.st_uid != os.getuid() or others_write else path


def _cache_directory() -> Path:
    """The user's cache directory, else one under the temporary directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"kernels-{_digest()}"
    for parent in (Path(base) / "ppserve", Path(tempfile.gettempdir()) / f"ppserve-{os.getuid()}"):
        if (directory := _private_directory(parent / name)) is not None:
            return directory
    return Path(tempfile.mkdtemp(prefix="ppserve-kernels-"))


if "NUMBA_CACHE_DIR" not in os.environ:
    os.environ["NUMBA_CACHE_DIR"] = str(_cache_directory())

import numba  # noqa: E402

from ppserve.model.cpu.compiling import PartCompiler, SharedCache  # noqa: E402

# Who imported numba before this file gave it no directory.
numba.config.reload_config()  # type: ignore[no-untyped-call]


def kernel(function: Kernel) -> Kernel:
    """Compile an entry point: cached on disk, runs without the GIL.

    No fast-math anywhere: it is what makes a result independent of how the compiler vectorised it.
    """
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = SharedCache(function)  # type: ignore[no-untyped-call]
    return cast(Kernel, dispatcher)


class ForSettings:
    """A kernel for these settings (`kernels.kinds`), compiled or loaded when it is first called; its further
    arguments are integers. numba looks at the types of settings in Python, which would take longer than the call.
    """

    def __init__(self, function: Callable[..., int], *settings: object) -> None:
        self._function, self._settings = function, settings
        self._call: Callable[..., int] | None = None

    def __call__(self, *numbers: int) -> int:
        if self._call is None:
            function: Any = self._function
            signature = *map(numba.typeof, self._settings), *(numba.int64,) * len(numbers)
            function.compile(signature)
            self._call = partial(function.get_overload(signature), *self._settings)
        return self._call(*numbers)


def inlined(function: Kernel) -> Kernel:
    """Compile a part of kernels; it lives in the cache of those that call it, and Python cannot call it."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Kernel, numba.njit(error_model="numpy", pipeline_class=PartCompiler, **options)(function))
