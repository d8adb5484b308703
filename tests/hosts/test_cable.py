"""The cable itself: what it carries, delays and loses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hosts.cable import why_no_cable
from tests.hosts.two_hosts import ADDRESSES, needs_hosts, two_hosts
from tests.orphans import dying_with_us

pytestmark = [needs_hosts, pytest.mark.skipif(why_no_cable() is not None, reason=str(why_no_cable()))]
ECHO = f"""
import socket
ours = socket.socket(type=socket.SOCK_DGRAM)
ours.bind(("{ADDRESSES[1]}", 4000))
print(flush=True)
while True:
    ours.sendto(*ours.recvfrom(100))
"""
ASK = f"""
import socket, time
ours, times_s = socket.socket(type=socket.SOCK_DGRAM), []
ours.settimeout(0.5)
for number in range(20):
    begun_s = time.monotonic()
    ours.sendto(bytes([number]), ("{ADDRESSES[1]}", 4000))
    try:
        while ours.recv(100) != bytes([number]):
            pass
        times_s.append(time.monotonic() - begun_s)
    except TimeoutError:
        pass
    if number == 1 and not times_s:
        break
print(len(times_s), min(times_s, default=0))
"""


def test_it_delays_and_loses_frames_each_way() -> None:
    with two_hosts(slow_cable=True) as hosts:
        cable = hosts.slow
        assert cable is not None
        command = dying_with_us(hosts.command(1, [sys.executable, "-c", ECHO]))
        with subprocess.Popen(command, stdout=subprocess.PIPE) as echo:
            assert echo.stdout is not None
            echo.stdout.readline()

            def ask() -> tuple[int, float]:
                count, least_s = hosts.run(0, sys.executable, "-c", ASK).split()
                return int(count), float(least_s)

            assert ask()[0] == 20
            cable.delay_s = 0.05
            count, least_s = ask()
            assert count > 0
            assert least_s >= 0.1
            cable.delay_s, cable.loss = 0.0, [0.0, 0.3]
            assert 0 < ask()[0] < 20  # all 20 come with a chance of 0.001; the chances are always the same
            for lost in [1.0, 0.0], [0.0, 1.0]:
                cable.loss = lost
                assert ask()[0] == 0
            cable.loss, refused = [0.0, 0.0], cable.num_refused
            hosts.cable(connected=False)
            assert ask()[0] == 0
            assert cable.num_refused > refused
            hosts.cable(connected=True)
            refused = cable.num_refused
            assert ask()[0] > 0
            assert cable.num_refused == refused
            echo.kill()
