"""A server over two hosts: by name and by address, IPv4 and IPv6, where a host's own name means its loopback."""

from __future__ import annotations

import sys

import pytest

from tests.hosts.two_hosts import ADDRESSES, ADDRESSES_6, NAMES, needs_hosts, two_hosts

pytestmark = [needs_hosts, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    ("master", "names_are_loopback"),
    [(NAMES[0], False), (ADDRESSES[0], True), (ADDRESSES_6[0], True)],
    ids=["by name", "by address, names that mean loopback", "by IPv6"],
)
def test_two_hosts_serve(master: str, names_are_loopback: bool) -> None:
    with two_hosts(names_are_loopback) as hosts:
        head = hosts.torchrun(0, master)
        hosts.torchrun(1, master)
        target = hosts.wait_ready(head)
        ask = ("generate", "--target", target, "--seed", "7", "--max-tokens", "12", "Once upon a time")
        assert hosts.run(0, sys.executable, "-m", "ppserve", *ask).startswith(" there was a careful boy")
        assert "did not form" not in head.log
