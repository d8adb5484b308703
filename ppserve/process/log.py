"""The log of this process, and its standard streams, to which writes never wait for a reader."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ppserve.config import ServerSettings

ERASE_LINE = "\r\x1b[K"
"""This erases a line of a terminal, in which the head may show the progress of the start."""

# The attributes that every log record has.
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
# Bytes that may wait for a reader; they are some thousand lines.
_MAX_WAITING_BYTES = 1 << 18
# A process that ends drops waiting lines if none was read for so long.
_FLUSH_WITHIN_S = 1.0


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object, with the entries of `extra`, such as a request id."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(settings: ServerSettings, who: str = "head") -> None:
    """Set the level and the format of all logs of this process. who: its name there, `head` or `stage N`."""
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        erase = ERASE_LINE if handler.stream.isatty() else ""
        handler.setFormatter(logging.Formatter(f"{erase}%(asctime)s {who} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    # At `debug` numba logs every instruction that it compiles.
    logging.getLogger("numba").setLevel(max(logging.INFO, logging.getLogger().level))
    for outlet in _outlets:
        outlet.format = handler.format


# ---- standard output and error ----


def never_wait_for_readers() -> None:
    """Let writes to standard output and error return at once, in every thread. Lines that nobody reads, or for
    which the disk has no room, are dropped and counted."""
    _outlets.clear()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        _outlets.append(outlet := _Outlet(fd))
        setattr(sys, name, io.TextIOWrapper(outlet, "utf-8", "backslashreplace", line_buffering=True))
    atexit.register(flush_streams)


def flush_streams() -> None:
    """Wait until everything is written, as long as somebody reads it. Call this before `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for outlet in _outlets:
        outlet.drain()


def on_dropped(count: Callable[[int], None]) -> None:
    """Call `count` with the number of lines whenever this process drops some."""
    for outlet in _outlets:
        outlet.count = count


class _Outlet(io.BufferedIOBase):
    """A stream whose bytes wait in memory until a thread has written them, however long that takes. If too much
    waits, further lines are dropped. Once the rest has been read, a line says how many were."""

    def __init__(self, fd: int) -> None:
        self.format: Callable[[logging.LogRecord], str] = logging.Formatter("ppserve: %(message)s").format
        self.count: Callable[[int], None] = lambda _lines: None
        self._number, self._fd = fd, os.dup(fd)
        self._waiting = bytearray()
        self._is_idle = True
        self._dropped = self._progress = 0
        self._changed = threading.Condition()
        _make_own_unblocking(fd)
        threading.Thread(target=self._hand_on, name=f"outlet-{fd}", daemon=True).start()

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        with self._changed:
            if len(self._waiting) + len(chunk) > _MAX_WAITING_BYTES:
                self._drop(chunk)
            else:
                self._waiting += chunk
                self._changed.notify_all()
        return len(chunk)

    def drain(self) -> None:
        """Wait until everything is written, or nothing has been read for _FLUSH_WITHIN_S."""
        with self._changed:
            before = -1
            while (self._waiting or not self._is_idle) and self._progress != before:
                before = self._progress
                self._changed.wait(_FLUSH_WITHIN_S)

    def _drop(self, chunk: bytes) -> None:
        lines = chunk.count(b"\n")
        with self._changed:
            self._dropped += lines
        self.count(lines)

    def _hand_on(self) -> None:
        num_noticed = 0
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                batch, dropped = bytes(self._waiting), self._dropped
                self._waiting.clear()
                self._is_idle = False
            # The dropped lines came after this batch, which left no room for them.
            if not self._write_all(batch) or dropped <= num_noticed:
                continue
            if self._write_all(self._notice(dropped - num_noticed)):
                num_noticed = dropped

    def _write_all(self, batch: bytes) -> bool:
        """Write a batch. Return False if a part of it cannot be written, now or later."""
        at = 0
        while at < len(batch):
            # A pipe takes up to PIPE_BUF bytes as one piece, so no other process's line gets into the middle of
            # ours.
            end = 1 + batch.rfind(b"\n", at, at + select.PIPE_BUF) or at + select.PIPE_BUF
            try:
                at += os.write(self._fd, batch[at:end])
                self._progress += 1
            except BlockingIOError:  # another program has made the file non-blocking
                reader = select.poll()
                reader.register(self._fd, select.POLLOUT)
                reader.poll()
            except OSError:
                self._drop(batch[at:])
                return False
        return True

    def _notice(self, dropped: int) -> bytes:
        if self._number == 1:
            return b""
        record = logging.makeLogRecord({"name": "ppserve", "levelno": logging.WARNING, "levelname": "WARNING"})
        record.msg = f"{dropped} lines before this one were dropped: nobody read them, or the disk was full"
        return f"{self.format(record)}\n".encode()


_outlets: list[_Outlet] = []


def _make_own_unblocking(fd: int) -> None:
    """Make a pipe or terminal non-blocking for libraries that write to it directly; they lose what it does not
    take. It is opened anew for that, because otherwise the flag would also be the shell's. A file of another user
    cannot be opened anew, and stays as it is."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
        with contextlib.suppress(OSError):
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(own, fd)
            os.close(own)
