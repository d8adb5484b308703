"""A cable between two hosts that can delay and lose frames, for kernels without `netem`."""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 1 << 16
_LOOK_EVERY_S = 0.05


def why_no_cable() -> str | None:
    """Why such a cable cannot be made here; None if it can."""
    try:
        os.close(os.open(_DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{_DEVICE}: {error.strerror}"
    return None


class Cable:
    """Two ends, each a link `eth0` of a network namespace, and a thread that carries frames between them.

    delay_s: of every frame. loss: the share of frames that is lost, of those that the first host sends, and of
    those that the second does. Both may be changed at any time. Frames keep their order. num_refused: others
    that were lost, because the link where they should go was down.
    """

    def __init__(self, spaces: Sequence[str], seed: int = 0) -> None:
        self.delay_s = 0.0
        self.loss = [0.0, 0.0]
        self.num_refused = 0
        self._chance = random.Random(seed)
        self._ends = [_tap(space, f"pp{os.getpid()}t{number}") for number, space in enumerate(spaces)]
        self._is_over = False
        self._carrier = threading.Thread(target=self._carry, name="cable", daemon=True)
        self._carrier.start()

    def close(self) -> None:
        self._is_over = True
        self._carrier.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        while not self._is_over:
            due_s = min((frames[0][0] for frames in under_way if frames), default=float("inf"))
            wait_s = max(0.0, min(_LOOK_EVERY_S, due_s - time.monotonic()))
            for end in select.select(self._ends, [], [], wait_s)[0]:
                sender = self._ends.index(end)
                with suppress(BlockingIOError, OSError):  # its link is down
                    frame = os.read(end, _FRAME_BYTES)
                    if self._chance.random() >= self.loss[sender]:
                        under_way[sender].append((time.monotonic() + self.delay_s, frame))
            for sender, frames in enumerate(under_way):
                while frames and frames[0][0] <= time.monotonic():
                    try:
                        os.write(self._ends[1 - sender], frames[0][1])
                    except BlockingIOError:
                        break  # the system has no room now
                    except OSError:
                        self.num_refused += 1
                    frames.popleft()


def _tap(space: str, name: str) -> int:
    """The descriptor of a new link `eth0` in a namespace."""
    end = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
        subprocess.run(["ip", "link", "set", name, "netns", space, "name", "eth0"], check=True)
    except BaseException:
        os.close(end)
        raise
    return end
