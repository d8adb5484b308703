"""Kernels for given types, which the processes of a host compile together: each of them another one."""
# mypy: ignore-errors
# (numba's dispatchers have no types that mypy could check)

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from numba import types
from numba.core.sigutils import normalize_signature


class TypedKernel:
    """A kernel for these types of its arguments."""

    def __init__(self, function: Callable[..., object], *signature: types.Type) -> None:
        self._function, self._signature = function, signature

    def compile(self) -> object:
        """Compile the kernel or load it, unless that is done, and return what numba made of it."""
        self._function.compile(self._signature)
        return self._function.overloads[self._signature]

    def is_kept(self) -> bool:
        """Return whether the cache on disk has the kernel, so that nobody need compile it."""
        return self._signature in self._function.overloads or self._function._cache.has(self._signature)

    def is_being_compiled(self) -> bool:
        """Return whether another process compiles this function now."""
        return self._function._cache.is_locked()

    @property
    def entry(self) -> Callable[..., object]:
        """The compiled kernel, called without numba's look at the types of its arguments."""
        self.compile()
        return self._function.get_overload(self._signature)

    @property
    def address(self) -> int:
        """The address for `call_kernel`. It is valid as long as the kernel's function exists."""
        compiled = self.compile()
        return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


def for_types(function: Callable[..., object], arguments: str) -> TypedKernel:
    """Return the kernel for types in numba's words: `float32[::1], int64`."""
    return TypedKernel(function, *normalize_signature(f"({arguments},)")[0])


def compile_together(kernels: Sequence[TypedKernel], report: Callable[[int, int], object]) -> None:
    """Have the cache on disk contain these kernels. Those that other processes compile come last, so the processes
    that lack the same kernels share them out.

    report: called before each kernel with its number, from 1, and how many are to be compiled.
    """
    left = [each for each in kernels if not each.is_kept()]
    count, collects = len(left), gc.isenabled()
    gc.disable()  # compiling makes objects by the million, among which little is to be collected
    try:
        while left:
            report(count - len(left) + 1, count)
            chosen = next((each for each in left if not each.is_being_compiled()), left[0])
            left.remove(chosen)
            chosen.compile()
    finally:
        if collects:
            gc.enable()
