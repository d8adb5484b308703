"""Where ranks meet and what they share: one host, several hosts, and what is not good enough for either."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppserve import wire
from ppserve.config import NetworkSettings, ServeConfig
from ppserve.errors import ConfigError, UsageError
from ppserve.process.environment import RankEnvironment
from ppserve.process.meeting import MIN_SECRET_BYTES, begin, end, find_meeting, read_secret
from ppserve.process.sockets import answers

ONE_HOST = [RankEnvironment(rank, 3, rank, 3) for rank in range(3)]
TWO_HOSTS = [RankEnvironment(rank, 2, 0, 1) for rank in range(2)]


@pytest.fixture
def place() -> Iterator[Path]:
    """For sockets. pytest's own directories have too long names."""
    with tempfile.TemporaryDirectory(prefix="pp-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch, place: Path) -> pytest.MonkeyPatch:
    """What a launcher says to its ranks."""
    for name, value in (("MASTER_ADDR", "head-host"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    return monkeypatch


def meeting(environment: RankEnvironment, **network: Any) -> wire.Meeting:
    return find_meeting(ServeConfig(network=NetworkSettings(**network)), environment)


# ---- one host ----------------------------------------------------------------------------------------------


def test_ranks_of_one_launcher_meet_in_one_place_with_one_secret() -> None:
    first, *others = (meeting(rank) for rank in ONE_HOST)
    assert others == [first, first]
    assert isinstance(first.address, wire.UnixAddress)
    with pytest.raises(FileNotFoundError):
        read_secret(first)
    listener, secret = begin(first)
    with listener:
        assert len(secret) >= MIN_SECRET_BYTES
        assert [read_secret(other) for other in others] == [secret, secret]
        assert answers(others[0].address)


def test_no_other_user_can_open_the_place_or_read_the_secret(place: Path) -> None:
    found = meeting(ONE_HOST[0])
    begin(found)[0].close()
    directory = found.secret_file.parent
    assert place in directory.parents
    for path in (directory, directory.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(found.secret_file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "MASTER_PORT", "MASTER_ADDR"])
def test_another_launcher_has_another_place(launcher: pytest.MonkeyPatch, name: str) -> None:
    ours = meeting(ONE_HOST[0])
    launcher.setenv(name, "29501")
    assert meeting(ONE_HOST[0]).address != ours.address


def test_a_killed_heads_place_is_taken_over_and_one_that_ends_leaves_nothing(place: Path) -> None:
    """Each head has a new secret."""
    here = meeting(ONE_HOST[0])
    listener, first = begin(here)
    listener.close()
    listener, second = begin(here)
    with listener:
        assert answers(here.address)
        assert read_secret(here) == second != first
    end(here)
    assert [path for path in place.rglob("*") if not path.is_dir()] == []


def test_a_living_heads_place_is_not() -> None:
    here = meeting(ONE_HOST[0])
    listener, secret = begin(here)
    with listener:
        with pytest.raises(UsageError, match="another server"):
            begin(here)
        assert read_secret(here) == secret


@pytest.mark.parametrize("which", ["the user's", "the server's"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_that_others_can_open_is_refused(place: Path, which: str, is_link: bool) -> None:
    here = meeting(ONE_HOST[0])
    begin(here)[0].close()
    directory = here.secret_file.parent if which == "the server's" else here.secret_file.parent.parent
    if is_link:
        directory.rename(place / "elsewhere")
        directory.symlink_to(place / "elsewhere")
    else:
        directory.chmod(0o755)
    for act in (begin, read_secret):
        with pytest.raises(UsageError, match="this user alone"):
            act(here)


def test_a_place_with_too_long_a_name_for_sockets_is_not_taken(launcher: pytest.MonkeyPatch, place: Path) -> None:
    long = place / ("x" * 90)
    long.mkdir()
    launcher.setenv("XDG_RUNTIME_DIR", str(long))
    assert len(os.fsencode(str(meeting(ONE_HOST[0]).address))) <= 103


# ---- several hosts -----------------------------------------------------------------------------------------


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("  sixteen letters!\n")
    return path


def test_ranks_of_several_hosts_meet_beside_the_launchers_port(secret_file: Path) -> None:
    expected = wire.Meeting(wire.TcpAddress("head-host", 29501), secret_file, is_ours=False)
    assert read_secret(expected) == b"sixteen letters!"
    assert [meeting(rank, secret_file=secret_file) for rank in TWO_HOSTS] == [expected] * 2
    chosen = meeting(TWO_HOSTS[1], secret_file=secret_file, control_port=7000)
    assert chosen.address == wire.TcpAddress("head-host", 7000)


@pytest.mark.parametrize("contents", [None, b"", b"fifteen letters", b"\n \t" * 40])
def test_a_secret_that_is_missing_or_too_short(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "weak"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError, match="--secret-file"):
        read_secret(meeting(TWO_HOSTS[0], secret_file=path))


def test_several_hosts_need_an_address_and_a_secret(launcher: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--secret-file: stages on several hosts need one"):
        meeting(TWO_HOSTS[0])
    launcher.delenv("MASTER_ADDR")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        meeting(TWO_HOSTS[0])
