"""A line that shows progress. A terminal shows it in one place; elsewhere lines are written from time to time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TextIO

from ppserve.process.log import ERASE_LINE

_SILENT_S = 2.0
"""Where lines stay, nothing is written about progress that takes no longer than this."""
_SOON_S, _EVERY_S, _LATER_EVERY_S = 30.0, 2.0, 10.0
"""Lines that stay are at least `_EVERY_S` apart, and `_LATER_EVERY_S` once `_SOON_S` have passed."""


def write_over(stream: TextIO, text: str) -> None:
    """Replace the terminal's current line by this text. The next text or line of the log replaces this one."""
    stream.write(f"{ERASE_LINE}{text[: shutil.get_terminal_size().columns - 1]}\r")
    stream.flush()


class ProgressLine:
    """A line such as `starting, 3 s: loading 1 GiB of 4 GiB`. Times are seconds on one clock.

    On a terminal the next text replaces it, and so does a line of the log (`ERASE_LINE` of `ppserve.process.log`).
    Elsewhere a line is written from time to time, if its text is new.
    """

    def __init__(
        self, stream: TextIO, what: str, now_s: float, say: Callable[[str], object] | None = None
    ) -> None:
        """Show nothing yet. what: the beginning of the line. say: gets lines in place of the stream."""
        self._stream, self._what, self._since_s = stream, what, now_s
        self._is_terminal = say is None and stream.isatty()
        self._say = say or (lambda line: self._write(f"{line}\n"))
        self._said, self._said_s = "", now_s

    def show(self, text: str, now_s: float) -> None:
        """Show this text. This may be called often, also with the same text."""
        elapsed_s = now_s - self._since_s
        line = f"{self._what}, {elapsed_s:.0f} s: {text}"
        if self._is_terminal:
            write_over(self._stream, line)
        elif text != self._said and elapsed_s >= _SILENT_S and self._is_time(now_s):
            self._said, self._said_s = text, now_s
            self._say(line)

    def erase(self) -> None:
        """Remove the line from a terminal. Elsewhere lines stay."""
        if self._is_terminal:
            self._write(ERASE_LINE)

    def _is_time(self, now_s: float) -> bool:
        every_s = _EVERY_S if now_s - self._since_s < _SOON_S else _LATER_EVERY_S
        return now_s - self._said_s >= every_s

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
