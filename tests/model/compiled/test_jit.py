"""How kernels are compiled: each once, however many need it at the same time."""
# mypy: ignore-errors
# (numba's compiler has no types that mypy could check)

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from numba.core.registry import cpu_target

from ppserve.errors import ConfigError
from ppserve.model.compiled.compiling import SharedCache
from ppserve.model.compiled.jit import NUMBA, check_numba, inlined


def twice(x):
    return x + x


SIGNATURE = (numba.types.int64,)


def caches(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SharedCache, SharedCache]:
    """Return two caches of one function, as two processes have them."""
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


def test_a_compilation_that_failed_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = caches(tmp_path, monkeypatch)
    context = cpu_target.target_context
    assert first.load_overload(SIGNATURE, context) is None
    assert first.load_overload(SIGNATURE, context) is None
    first.save_overload(SIGNATURE, numba.njit(SIGNATURE)(twice).overloads[SIGNATURE])
    assert first.load_overload(SIGNATURE, context) is not None


def kept(cache: SharedCache) -> bool:
    """Whether a later start finds the kernel; compiles and saves it if not."""
    if cache.load_overload(SIGNATURE, cpu_target.target_context) is not None:
        return True
    cache.save_overload(SIGNATURE, numba.njit(SIGNATURE)(twice).overloads[SIGNATURE])
    return False


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:-20], lambda whole: bytes(len(whole))])
def test_a_damaged_cache_costs_compiling_once(
    suffix: str, damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch, caplog
) -> None:
    first, second = caches(tmp_path, monkeypatch)
    assert not kept(first)
    (file,) = tmp_path.rglob(f"*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    assert not kept(second)
    assert [file.name.split(".")[0] in record.getMessage() for record in caplog.records] == [True]
    assert kept(SharedCache(twice))
    assert len(caplog.records) == 1


def test_a_cache_that_cannot_be_written_is_said_and_no_more(tmp_path: Path, monkeypatch, caplog) -> None:
    first, _ = caches(tmp_path / "cache", monkeypatch)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    (tmp_path / "cache").touch()
    assert not kept(first)
    assert ["cannot be kept" in record.getMessage() for record in caplog.records][-1:] == [True]


def test_who_compiles_for_too_long_is_waited_for_no_longer(tmp_path: Path, monkeypatch, caplog) -> None:
    first, _ = caches(tmp_path, monkeypatch)
    assert first.load_overload(SIGNATURE, cpu_target.target_context) is None
    impatient = SharedCache(twice, longest_wait_s=0.1)
    assert not kept(impatient)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert kept(SharedCache(twice))
    first._release()


def test_a_file_system_without_locks_is_gone_on_with(tmp_path: Path, monkeypatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first, second = caches(tmp_path, monkeypatch)
    assert not kept(first)
    assert kept(second)


def test_the_versions_of_numba_are_those_of_the_package() -> None:
    check_numba()
    (first, end), project = NUMBA, Path(__file__).parents[3] / "pyproject.toml"
    assert f"numba>={first[0]}.{first[1]},<{end[0]}.{end[1]}" in project.read_text()
    for version in ("0.61.2", "0.69.0rc1"):
        with pytest.raises(ConfigError, match=f"version {version} is installed"):
            check_numba(version)


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
