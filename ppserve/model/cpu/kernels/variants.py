"""Which instructions the kernels use on this CPU.

A *kernel variant* is a set of instructions. It includes the variants before it: where it has no better kernel for
a precision, it uses theirs. Float32 and int8 have the same bits in all variants. PPSERVE_CPU_KERNELS forces a
variant, for tests and for pipelines whose hosts differ.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from functools import cache
from typing import Any

from llvmlite import binding
from numba.core.registry import cpu_target

from ppserve.errors import ConfigError

VARIABLE = "PPSERVE_CPU_KERNELS"

NEEDS: dict[str, frozenset[str]] = {
    "portable": frozenset(),
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_bf16": frozenset({"avx512bf16", "avx512vnni"}),
    "amx": frozenset({"amx-tile", "amx-bf16", "amx-int8"}),
}
"""Every variant, weakest first, with the features that it needs beyond the variants before it, by LLVM's names."""

Features = frozenset[str]


@cache
def features() -> Features:
    """Return the features that this CPU has and for which numba compiles, by LLVM's names; none where LLVM cannot
    tell. AMX is among them only if the system lets this process use it."""
    try:
        host = {name for name, has in binding.get_host_cpu_features().items() if has}
    except RuntimeError:
        return frozenset()
    codegen: Any = cpu_target.target_context.codegen()
    found = host & enabled(codegen.magic_tuple()[2])
    return frozenset(found if _grants_tiles(found) else found - NEEDS["amx"])


def enabled(target: str) -> set[str]:
    """Return the features that a text in LLVM's form, as `+avx2,-avx512f`, switches on. numba has such a text,
    which an operator may have changed."""
    last = {word[1:]: word[0] for word in target.split(",") if word}
    return {name for name, sign in last.items() if sign == "+"}


def _grants_tiles(found: set[str]) -> bool:
    """Ask Linux for the use of AMX, by arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA). Return whether it is
    granted."""
    if not found >= NEEDS["amx"] or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0)


def included(variant: str) -> list[str]:
    """Return a variant and those before it, weakest first."""
    return list(NEEDS)[: list(NEEDS).index(variant) + 1]


def available(found: Features) -> tuple[str, ...]:
    """Return the variants that a CPU with these features can run, weakest first."""
    names = list(NEEDS)
    first_lacking = next((i for i, name in enumerate(names) if not found >= NEEDS[name]), len(names))
    return tuple(names[:first_lacking])


def choose(environment: Mapping[str, str], found: Features) -> str:
    """Return the variant that PPSERVE_CPU_KERNELS names, else the best. Raises ConfigError for a name that is
    unknown, or that this CPU cannot run."""
    can = available(found)
    name = environment.get(VARIABLE) or can[-1]
    if name not in NEEDS:
        raise ConfigError(VARIABLE, f"unknown kernel variant {name!r} (known: {', '.join(NEEDS)})")
    if name not in can:
        raise ConfigError(VARIABLE, f"this CPU cannot run {name!r} (it can: {', '.join(can)})")
    return name


@cache
def in_use() -> str:
    """Return the variant of this process."""
    return choose(os.environ, features())
