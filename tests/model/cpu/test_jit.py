"""How kernels are compiled: each once, whoever needs it at the same time."""
# mypy: ignore-errors
# (numba's compiler has no types that mypy could check)

from __future__ import annotations

import threading
from pathlib import Path

import numba
import pytest
from numba.core.registry import cpu_target

from ppserve.model.cpu.compiling import SharedCache
from ppserve.model.cpu.jit import inlined


def twice(x):
    return x + x


SIGNATURE = (numba.types.int64,)


def caches(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SharedCache, SharedCache]:
    """Of the same function, as two processes have them."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(path))
    return SharedCache(twice), SharedCache(twice)


def test_who_lacks_a_kernel_waits_for_who_compiles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = caches(tmp_path, monkeypatch)
    context = cpu_target.target_context
    assert first.load_overload(SIGNATURE, context) is None
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(second.load_overload(SIGNATURE, context)))
    other.start()
    compiled = numba.njit(twice)
    compiled.compile(SIGNATURE)
    assert not found
    first.save_overload(SIGNATURE, compiled.overloads[SIGNATURE])
    other.join()
    assert found[0] is not None


def test_a_compilation_that_failed_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = caches(tmp_path, monkeypatch)
    context = cpu_target.target_context
    assert first.load_overload(SIGNATURE, context) is None
    assert first.load_overload(SIGNATURE, context) is None
    first.save_overload(SIGNATURE, numba.njit(SIGNATURE)(twice).overloads[SIGNATURE])
    assert first.load_overload(SIGNATURE, context) is not None


def test_parts_are_no_machine_code_of_their_own() -> None:
    part = inlined(twice)
    part.compile(SIGNATURE)
    library = part.overloads[SIGNATURE].library
    assert not library.get_pointer_to_function(part.overloads[SIGNATURE].fndesc.llvm_func_name)
    whole = numba.njit(twice)
    whole.compile(SIGNATURE)
    result = whole.overloads[SIGNATURE]
    assert result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
    uses = numba.njit(lambda x: part(x) + 1)
    assert uses(20) == 41
