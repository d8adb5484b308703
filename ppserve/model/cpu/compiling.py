"""What kernels want of numba beyond its options: each piece of machine code is made once.

Imported by `jit` alone, which says where the cache is before numba looks.
"""
# mypy: ignore-errors
# (numba's compiler has no types that mypy could check)

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class SharedCache(FunctionCache):
    """Of the processes that lack the same kernel one compiles it, while the others wait for it."""

    _lock = None

    def load_overload(self, sig, target_context):
        found = super().load_overload(sig, target_context)
        if found is None:
            self._release()
            self._impl.locator.ensure_cache_path()
            path = Path(self.cache_path) / f"{self._impl.filename_base}.lock"
            # A process that ends, whatever the reason, gives its lock back.
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._release()
        return found

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        finally:
            self._release()

    def _release(self):
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _PartLibrary(JITCodeLibrary):
    """The code of a part of kernels. numba would optimise it, and make machine code of it, in every function on
    the way from the part to its kernels; here both are done once, in each kernel that it is linked into."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True

    @property
    def codegen(self):
        """Asked only to tell machine code where its Python objects are; here is none."""
        return self

    def set_env(self, env_name, env):
        pass


class PartCompiler(Compiler):
    """For functions that are called by kernels alone, never by Python."""

    def define_pipelines(self):
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()
