"""Where ranks find the head, what they share, and which users may speak with each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppserve import wire
from ppserve.config import NetworkSettings, ServeConfig
from ppserve.errors import ConfigError, UsageError
from ppserve.process.environment import RankEnvironment
from ppserve.process.head_endpoint import find_head_endpoint, open_head_socket, read_secret
from ppserve.process.network import connect
from tests.process.heads import SECRET, WITHIN_S, head

pytestmark = pytest.mark.timeout(60)

ONE_HOST = [RankEnvironment(rank, 3, rank, 3) for rank in range(3)]
TWO_HOSTS = [RankEnvironment(rank, 2, 0, 1) for rank in range(2)]


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """What a launcher says to its ranks."""
    for name, value in (("MASTER_ADDR", "head-host"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"the one of {tmp_path}")
    return monkeypatch


def find(environment: RankEnvironment, **network: Any) -> wire.HeadEndpoint:
    return find_head_endpoint(ServeConfig(network=NetworkSettings(**network)), environment)


# ---- one host ----------------------------------------------------------------------------------------------


def test_ranks_of_one_launcher_meet_at_one_name_whatever_becomes_of_files(tmp_path: Path) -> None:
    first, *others = (find(rank) for rank in ONE_HOST)
    assert others == [first, first]
    listener, secret = open_head_socket(first)
    with listener:
        assert [read_secret(other) for other in others] == [secret, secret]
        connect(others[0].address, WITHIN_S).close()
        assert listener.getsockname().startswith(b"\0"), "it has a file"


def test_a_killed_heads_place_is_free_and_a_living_ones_is_not() -> None:
    here = find(ONE_HOST[0])
    for _ in range(2):
        with open_head_socket(here)[0], pytest.raises(UsageError, match="another server listens on @ppserve-"):
            open_head_socket(here)


def test_another_launcher_has_another_place(launcher: pytest.MonkeyPatch) -> None:
    addresses = {find(ONE_HOST[0]).address}
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "MASTER_ADDR"):
        launcher.setenv(name, "29501")
        addresses.add(find(ONE_HOST[0]).address)
    assert len(addresses) == 4


ANOTHER_USER = """if True:
    import os, socket, sys
    os.setuid(54321)
    what, name = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as own:
        if what == "dials":
            own.connect("\\0" + name)
            sys.exit(own.recv(1) != b"")
        own.bind("\\0" + name)
        own.listen()
        print("listens", flush=True)
        sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_is_not_spoken_with_at_either_end(tmp_path: Path) -> None:
    """Its socket can be found: the kernel says whose it is. One of this user is greeted, as a control."""
    command = [sys.executable, "-c", ANOTHER_USER]
    with head(tmp_path) as listening:
        name = listening.endpoint.address.removeprefix("@")
        assert subprocess.run([*command, "dials", name], timeout=WITHIN_S).returncode == 0
        with connect(listening.endpoint.address, WITHIN_S) as ours:
            assert ours.recv(1)
    impostor = subprocess.Popen([*command, "listens", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == b"listens\n"
        with pytest.raises(PermissionError, match="another user"):
            connect(listening.endpoint.address, WITHIN_S)
        impostor.communicate()


# ---- several hosts -----------------------------------------------------------------------------------------


def test_ranks_of_several_hosts_meet_beside_the_launchers_port(tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("  sixteen letters!\n")
    expected = wire.HeadEndpoint("head-host:29501", secret_file, b"sixteen letters!")
    assert [find(rank, secret_file=secret_file) for rank in TWO_HOSTS] == [expected] * 2
    chosen = find(TWO_HOSTS[1], secret_file=secret_file, control_port=7000)
    assert chosen.address == "head-host:7000"
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"a {name}")
    tls = {f"stage_tls_{name}": tmp_path / name for name in ("ca", "cert", "key")}
    assert find(TWO_HOSTS[1], secret_file=secret_file, **tls).tls_held == (b"a ca", b"a cert", b"a key")


@pytest.mark.parametrize("contents", [None, b"", b"fifteen letters", b"\n \t" * 40])
def test_a_secret_that_is_missing_or_too_short(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "weak"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError, match="--secret-file"):
        find(TWO_HOSTS[0], secret_file=path)
    path.write_bytes(SECRET)
    here = find(TWO_HOSTS[0], secret_file=path)
    path.write_bytes(b"  another secret, of a head that was started anew")
    assert read_secret(here) == b"another secret, of a head that was started anew"
    path.unlink() if contents is None else path.write_bytes(contents)
    assert read_secret(here) == SECRET, "a file that is gone later keeps no stage from coming back"


def test_several_hosts_need_an_address_and_a_secret(launcher: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--secret-file: stages on several hosts need one"):
        find(TWO_HOSTS[0])
    launcher.delenv("MASTER_ADDR")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        find(TWO_HOSTS[0])
