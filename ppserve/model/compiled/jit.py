"""Compiling kernels: numba, once per machine, kept in a writable directory of ours.

numba looks only at a kernel's own file to decide whether it is stale, and not at those that it calls into.
So there is one directory for each state of the sources, named by a digest of all files that take part.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from ppserve.errors import ConfigError

VARIABLE = "NUMBA_CACHE_DIR"
CPU_FEATURES = "NUMBA_CPU_FEATURES"


def directory_name() -> str:
    """Names the sources of all kernels, and what they are made with."""
    model = Path(__file__).parents[1]
    folders = sorted(path for folder in ("compiled", "cpu") for path in (model / folder).rglob("*.py"))
    sources = [model / "sampling_kernels.py", *folders]
    return f"kernels-{hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:16]}"


def cache_directory(environment: Mapping[str, str], temporary: Path) -> Path:
    """In the operator's NUMBA_CACHE_DIR, whatever its owner; else in the user's cache directory, else under
    `temporary`, where nobody else can write (cached kernels are code); else new.

    Writable: for another numba would use one without a digest.
    """
    name = directory_name()
    if chosen := environment.get(VARIABLE):
        # A process passes its own on to its children.
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
    # The owner, and without the sticky bit all who may write, can replace the directory.
    safe = parent.st_mode & stat.S_ISVTX or not parent.st_mode & stat.S_IWOTH
    return parent.st_uid in (0, os.getuid()) and bool(safe)


def bounded(features: str, host: Mapping[str, bool]) -> str:
    """An operator's NUMBA_CPU_FEATURES, without what this CPU lacks.

    The name in NUMBA_CPU_NAME may bring more than the CPU has, whose use would end the process. A name that LLVM
    does not know brings not even what all have.
    """
    words = [word for word in features.split(",") if word]
    all_have = [f"+{name}" for name in ("64bit", "cmov", "cx8", "fxsr", "sse2") if host.get(name)]
    lacking = [f"-{name}" for name, has in host.items() if not has]
    return ",".join([*words, *(word for word in all_have + lacking if word not in words)])


os.environ[VARIABLE] = str(cache_directory(os.environ, Path(tempfile.gettempdir())))

import numba  # noqa: E402
from llvmlite import binding  # noqa: E402

if CPU_FEATURES in os.environ:  # else numba tells LLVM what this CPU has
    with contextlib.suppress(RuntimeError):  # LLVM does not know this kind of CPU
        os.environ[CPU_FEATURES] = bounded(os.environ[CPU_FEATURES], binding.get_host_cpu_features())

from ppserve.model.compiled.compiling import PartCompiler, SharedCache  # noqa: E402

# If numba was imported before this file, it knows no directory.
numba.config.reload_config()  # type: ignore[no-untyped-call]

Kernel = TypeVar("Kernel", bound=Callable[..., object])

NUMBA = (0, 62), (0, 69)
"""The first version, and the first too new, as in pyproject.toml. Kernels use private parts of numba.
LLVM before 20, in versions before 0.62, ends the process over bfloat16 dot products."""


def check_numba(version: str = numba.__version__) -> None:
    """Raises ConfigError."""
    first, end = NUMBA
    if not first <= tuple(int(part) for part in version.split(".")[:2]) < end:
        known = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        raise ConfigError("numba", f"version {version} is installed, and the kernels need {known}")


def kernel(function: Kernel) -> Kernel:
    """Compile an entry point: cached, without the GIL, and without fast-math."""
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = SharedCache(function)  # type: ignore[no-untyped-call]
    return cast(Kernel, dispatcher)


def inlined(function: Kernel) -> Kernel:
    """Compile a part of kernels, into their caches; Python cannot call it."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Kernel, numba.njit(error_model="numpy", pipeline_class=PartCompiler, **options)(function))
