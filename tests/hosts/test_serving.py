"""A server over two hosts: by name and by address, IPv4 and IPv6, where a host's own name means its loopback."""

from __future__ import annotations

import json
import sys

import psutil
import pytest

from tests.hosts.two_hosts import (
    ADDRESSES,
    ADDRESSES_6,
    NAMES,
    Agent,
    TwoHosts,
    needs_hosts,
    two_hosts,
)

pytestmark = [needs_hosts, pytest.mark.timeout(150)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("master", "names_are_loopback"),
    [
        (NAMES[0], False),
        pytest.param(ADDRESSES[0], True, marks=pytest.mark.thorough),
        pytest.param(ADDRESSES_6[0], True, marks=pytest.mark.thorough),
    ],
    ids=["by name", "by address, names that mean loopback", "by IPv6"],
)
def test_two_hosts_serve(master: str, names_are_loopback: bool) -> None:
    with two_hosts(names_are_loopback) as hosts:
        head = hosts.torchrun(0, master)
        worker = hosts.torchrun(1, master)
        target = hosts.wait_ready(head)
        ask = ("generate", "--target", target, "--seed", "7", "--max-tokens", "12", "Once upon a time")
        assert hosts.run(0, sys.executable, "-m", "ppserve", *ask).startswith(" there was a careful boy")
        assert "did not form" not in head.log
        if master == NAMES[0]:
            a_cut_cable_and_a_host_that_comes_back(hosts, head, worker, target)


@pytest.mark.thorough
def test_stages_listen_on_the_ports_that_they_may_have() -> None:
    """The store takes the first that is free. gloo takes those of the system, which the operator has told."""
    first, of_system, last = 29600, 29650, 29699
    with two_hosts() as hosts:
        for host in range(2):
            hosts.run(host, "sysctl", "-q", "-w", f"net.ipv4.ip_local_port_range={of_system} {last}")
        head = hosts.torchrun(0, NAMES[0], "--stage-ports", f"{first}-{last}")
        worker = hosts.torchrun(1, NAMES[0], "--stage-ports", f"{first}-{last}")
        hosts.wait_ready(head)
        for host, agent in enumerate((head, worker)):
            stages = stages_under(agent.process.pid)
            told = json.loads(hosts.run(host, sys.executable, "-c", LISTENING))
            ports = [port for pid, port in told if pid in stages]
            assert (first in ports) is (agent is head)
            assert any(of_system <= port <= last for port in ports)
            assert all(first <= port <= last for port in ports), ports
            assert "--stage-ports:" not in agent.log


# Of every process, to be run on a host: its kernel tells of its own sockets alone.
LISTENING = """
import json, psutil
told = psutil.net_connections("tcp")
print(json.dumps([(one.pid, one.laddr.port) for one in told if one.status == psutil.CONN_LISTEN]))
"""


def stages_under(launcher: int) -> set[int]:
    below = psutil.Process(launcher).children(recursive=True)
    return {process.pid for process in below if process.name() == "ppserve.stage"}


def a_cut_cable_and_a_host_that_comes_back(hosts: TwoHosts, head: Agent, worker: Agent, target: str) -> None:
    """One answer meets both, and has the same text; the head stays."""

    def lose_host() -> None:
        worker.end()
        hosts.torchrun(1, NAMES[0])

    whole = hosts.stream(target, 250)
    # Longer than a silence after which the head gives the epoch up.
    hurt = hosts.stream(target, 250, lambda: hosts.pull_cable(3.5), lose_host)
    assert hurt.text == whole.text
    assert "stage 1: silent" in head.log
    assert "stage 1 died (exit)" in head.log
    assert head.log.count("ppserve ready") == 1
