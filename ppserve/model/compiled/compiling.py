"""How kernels are compiled where numba's options do not suffice: each piece of machine code is made once.

Only `jit` may import this module, because it sets the cache's directory before numba reads it.
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
from numba.core.registry import cpu_target

log = logging.getLogger("ppserve.stage")

LONGEST_WAIT_S = 60.0
"""How long a process waits for another one that compiles the same kernel; that one may hang."""

_LOOK_AGAIN_S = 0.02


class SharedCache(FunctionCache):
    """A cache on disk. Of the processes that lack a kernel, one compiles it, and the others wait.

    Where a cache is damaged or cannot be written, kernels are compiled again, and processes still start.
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

    def has(self, sig):
        """Return whether the kernel is on disk. Neither compiles nor waits; a damaged cache has nothing."""
        target = cpu_target.target_context
        try:
            return self._index_key(sig, target.codegen()) in self._cache_file._load_index()
        except Exception:  # what unpickling raises can be anything
            return False

    def is_locked(self):
        """Return whether another process, or another cache of this one, is compiling the function."""
        try:
            with open(f"{self._path}.lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # nobody has compiled it yet, or locks do not work
            return False
        return False

    def _look(self, sig, target_context):
        """Return the cached kernel, or None, and the error that a damaged cache raised, or None."""
        try:
            return super().load_overload(sig, target_context), None
        except Exception as damage:  # unpickling may raise anything
            return None, damage

    def _acquire(self):
        """Wait until no other process compiles this kernel. Where locks do not work, do not wait."""
        try:
            self._impl.locator.ensure_cache_path()
            # The system releases a lock when its process ends, however it ends.
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
    """The code of a part of kernels. It is compiled with each kernel, not once more by itself."""

    def _optimize_functions(self, module):
        pass

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True

    @property
    def codegen(self):
        """This library. numba asks its code generator only to bind Python objects, of which a part has none."""
        return self

    def set_env(self, env_name, env):
        pass


_FOR_OTHER_CODE = frozenset({
    "WithLifting", "InlineClosureLikes", "MakeFunctionToJitFunction", "InlineInlinables", "FindLiterallyCalls",
    "LiteralUnroll", "LiteralPropagationSubPipelinePass", "RewriteDynamicRaises", "RewriteSemanticConstants",
    "DeadBranchPrune", "InlineOverloads", "NopythonRewrites", "AnnotateTypes", "DumpParforDiagnostics",
    "NoPythonSupportedFeatureValidation",
})  # fmt: skip
"""numba's passes for what kernels do not have: closures, `with`, computed exceptions, array expressions, arguments
that are None, reports. After each of them numba analyses the function anew. Without them the machine code is the
same."""


class KernelCompiler(Compiler):
    """The compiler of kernels, with the passes that these need."""

    def define_pipelines(self):
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [each for each in pipeline.passes if each[0].__name__ not in _FOR_OTHER_CODE]
            pipeline.finalize()
        return pipelines


class PartCompiler(KernelCompiler):
    """The compiler of functions that only kernels call, never Python."""

    def define_pipelines(self):
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()
