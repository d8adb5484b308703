"""The address by which other hosts reach a stage, where the head listens, and whether it can be reached there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ppserve.config import NetworkSettings
from ppserve.errors import ConfigError
from ppserve.process.network import (
    ONE_HOST,
    Route,
    address_of,
    connect,
    find_route,
    interface_of,
    interfaces,
    is_loopback,
    listen,
)

WITHIN_S = 20.0
KNOWN = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5", "fe80::1", "fd00::5"], "ib0": ["fe80::2", "fd01::5"]}


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [("eth0", 4, "10.0.0.5"), ("eth0", 6, "fd00::5"), ("ib0", 4, "fd01::5"), ("lo", 6, "127.0.0.1")],
)
def test_an_interface_has_an_address_of_the_wanted_kind_if_it_can(name: str, version: int, expected: str) -> None:
    assert address_of(name, KNOWN, version) == expected


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="--interface: 'eth7' has no address here; there are eth0, ib0, lo"):
        address_of("eth7", KNOWN, 4)


def test_the_interface_of_an_address_however_it_is_written() -> None:
    assert interface_of("fd00:0::5", KNOWN) == "eth0"
    assert interface_of("10.0.0.6", KNOWN) is None
    assert interface_of("127.0.0.1", interfaces()) is not None


@pytest.mark.parametrize(
    ("settings", "own"),
    [(NetworkSettings(), "127.0.0.1"), (NetworkSettings(advertise="10.0.0.5"), "10.0.0.5")],
)
def test_the_address_that_reaches_the_head_is_the_stages_own(settings: NetworkSettings, own: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head, socket.create_connection(head.getsockname()) as stage:
        assert find_route(stage, settings) == Route(own, "127.0.0.1")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert find_route(ours, settings) == ONE_HOST, "over a Unix socket all are on one host"


def test_an_interface_of_gloos_that_is_not_there_is_refused_where_stages_leave_their_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not refused where they stay on their host: `stage.connecting` takes loopback's."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    with socket.create_server(("127.0.0.1", 0)) as head, socket.create_connection(head.getsockname()) as stage:
        assert find_route(stage, NetworkSettings()) == ONE_HOST
        with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME: 'eth9' has no address here"):
            find_route(stage, NetworkSettings(advertise="10.0.0.5"))


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare, for a network"
)
@pytest.mark.parametrize(
    ("commands", "found"),
    [
        ("true", "loopback interface is down"),
        ("ip link set lo up", "127.0.0.1"),
        ("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", "::1"),
    ],
)
def test_the_address_within_a_host_is_one_that_can_be_reached(commands: str, found: str) -> None:
    program = "from ppserve.process.network import local_address; print(local_address())"
    inside = f"{commands}; exec {sys.executable} -c '{program}'"
    ended = subprocess.run(["unshare", "-n", "sh", "-c", inside], capture_output=True, text=True, timeout=WITHIN_S)
    assert found in (ended.stdout or ended.stderr.splitlines()[-1])


# ---- sockets of the control plane ----


def finds_out_after_20_s(connection: socket.socket) -> bool:
    """Whether the kernel ends this connection once its other end says nothing any more, not even that it has got
    what was sent. Where nothing is to be sent it asks, some times."""
    names = "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"
    if missing := [name for name in names if not hasattr(socket, name)]:
        pytest.skip(f"this system has no {missing}")
    silent_s, every_s, times, unanswered_ms = (
        connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
    )
    asks = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return bool(asks) and silent_s + times * every_s == 20 and unanswered_ms == 20_000


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_an_address_is_listened_to_and_no_other(host: str) -> None:
    address = f"{host}:{free_port(host.strip('[]'))}"
    with listen(address) as listener, connect(address, WITHIN_S):
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_host_whose_address_is_not_known_to_itself_listens_to_all() -> None:
    """A host behind a load balancer is like that: 192.0.2.1 is nobody's."""
    port = free_port("127.0.0.1")
    with listen(f"192.0.2.1:{port}") as listener:
        for host in ("127.0.0.1", "[::1]"):
            with connect(f"{host}:{port}", WITHIN_S) as connection, listener.accept()[0] as accepted:
                assert accepted.getpeername()[1] == connection.getsockname()[1], f"{host} is another listener's"


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_rank_finds_out_after_20_s_that_the_heads_host_is_gone() -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with listen(address), connect(address, WITHIN_S) as connection:
        assert finds_out_after_20_s(connection)


def test_a_name_is_loopback_by_itself_not_by_its_beginning() -> None:
    """What crosses a network in the clear is to be said."""
    assert all(map(is_loopback, ("127.0.0.2", "::1", "localhost", "localhost4")))
    assert not any(map(is_loopback, ("10.0.0.1", "::", "localhost-gpu3", "localhost.example.com")))
