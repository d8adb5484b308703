"""Where compiled kernels are kept, and who may write there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ppserve.errors import ConfigError
from ppserve.model.cache import kernel_directory, user_cache


def unusable_home(path: Path) -> dict[str, str]:
    file = path / "no directory"
    file.touch()
    return {"XDG_CACHE_HOME": str(file)}


def directory_of(environment: dict[str, str], temporary: Path) -> Path:
    return kernel_directory(environment, (str(temporary),))


def in_temporary(path: Path) -> Path:
    return path / f"ppserve-{os.getuid()}"


def test_it_is_ours_alone(tmp_path: Path) -> None:
    directory = directory_of({"XDG_CACHE_HOME": str(tmp_path / "cache")}, tmp_path)
    assert (
        directory.parent
        == user_cache({"XDG_CACHE_HOME": str(tmp_path / "cache")})
        == tmp_path / "cache" / "ppserve"
    )
    assert [stat.S_IMODE(each.stat().st_mode) for each in (directory, directory.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("which", ["parent", "directory"])
def test_a_directory_that_others_may_write_to_is_not_used(which: str, tmp_path: Path) -> None:
    home = unusable_home(tmp_path)
    directory = directory_of(home, tmp_path)
    (directory if which == "directory" else directory.parent).chmod(0o777)
    with pytest.raises(ConfigError, match=r"NUMBA_CACHE_DIR: no directory .* tried .*no directory.*, .*ppserve-"):
        directory_of(home, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    assert directory_of({**home, "TMPDIR": str(other)}, tmp_path).parent == in_temporary(other)
    in_temporary(tmp_path).chmod(0o1777)  # no other user can put another directory in place of ours
    if which == "parent":
        assert directory_of(home, tmp_path) == directory


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_parent_of_another_user_is_not_used(tmp_path: Path) -> None:
    in_temporary(tmp_path).mkdir()
    os.chown(in_temporary(tmp_path), 65534, 65534)
    with pytest.raises(ConfigError, match="that this user alone can write to"):
        directory_of(unusable_home(tmp_path), tmp_path)


RELATIVE: tuple[dict[str, str], ...] = ({}, *({"XDG_CACHE_HOME": of} for of in ("", "relative", "~/.cache")))


def test_a_relative_directory_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of one")
    for environment in RELATIVE:
        assert user_cache(environment) == Path("/home/of one/.cache/ppserve")


def test_a_user_without_a_home_has_no_directory_below_the_working_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's `--user 4242` makes such a user, and so does a HOME without a slash in front."""
    monkeypatch.setenv("HOME", "relative")
    for environment in RELATIVE:
        assert user_cache(environment) == Path("/ppserve")


def test_the_operators_directory_has_one_for_each_state_of_the_sources(tmp_path: Path) -> None:
    directory = directory_of({"NUMBA_CACHE_DIR": str(tmp_path)}, tmp_path)
    assert directory.parent == tmp_path
    assert directory_of({"NUMBA_CACHE_DIR": str(directory)}, tmp_path) == directory
    home = unusable_home(tmp_path)
    unusable = {**home, "NUMBA_CACHE_DIR": home["XDG_CACHE_HOME"]}
    assert directory_of(unusable, tmp_path) == in_temporary(tmp_path) / directory.name
