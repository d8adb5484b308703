"""By which address other hosts reach a stage."""

from __future__ import annotations

import socket

import pytest

from ppserve.config import NetworkSettings
from ppserve.errors import ConfigError
from ppserve.process.interfaces import ONE_HOST, Route, address_of, find_route, interface_of, interfaces

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


def test_this_host_has_a_loopback() -> None:
    assert any("127.0.0.1" in own for own in interfaces().values())


def test_over_a_unix_socket_all_are_on_one_host() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert find_route(ours, NetworkSettings(advertise="10.0.0.5")) == ONE_HOST


@pytest.mark.parametrize(
    ("settings", "own"),
    [(NetworkSettings(), "127.0.0.1"), (NetworkSettings(advertise="10.0.0.5"), "10.0.0.5")],
)
def test_the_address_that_reaches_the_head_is_the_stages_own(settings: NetworkSettings, own: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head, socket.create_connection(head.getsockname()) as stage:
        assert find_route(stage, settings) == Route(own, "127.0.0.1")
