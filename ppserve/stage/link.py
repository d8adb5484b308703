"""A stage's end of the control plane: one socket to the head, read by a thread of its own.

The reader stamps each message as it arrives, so that a plan seen during compute is known as such, and
answers pings by itself, so that the head can tell a busy stage from a frozen one. It also hears first that
an epoch is lost, while the stage may be waiting for a neighbour that never answers. When the head is gone
nothing is left to do, and the process ends.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ppserve import wire
from ppserve.errors import WireError
from ppserve.process.environment import EXIT_HEAD_GONE

Stamped = tuple[int, Any]


class HeadLink:
    """Sends typed messages to the head; `inbox` holds (arrival time in ns, message) pairs.

    abandoned: the newest epoch that the head has given up. on_abandon: called with it in the reader's
    thread, after `abandoned` is set and before the message is in the inbox.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()  # the loop sends results, the reader answers pings
        self.abandoned = 0
        self.on_abandon: Callable[[int], None] = lambda _epoch: None
        self.inbox: queue.SimpleQueue[Stamped] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._read, name="head-link", daemon=True).start()

    def send(self, message: wire.FromStage) -> None:
        frame = wire.encode(message)
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError:
            os._exit(EXIT_HEAD_GONE)

    def _read(self) -> None:
        reader = wire.FrameReader(wire.FromHead)
        while True:
            try:
                received = self._connection.recv(1 << 16)
                now_ns = time.monotonic_ns()
                messages = reader.feed(received)
            except (OSError, WireError):
                received = b""
            if not received:
                os._exit(EXIT_HEAD_GONE)
            for message in messages:
                if isinstance(message, wire.Ping):
                    self.send(wire.Heartbeat(message.sent_ns, now_ns))
                    continue
                if isinstance(message, wire.Abandon):
                    self.abandoned = message.epoch
                    self.on_abandon(message.epoch)
                self.inbox.put((now_ns, message))
                if isinstance(message, wire.Shutdown):
                    return  # what follows is only the end of the connection


def available_bytes() -> int:
    """Memory that this host could still give; 0 where /proc does not say."""
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
