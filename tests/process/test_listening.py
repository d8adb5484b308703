"""A process knows on which ports it listens, and refuses those that nobody asked for."""

from __future__ import annotations

import socket
import sys

import pytest

from ppserve.errors import UsageError
from ppserve.process.listening import OpenPort, own_ports, ports_elsewhere, refuse_unmeant

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its sockets")


@pytest.mark.parametrize(
    ("family", "host", "is_local"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::", False),
    ],
)
def test_a_socket_that_listens_is_found_with_its_address(family: int, host: str, is_local: bool) -> None:
    before = own_ports()
    with socket.create_server((host, 0), family=family) as opened:
        port = opened.getsockname()[1]
        others = {opened.port: True for opened in before}
        (found,) = [opened for opened in own_ports() if opened not in before]
        assert (found, found.is_local) == (OpenPort(host, port), is_local)
        assert found in refuse_unmeant({**others, port: True})
        with pytest.raises(UsageError, match=f"{port}, which nothing asked for"):
            refuse_unmeant(others)
        if is_local:
            refuse_unmeant({**others, port: False})
        else:
            with pytest.raises(UsageError, match="this host alone"):
                refuse_unmeant({**others, port: False})
    assert own_ports() == before


def test_addresses_of_ipv4_in_ipv6_are_judged_by_the_former() -> None:
    assert OpenPort("::ffff:127.0.0.1", 1).is_local
    assert not OpenPort("::ffff:10.0.0.1", 1).is_local


def test_connections_are_no_listeners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = own_ports()
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            assert own_ports() == before


def test_what_listens_on_another_address_than_the_one_meant_is_told() -> None:
    before = ports_elsewhere("192.0.2.1")
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)) as everywhere:
        found = OpenPort("0.0.0.0", everywhere.getsockname()[1])
        assert [each for each in ports_elsewhere("192.0.2.1") if each not in before] == [found]
        assert found not in ports_elsewhere("0.0.0.0")
