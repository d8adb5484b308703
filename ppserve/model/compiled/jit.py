"""Kernels are compiled by numba, once per machine, and kept in a directory of ours that can be written to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ppserve.errors import ConfigError
from ppserve.model.cache import KERNELS, kernel_directory

CPU_FEATURES = "NUMBA_CPU_FEATURES"


def bounded(features: str, host: Mapping[str, bool]) -> str:
    """Return an operator's NUMBA_CPU_FEATURES without the features that this CPU lacks.

    NUMBA_CPU_NAME may name a CPU with more features than this one has; their use would end the process. A name
    that LLVM does not know implies no features, not even those that all CPUs have, so these are added.
    """
    words = [word for word in features.split(",") if word]
    all_have = [f"+{name}" for name in ("64bit", "cmov", "cx8", "fxsr", "sse2") if host.get(name)]
    lacking = [f"-{name}" for name, has in host.items() if not has]
    return ",".join([*words, *(word for word in all_have + lacking if word not in words)])


os.environ[KERNELS] = str(kernel_directory(os.environ))

import numba  # noqa: E402
from llvmlite import binding  # noqa: E402

if CPU_FEATURES in os.environ:  # else numba tells LLVM what this CPU has
    with contextlib.suppress(RuntimeError):  # LLVM does not know this kind of CPU
        os.environ[CPU_FEATURES] = bounded(os.environ[CPU_FEATURES], binding.get_host_cpu_features())

from ppserve.model.compiled.compiling import KernelCompiler, PartCompiler, SharedCache  # noqa: E402

# If numba was imported before this file, it knows no directory.
numba.config.reload_config()  # type: ignore[no-untyped-call]

Kernel = TypeVar("Kernel", bound=Callable[..., object])

NUMBA = (0, 62), (0, 69)
"""The first version of numba that will do, and the first that is too new, as in pyproject.toml. Kernels use
private parts of numba. Versions before 0.62 have an LLVM that ends the process over bfloat16 dot products."""


def check_numba(version: str = numba.__version__) -> None:
    """Raise ConfigError for a version of numba that is too old or too new."""
    first, end = NUMBA
    if not first <= tuple(int(part) for part in version.split(".")[:2]) < end:
        known = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        raise ConfigError("numba", f"version {version} is installed, and the kernels need {known}")


def kernel(function: Kernel) -> Kernel:
    """Compile a function that Python calls. It is cached, runs without the GIL, and is compiled without
    fast-math."""
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", pipeline_class=KernelCompiler)(function)
    dispatcher._cache = SharedCache(function)  # type: ignore[no-untyped-call]
    return cast(Kernel, dispatcher)


def inlined(function: Kernel) -> Kernel:
    """Compile a function that only kernels call, as a part of them. Python cannot call it."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Kernel, numba.njit(error_model="numpy", pipeline_class=PartCompiler, **options)(function))
