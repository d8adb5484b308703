"""Where compiled kernels are kept, and who may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ppserve.model.compiled.jit import cache_directory, directory_name


def unusable_home(path: Path) -> dict[str, str]:
    file = path / "no directory"
    file.touch()
    return {"XDG_CACHE_HOME": str(file)}


def in_temporary(path: Path) -> Path:
    return path / f"ppserve-{os.getuid()}"


def test_it_is_ours_alone(tmp_path: Path) -> None:
    directory = cache_directory({"XDG_CACHE_HOME": str(tmp_path / "cache")}, tmp_path)
    assert directory == tmp_path / "cache" / "ppserve" / directory_name()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (directory, directory.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("which", ["parent", "directory"])
def test_a_directory_that_others_may_write_to_is_not_used(which: str, tmp_path: Path) -> None:
    home = unusable_home(tmp_path)
    directory = cache_directory(home, tmp_path)
    (directory if which == "directory" else directory.parent).chmod(0o777)
    other = cache_directory(home, tmp_path)
    assert other.parent == tmp_path
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    in_temporary(tmp_path).chmod(0o1777)  # no other user can put another directory in place of ours
    assert (cache_directory(home, tmp_path) == directory) == (which == "parent")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_parent_of_another_user_is_not_used(tmp_path: Path) -> None:
    in_temporary(tmp_path).mkdir()
    os.chown(in_temporary(tmp_path), 65534, 65534)
    assert cache_directory(unusable_home(tmp_path), tmp_path).parent == tmp_path


def test_the_operators_directory_has_one_for_each_state_of_the_sources(tmp_path: Path) -> None:
    directory = cache_directory({"NUMBA_CACHE_DIR": str(tmp_path)}, tmp_path)
    assert directory == tmp_path / directory_name()
    assert cache_directory({"NUMBA_CACHE_DIR": str(directory)}, tmp_path) == directory
    home = unusable_home(tmp_path)
    unusable = {**home, "NUMBA_CACHE_DIR": home["XDG_CACHE_HOME"]}
    assert cache_directory(unusable, tmp_path) == in_temporary(tmp_path) / directory_name()
