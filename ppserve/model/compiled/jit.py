"""Compiling kernels: numba, once per machine, kept where `cache_directory` says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from ppserve.errors import ConfigError
from ppserve.model.compiled.cache_directory import VARIABLE, cache_directory

Kernel = TypeVar("Kernel", bound=Callable[..., object])

_directory = cache_directory(os.environ, Path(tempfile.gettempdir()))
os.environ[VARIABLE] = str(_directory)

import numba  # noqa: E402

from ppserve.model.compiled.compiling import PartCompiler, SharedCache  # noqa: E402

# Who imported numba before this file gave it no directory.
numba.config.reload_config()  # type: ignore[no-untyped-call]


NUMBA = (0, 62), (0, 69)
"""The first version, and the first after the last, as in pyproject.toml: kernels use parts of numba that are not
public, and LLVM before 20, in versions before 0.62, ends the process over bfloat16 dot products."""


def check_numba(version: str = numba.__version__) -> None:
    """Raises ConfigError."""
    first, end = NUMBA
    if not first <= tuple(int(part) for part in version.split(".")[:2]) < end:
        known = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        raise ConfigError("numba", f"version {version} is installed, and the kernels need {known}")


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

    def __init__(self, function: Callable[..., None], *settings: object) -> None:
        self._function, self._settings = function, settings
        self._call: Callable[..., None] | None = None

    def __call__(self, *numbers: int) -> None:
        if self._call is None:
            function: Any = self._function
            signature = *map(numba.typeof, self._settings), *(numba.int64,) * len(numbers)
            function.compile(signature)
            self._call = partial(function.get_overload(signature), *self._settings)
        self._call(*numbers)


def inlined(function: Kernel) -> Kernel:
    """Compile a part of kernels; it lives in the cache of those that call it, and Python cannot call it."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Kernel, numba.njit(error_model="numpy", pipeline_class=PartCompiler, **options)(function))
