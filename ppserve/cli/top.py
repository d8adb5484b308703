"""`ppserve top`: watches a server, on a screen that moves or as a line for each interval."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import click
from prompt_toolkit import print_formatted_text
from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import FormattedTextControl, Layout, Window
from prompt_toolkit.styles import Style

from ppserve.bench.top import Line, ScrapeFailed, ServerReading, View, read
from ppserve.cli.client import CONNECTION, connection
from ppserve.cli.main import say
from ppserve.cli.types import Number, Parsed, address
from ppserve.client import CallFailed, Client, RetryPolicy
from ppserve.errors import PpserveError

_NARROWEST = 40
_READER_ENDS_WITHIN_S = 5.0
_COLOURS = Style.from_dict({
    "busy": "fg:#2a9d8f",
    "fill_drain": "bg:#e9b44c fg:#000000",
    "imbalance": "bg:#c8442f fg:#ffffff",
    "transfer": "bg:#7b5ea7 fg:#ffffff",
    "token_return": "bg:#d77fa1 fg:#000000",
    "host": "bg:#7c8794 fg:#000000",
    "gather": "bg:#4f9d69 fg:#000000",
    "idle": "fg:ansibrightblack",
    "good": "fg:ansigreen bold",
    "bad": "fg:ansired bold",
    "soft": "fg:ansibrightblack",
})  # fmt: skip
"""The page has the same colours. The letters of bubbles stand on theirs."""


@click.command(short_help="Show what stages and requests do, as it happens.", params=[*CONNECTION])
@click.option(
    "--metrics", type=Parsed("HOST:PORT", lambda text: "" if text == "none" else address(text)),
    help="Metrics port of the server; `none` shows the stages only.  [default: the port that the server tells]",
)  # fmt: skip
@click.option(
    "--interval", "interval_s", type=Number(0.1, 86400), default=1.0,
    help="Seconds between two views, which each view covers.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print one view and exit.")
def top(metrics: str | None, interval_s: float, once: bool, **flags: str) -> None:
    """Show stages as bars (busy, bubbles by cause, idle), requests, queue, KV use and latencies.

    A terminal gets a screen that moves: ? explains the letters, q ends it. Anything else gets one line for each
    interval. The exit code is 1 if there is no server, or no metrics where --metrics says.
    """
    target, stop = flags["target"], threading.Event()
    try:
        with Client(**connection(flags), retry=RetryPolicy(max_attempts=1)) as client:
            first = read(client, target, metrics)
            if first.problem and metrics:
                raise ScrapeFailed(f"no metrics: {first.problem}; --metrics none does without them")
            views = _views(client, target, metrics, interval_s, first, stop)
            if once:
                _print(next(views), target)
            elif sys.stdin.isatty() and sys.stdout.isatty():
                TopScreen(target, stop).follow(views)
            else:
                for view in views:
                    say(view.render_line(time.strftime("%H:%M:%S")))
    except KeyboardInterrupt:
        pass
    except CallFailed as failure:
        raise PpserveError(str(failure)) from None


def _views(
    client: Client, target: str, metrics: str | None, interval_s: float, before: ServerReading,
    stop: threading.Event,
) -> Iterator[View]:  # fmt: skip
    """Yield a view for each interval, until `stop`. Raises CallFailed."""
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + interval_s, time.monotonic())
        if stop.wait(max(0.0, due_s - time.monotonic())):
            return
        after = read(client, target, metrics)
        yield View(before, after)
        before = after


def _print(view: View, target: str) -> None:
    """Print a view: all of its lines on a terminal, else one line."""
    if not sys.stdout.isatty():
        say(view.render_line(time.strftime("%H:%M:%S")))
        return
    width = max(_NARROWEST, shutil.get_terminal_size().columns)
    print_formatted_text(_styled(view.render_screen(target, width)), style=_COLOURS)


def _styled(lines: Iterable[Line]) -> StyleAndTextTuples:
    pieces: StyleAndTextTuples = []
    for line in lines:
        pieces += [(f"class:{word}" if word else "", text) for word, text in line]
        pieces.append(("", "\n"))
    return pieces


class TopScreen:
    """A view that is replaced by the next one, on the terminal that standard input and output are."""

    def __init__(self, target: str, stop: threading.Event) -> None:
        """stop: is set when the user ends it."""
        self._target, self._stop = target, stop
        self._view: View | None = None
        self._explains = False
        self._app: Application[None] = Application(
            Layout(Window(FormattedTextControl(self._text, show_cursor=False))),
            style=_COLOURS,
            key_bindings=self._bindings(),
            full_screen=True,
        )

    def follow(self, views: Iterator[View]) -> None:
        """Show the views as they come, until a key ends it. Raises what `views` raises."""
        reader = threading.Thread(target=self._read, args=(views,), name="views", daemon=True)
        try:
            self._app.run(pre_run=reader.start)
        finally:
            self._stop.set()
            reader.join(_READER_ENDS_WITHIN_S)

    def _read(self, views: Iterator[View]) -> None:
        try:
            for self._view in views:
                self._app.invalidate()
        except Exception as error:
            failure = error  # it outlives this block

            def give_up() -> None:
                if not self._app.is_done:
                    self._app.exit(exception=failure)

            if self._app.loop is not None:
                with suppress(RuntimeError):  # the user ended it meanwhile, and its loop is closed
                    self._app.loop.call_soon_threadsafe(give_up)

    def _text(self) -> StyleAndTextTuples:
        if self._view is None:
            return [("class:soft", f"reading {self._target}\n")]
        width = max(_NARROWEST, self._app.output.get_size().columns)
        lines = self._view.render_screen(self._target, width, self._explains)
        keys: Line = [("soft", "q ends, ? explains" if not self._explains else "q ends, ? hides the explanation")]
        return _styled([*lines, [], keys])

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        def end(event: KeyPressEvent) -> None:
            if not event.app.is_done:
                event.app.exit()

        for key in ("q", "Q", "c-c", "<sigint>"):
            bindings.add(key)(end)

        @bindings.add("?")
        def _explain(_event: KeyPressEvent) -> None:
            self._explains = not self._explains

        return bindings
