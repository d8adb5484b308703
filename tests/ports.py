"""Ports for servers that must come back on the port that they had."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 32_000


def port_to_come_back_to() -> int:
    """Free a moment ago on 127.0.0.1, as was the next one. Below 32768, where systems give none to sockets
    that ask for any: nobody takes it while its server is away."""
    while True:
        port = random.randrange(_FIRST, _LAST)
        try:
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
