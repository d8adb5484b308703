"""A line of the ledger for `ppserve chat`: what each stage did in the last moment, by the page's state."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ppserve.cli.chat_server import ChatServer
from ppserve.core.ledger.causes import BUSY, IDLE
from ppserve.errors import PpserveError

_EVERY_S = 0.5
_CELLS = 10

Seconds = Mapping[str, Mapping[str, float]]
"""The seconds of each kind since the server started, for each stage by its name."""


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
        self.text = render_stages({}, before)
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
            self.text = render_stages(before, now)
            before = now


def render_stages(before: Seconds, now: Seconds) -> str:
    """Return a bar of each stage's busy share between two readings, and what it waited for most."""
    return "   ".join(_bar(name, before.get(name, {}), spent_s) for name, spent_s in now.items())


def _bar(name: str, before_s: Mapping[str, float], now_s: Mapping[str, float]) -> str:
    spent_s = {kind: max(0.0, now_s[kind] - before_s.get(kind, 0.0)) for kind in now_s}
    whole_s = sum(spent_s.values()) or 1.0
    share = sum(spent_s.pop(kind, 0.0) for kind in BUSY) / whole_s
    rest = max(spent_s, key=spent_s.__getitem__, default=IDLE)
    filled = round(_CELLS * share)
    return f"{name} {'█' * filled}{'░' * (_CELLS - filled)} {share:4.0%} busy, else {rest}"


def _name(stage: Mapping[str, Any]) -> str:
    return f"stage {stage['replica']}.{stage['stage']}"
