"""A real headless Chromium, driven over its debugging pipe: no driver, no further packages."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AXE = os.environ.get("PPSERVE_AXE")
"""The path of axe-core's axe.min.js (`npm pack axe-core`), which looks for what keeps people from using a page."""
EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

WIDTHS = (390, 640, 641, 831, 832, 991, 992, 1600)
"""Widths of windows in pixels: a phone's, a wide screen's, and those around each change of the layout."""

_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
]

# The pipe's ends must be 3 and 4 in the browser, whatever their numbers are here.
_BECOME = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab. `complaints` holds what the console and the content security policy had to say."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._ids = itertools.count(1)
        self._pending = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Returns when the page has loaded."""
        self._call("Page.navigate", url=url)
        self.wait_for(f"location.href === {url!r} && document.readyState === 'complete'")

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        """scheme: `dark` or `light`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        """The first true value of the expression."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.complaints}"
            self.evaluate("new Promise((done) => setTimeout(done, 50))")
        return value

    def fits(self, width: int) -> bool:
        """Whether nothing of the page is beyond a window of this width."""
        self.resize(width, 900, phone=width < 600)
        self.wait_for("new Promise((ok) => requestAnimationFrame(() => requestAnimationFrame(() => ok(true))))")
        return bool(self.evaluate("document.documentElement.scrollWidth") <= width)

    def violations(self) -> list[str]:
        """What axe finds wrong with the page: its rule, and the element."""
        assert AXE is not None
        self.evaluate(Path(AXE).read_text("utf-8") + "; true")
        found = self.evaluate("axe.run().then((r) => r.violations.map((v) => [v.id, v.nodes[0].html]))")
        return [f"{rule}: {element}" for rule, element in found]

    def press(self, key: str, text: str = "") -> None:
        """Press it as on a keyboard: the whole of the browser sees it."""
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, " ": 32, "Enter": 13}
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self._call("Input.dispatchKeyEvent", **event, **down)
        self._call("Input.dispatchKeyEvent", **event, type="keyUp")

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for heard in self._messages():
            if heard.get("id") == number:
                assert "error" not in heard, (method, heard["error"])
                return dict(heard["result"])
            self._note(heard)
        raise AssertionError("Chromium ended")

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._pending:
                message, self._pending = self._pending.split(b"\0", 1)
                yield json.loads(message)
            received = os.read(self._read, 1 << 16)
            if not received:
                return
            self._pending += received


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with an empty profile and one tab; ended, with all its processes, afterwards."""
    assert EXECUTABLE is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ppserve-chromium-", ignore_cleanup_errors=True) as profile:
        ends = (str(to_read), str(from_write))
        command = [sys.executable, "-c", _BECOME, *ends, EXECUTABLE, *_FLAGS, f"--user-data-dir={profile}"]
        with (Path(profile) / "log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(to_read, from_write)
            )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            # Chromium ends by itself when its pipe does.
            os.close(to_write)
            os.close(from_read)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
