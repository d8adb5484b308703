"""Log lines on standard error: plain text, or one JSON object per line."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from typing import Any

from ppserve.config import LogSettings

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object per line; entries of `extra` (a request id, a traceparent) become keys."""

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


def set_up_logging(settings: LogSettings, who: str = "head") -> None:
    """Sets level and format of all logs of this process. who: `head` or `stage N`."""
    handler = logging.StreamHandler()
    if settings.format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {who} %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    # At `debug` numba logs every instruction that it compiles.
    logging.getLogger("numba").setLevel(max(logging.INFO, logging.getLogger().level))


def survive_full_disks() -> None:
    """Makes standard output and error drop what cannot be written. Otherwise a log on a full disk would end the
    server."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        buffer = io.BufferedWriter(_Unfailing(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, "utf-8", "backslashreplace", line_buffering=True))


class _Unfailing(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
