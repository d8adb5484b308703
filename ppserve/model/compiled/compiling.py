"""What kernels want of numba beyond its options: each piece of machine code is made once.

Imported by `jit` alone, which says where the cache is before numba looks.
"""
# mypy: ignore-errors
# (numba's compiler has no types that mypy could check)

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

log = logging.getLogger("ppserve.stage")

LONGEST_WAIT_S = 60.0
"""Seconds to wait for another process that compiles the same kernel, or hangs."""

_LOOK_AGAIN_S = 0.02


class SharedCache(FunctionCache):
    """A cache on disk: of the processes that lack a kernel one compiles it, and the others wait.

    A cache that is damaged or cannot be written costs compiling, never a start.
    """

    _lock = None

    def __init__(self, function, longest_wait_s=LONGEST_WAIT_S):
        super().__init__(function)
        self._longest_wait_s = longest_wait_s
        self._path = Path(self.cache_path) / self._impl.filename_base

    def load_overload(self, sig, target_context):
        found, _ = self._look(sig, target_context)
        if found is None:
            self._release()
            self._acquire()
            found, damage = self._look(sig, target_context)
            if damage is not None:
                log.warning("cached kernel %s.*: %r; it is compiled anew", self._path, damage)
            if found is not None:
                self._release()
        return found

    def _look(self, sig, target_context):
        """The kernel, or None; and what a damaged cache raised, else None."""
        try:
            return super().load_overload(sig, target_context), None
        except Exception as damage:  # what unpickling raises can be anything
            return None, damage

    def _acquire(self):
        """Wait until no other process compiles this kernel, where locks work."""
        try:
            self._impl.locator.ensure_cache_path()
            # A process that ends, however, gives its lock back.
            self._lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            until = time.monotonic() + self._longest_wait_s
            while not self._try_lock():
                if time.monotonic() > until:
                    wait = f"{self._longest_wait_s:.0f} s"
                    log.warning("kernel %s: another process has not compiled it in %s", self._path.name, wait)
                    return
                time.sleep(_LOOK_AGAIN_S)
        except OSError:
            pass

    def _try_lock(self):
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def save_overload(self, sig, data):
        try:
            self._save(sig, data)
        except OSError as error:
            log.warning("kernel %s cannot be kept, and will be compiled at each start: %s", self._path, error)
        finally:
            self._release()

    def _save(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError:
            raise
        except Exception:  # the index is damaged
            self.flush()
            super().save_overload(sig, data)

    def _release(self):
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _PartLibrary(JITCodeLibrary):
    """A part's code, compiled in each kernel, not in every function on the way."""

    def _optimize_functions(self, module):
        pass

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
    """The compiler of functions that are called by kernels alone, never by Python."""

    def define_pipelines(self):
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()
