"""Which instructions the kernels use on this CPU.

A *kernel variant* is a set of instructions, and includes those before it: where it has nothing better for a
precision, it uses what they use. Float32 and int8 have the same bits in all variants.
PPSERVE_CPU_KERNELS forces one, for tests and for pipelines whose hosts differ.
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
"""Every variant, weakest first, and what it needs beyond those before it, by LLVM's names."""

Features = frozenset[str]


@cache
def features() -> Features:
    """What this CPU has and numba compiles for, by LLVM's names; nothing where LLVM cannot tell.

    AMX only where the system grants its state to this process.
    """
    try:
        host = {name for name, has in binding.get_host_cpu_features().items() if has}
    except RuntimeError:
        return frozenset()
    codegen: Any = cpu_target.target_context.codegen()
    found = host & enabled(codegen.magic_tuple()[2])
    return frozenset(found if _grants_tiles(found) else found - NEEDS["amx"])


def enabled(target: str) -> set[str]:
    """Return the features that a description of LLVM's switches on: `+avx2,-avx512f`. An operator may have changed
    numba's."""
    last = {word[1:]: word[0] for word in target.split(",") if word}
    return {name for name, sign in last.items() if sign == "+"}


def _grants_tiles(found: set[str]) -> bool:
    """Linux wants to be asked before a process uses AMX: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)."""
    if not found >= NEEDS["amx"] or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0)


def included(variant: str) -> list[str]:
    """A variant and those before it."""
    return list(NEEDS)[: list(NEEDS).index(variant) + 1]


def available(found: Features) -> tuple[str, ...]:
    """The variants that a CPU with these features can run, weakest first."""
    names = list(NEEDS)
    first_lacking = next((i for i, name in enumerate(names) if not found >= NEEDS[name]), len(names))
    return tuple(names[:first_lacking])


def choose(environment: Mapping[str, str], found: Features) -> str:
    """The variant that PPSERVE_CPU_KERNELS names, else the best. Raises ConfigError."""
    can = available(found)
    name = environment.get(VARIABLE) or can[-1]
    if name not in NEEDS:
        raise ConfigError(VARIABLE, f"unknown kernel variant {name!r} (known: {', '.join(NEEDS)})")
    if name not in can:
        raise ConfigError(VARIABLE, f"this CPU cannot run {name!r} (it can: {', '.join(can)})")
    return name


@cache
def in_use() -> str:
    """The variant of this process."""
    return choose(os.environ, features())
