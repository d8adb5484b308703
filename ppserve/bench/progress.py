"""The line that shows the progress of a run. Only on a terminal."""

from __future__ import annotations

import shutil
import sys
import time

from ppserve.bench.caller import Answer
from ppserve.bench.load import Until, Watch

_BAR = 24
_EVERY_S = 0.1


class ProgressLine(Watch):
    """Writes to standard error, so that standard output holds the report alone; at most ten times a second."""

    def __init__(self, title: str, until: Until) -> None:
        self._title = title
        self._until = until
        self._draws = sys.stderr.isatty()
        self._begun_s = time.monotonic()
        self._drawn_s = 0.0
        self._num_sent = self._num_answered = self._num_failed = self._num_tokens = 0

    def sent(self) -> None:
        self._num_sent += 1
        self._draw()

    def answered(self, answer: Answer) -> None:
        self._num_answered += 1
        self._num_failed += not answer.is_ok
        self._num_tokens += answer.num_tokens
        self._draw()

    def close(self) -> None:
        """Erases the line."""
        if self._draws:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _draw(self) -> None:
        now_s = time.monotonic()
        if not self._draws or now_s - self._drawn_s < _EVERY_S:
            return
        self._drawn_s = now_s
        line = self._line(now_s - self._begun_s)[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r{line}\x1b[K")
        sys.stderr.flush()

    def _line(self, elapsed_s: float) -> str:
        shares = [0.0]
        if self._until.num_requests:
            shares.append(self._num_answered / self._until.num_requests)
        if self._until.duration_s:
            shares.append(elapsed_s / self._until.duration_s)
        filled = round(_BAR * min(1.0, max(shares)))
        wanted = f"/{self._until.num_requests}" if self._until.num_requests else ""
        failed = f"  {self._num_failed} FAILED" if self._num_failed else ""
        return (
            f"{self._title} [{'#' * filled}{'.' * (_BAR - filled)}] {self._num_answered}{wanted} requests"
            f"  {self._num_sent - self._num_answered} in flight"
            f"  {self._num_tokens / max(elapsed_s, 1e-9):.0f} tok/s  {elapsed_s:.0f} s{failed}"
        )
