"""Log lines on standard error: plain text, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import time

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
