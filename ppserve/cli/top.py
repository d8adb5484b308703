"""`ppserve top`: where a running server's stages spend their time, and what they serve, in the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click

from ppserve.bench.scrape import ScrapeFailed
from ppserve.bench.top import View, read
from ppserve.cli.connection import connection, connection_options
from ppserve.cli.output import say
from ppserve.cli.types import Number
from ppserve.client import CallFailed, Client, RetryPolicy

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command()
@click.option(
    "--metrics",
    default="127.0.0.1:9400",
    show_default=True,
    metavar="HOST:PORT",
    help="The server's metrics page; `none`: only the stages.",
)
@click.option(
    "--interval",
    "interval_s",
    type=Number(0.1, 86400),
    default=1.0,
    show_default=True,
    help="Seconds that every view covers.",
)
@click.option("--once", is_flag=True, help="One view, then the end.")
@connection_options
def top(metrics: str, interval_s: float, once: bool, **flags: Any) -> None:
    """Stages as bars (busy, bubbles by cause, idle), requests, queue, KV use, latencies; Ctrl-C ends it.

    On a terminal a live screen, otherwise one line per interval. Exit code 1 when the server is gone, or its
    metrics page is not there at the start.
    """
    live = _is_terminal() and not once
    client = Client(**connection(flags), retry=RetryPolicy(max_attempts=1))
    gone: CallFailed | None = None
    with client:
        try:
            with _screen() if live else nullcontext():
                for view in _views(client, None if metrics == "none" else metrics, interval_s):
                    _show(view, flags["target"], live)
                    if once:
                        break
        except KeyboardInterrupt:
            pass
        except CallFailed as failure:
            gone = failure
    if gone is not None:
        click.echo(f"ppserve: error: no answer from {flags['target']}: {gone}", err=True)
        sys.exit(1)


def _views(client: Client, metrics: str | None, interval_s: float) -> Iterator[View]:
    """Endless views, one per interval; the time that a reading takes does not lengthen the intervals.

    Raises ScrapeFailed when there is no metrics page at the start. If it fails later, the views say so until it is
    back.
    """
    before = read(client, metrics)
    if before.problem:
        raise ScrapeFailed(f"no metrics: {before.problem}; see --metrics, where `none` does without them")
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + interval_s, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))
        after = read(client, metrics)
        yield View(before, after)
        before = after


def _show(view: View, target: str, live: bool) -> None:
    if not _is_terminal():
        say(view.render_line(time.strftime("%H:%M:%S")))
        return
    size = shutil.get_terminal_size()
    lines = view.render_screen(target, size.columns, "NO_COLOR" not in os.environ)
    if live:
        shown = "".join(f"{line}{_TO_LINE_END}\r\n" for line in lines[: size.lines - 1])
        say(_HOME + shown + _TO_SCREEN_END, end="")
    else:
        say("\n".join(lines))


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


@contextmanager
def _screen() -> Iterator[None]:
    """The terminal's alternate screen: afterwards the terminal shows what it showed before."""
    say(_ENTER, end="")
    try:
        yield
    finally:
        say(_LEAVE, end="")
