"""A line of the ledger for `ppserve chat`: what each stage did in the last moment, by the page's state."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from typing import Any

from ppserve.cli.chat_server import ChatServer
from ppserve.core.ledger.causes import BUSY, IDLE
from ppserve.errors import PpserveError

_EVERY_S = 0.5

Seconds = Mapping[str, Mapping[str, float]]
"""The seconds of each kind since the server started, for each stage by REPLICA.STAGE."""


class StagesLine:
    """Reads the state every half second, in a thread of its own, while it is shown."""

    def __init__(self, server: ChatServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.text = ""
        """The line as it is now; empty while it is not shown."""

    def toggle(self) -> str:
        """Show or hide the line, and say so. Raises PpserveError where the server does not tell."""
        if self._thread is not None:
            self.close()
            return "the stages are not shown any more"
        before = self._read()
        self.text = render_stages({}, before, _width())
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, args=(before,), name="stages", daemon=True)
        self._thread.start()
        return "the last line shows what the stages do; /stages hides it"

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self.text = None, ""

    def _read(self) -> Seconds:
        return {_name(stage): stage["time_s"] for stage in self._server.stages()}

    def _watch(self, before: Seconds) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                now = self._read()
            except (PpserveError, LookupError, TypeError) as failure:
                self.text = f"stages: {failure}"
                continue
            self.text = render_stages(before, now, _width())
            before = now


def render_stages(before: Seconds, now: Seconds, width: int) -> str:
    """Return each stage's busy share between two readings, and what it waited for most, in one line.

    width: columns of the line. Where they do not suffice, bars are shorter, and then left out with some words.
    """
    shares = [_share(name, before.get(name, {}), spent_s) for name, spent_s in now.items()]
    lines = ("   ".join(form(*share) for share in shares) for form in (_in_words, _short, _shortest))
    return next((line for line in lines if len(line) <= width), "   ".join(_shortest(*share) for share in shares))


def _share(name: str, before_s: Mapping[str, float], now_s: Mapping[str, float]) -> tuple[str, float, str]:
    """Return the name, the busy share, and the kind of most of the rest."""
    spent_s = {kind: max(0.0, now_s[kind] - before_s.get(kind, 0.0)) for kind in now_s}
    whole_s = sum(spent_s.values()) or 1.0
    share = sum(spent_s.pop(kind, 0.0) for kind in BUSY) / whole_s
    rest = max(spent_s, key=spent_s.__getitem__, default=IDLE)
    return name, share, rest


def _in_words(name: str, share: float, rest: str) -> str:
    return f"stage {name} {_bar(share, 10)} {share:4.0%} busy, else {rest}"


def _short(name: str, share: float, rest: str) -> str:
    return f"stage {name} {_bar(share, 5)} {share:4.0%} {rest}"


def _shortest(name: str, share: float, rest: str) -> str:
    return f"{name} {share:4.0%} {rest}"


def _bar(share: float, cells: int) -> str:
    filled = round(cells * share)
    return "█" * filled + "░" * (cells - filled)


def _width() -> int:
    """Return the columns that can be written to without a move to the next line."""
    return shutil.get_terminal_size().columns - 1


def _name(stage: Mapping[str, Any]) -> str:
    return f"{stage['replica']}.{stage['stage']}"
