"""`ppserve top`: where a running server's stages spend their time, and what they serve, in the terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from ppserve.bench.scrape import ScrapeFailed
from ppserve.bench.top import View, read
from ppserve.cli.connection import connection, connection_options
from ppserve.cli.output import say
from ppserve.cli.types import Number
from ppserve.client import CallFailed, Client, RetryPolicy
from ppserve.errors import PpserveError


@click.command()
@click.option(
    "--metrics", default="127.0.0.1:9400", show_default=True, metavar="HOST:PORT",
    help="The server's metrics page; `none`: only the stages.",
)  # fmt: skip
@click.option(
    "--interval", "interval_s", type=Number(0.1, 86400), default=1.0, show_default=True,
    help="Seconds that every view covers.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="One view, then the end.")
@connection_options
def top(metrics: str, interval_s: float, once: bool, **flags: Any) -> None:
    """Stages as bars (busy, bubbles by cause, idle), requests, queue, KV use, latencies; Ctrl-C ends it.

    On a terminal a live screen, otherwise one line per interval. Exit code 1 when the server is gone, or its
    metrics page is not there at the start.
    """
    live = _is_terminal() and not once
    client = Client(**connection(flags), retry=RetryPolicy(max_attempts=1))
    with client:
        try:
            for view in _views(client, None if metrics == "none" else metrics, interval_s):
                _show(view, flags["target"], live)
                if once:
                    break
        except KeyboardInterrupt:
            pass
        except CallFailed as failure:
            raise PpserveError(f"no answer from {flags['target']}: {failure}") from None


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
    lines = view.render_screen(target, size.columns)
    if live:
        click.clear()
        lines = lines[: size.lines - 1]
    say("\n".join(lines))


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()
