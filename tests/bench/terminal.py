"""A command on a terminal of its own."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time


class Terminal:
    """Starts it; what it writes is in `seen`, as far as it was read."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
        os.close(theirs)
        self.seen = ""

    def read_until(self, pattern: str, timeout_s: float = 60) -> None:
        until_s = time.monotonic() + timeout_s
        while re.search(pattern, self.seen) is None:
            assert time.monotonic() < until_s, self.seen
            if select.select([self._ours], [], [], 1.0)[0]:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
