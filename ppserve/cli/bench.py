"""`ppserve bench`: loads a server, and says what it did."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from ppserve.bench.caller import Caller
from ppserve.bench.measure import (
    ClosedLoop,
    Lengths,
    Load,
    Measurement,
    OpenLoop,
    Served,
    Until,
    Workload,
    introduce,
    measure,
    poisson_arrivals,
    warm_up,
)
from ppserve.bench.summary import Summary, render_table, summarize
from ppserve.cli.client import CONNECTION, connection
from ppserve.cli.main import say
from ppserve.cli.types import COUNT, POSITIVE, Parsed, Whole
from ppserve.core.figures import counted
from ppserve.errors import ConfigError

_LENGTHS = Parsed("n|uniform:n:n", Lengths.parse)
_DEFAULT_CONCURRENCY = 16
_DEFAULT_OPEN_REQUESTS = 100


@click.command(short_help="Load a server and say what it did.", params=[*CONNECTION])
@click.option("--concurrency", type=COUNT, help="Callers, each with one request at a time.  [default: 16]")
@click.option(
    "--rate", type=POSITIVE, help="Send so many requests a second at random times; inf sends all at once."
)
@click.option(
    "--prompt-tokens", type=_LENGTHS, default="128", help="Tokens of each prompt, as 128 or uniform:64:256."
)
@click.option("--new-tokens", type=_LENGTHS, default="64", help="Tokens of each answer, in the same form.")
@click.option(
    "--requests", type=COUNT, help="Requests to send.  [default: 4 per caller, at least 16; 100 with --rate;"
    " no limit with --duration]",
)  # fmt: skip
@click.option("--duration", type=POSITIVE, help="Seconds after which no more requests are sent.")
@click.option(
    "--warm-up",
    "num_warm_up",
    type=Whole(0),
    help="Requests to send before measuring.  [default: 1 per caller]",
)
@click.option("--timeout", "timeout_s", type=POSITIVE, help="Deadline of each request in seconds.")
@click.option(
    "--seed", type=Whole(0), default=lambda: secrets.randbelow(1 << 32), show_default="a new one",
    help="Equal seeds give equal prompts and arrivals. A server may still have their prompts in its prefix cache.",
)  # fmt: skip
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures to this file as JSON.",
)
def bench(**flags: Any) -> None:
    """Load a server with random prompts, and print throughput, latencies and where its stages' time went.

    Without --rate the load is a closed loop: each of --concurrency callers waits for its answer before it asks
    again. With --rate it is an open loop: requests are sent when they are due, and their latency counts from then.

    Ctrl-C ends the run early and reports what was answered until then.

    Exit codes: 0 all were answered, 1 some failed or there is no server, 2 wrong usage, 130 interrupted.
    """
    if flags["rate"] and flags["concurrency"]:
        raise click.UsageError("--rate sends requests when they are due: leave out --concurrency")
    json_path: Path | None = flags["json_path"]
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError("--json", f"there is no directory {json_path.parent}")
    measured = asyncio.run(_run(flags))
    summary = summarize(measured)
    if measured.was_interrupted:
        say("Interrupted: requests on their way were cancelled and not counted.")
    say(render_table(summary))
    if json_path is not None:
        _write(json_path, summary)
    if measured.was_interrupted:
        sys.exit(130)
    sys.exit(1 if summary.failed else 0)


def _write(path: Path, summary: Summary) -> None:
    try:
        path.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    except OSError as error:
        raise ConfigError("--json", f"cannot write {path}: {error.strerror}") from None


async def _run(flags: dict[str, Any]) -> Measurement:
    load: Load = ClosedLoop(flags["concurrency"] or _DEFAULT_CONCURRENCY)
    if rate := flags["rate"]:
        load = OpenLoop(poisson_arrivals(rate, flags["seed"]), rate)
    callers = load.concurrency if isinstance(load, ClosedLoop) else 1
    num_warm_up = callers if flags["num_warm_up"] is None else flags["num_warm_up"]
    async with Caller(**connection(flags), timeout_s=flags["timeout_s"]) as caller:
        served = await introduce(caller, flags["target"])
        workload = _workload(flags, served)
        report = _report if sys.stderr.isatty() else lambda line: None
        if num_warm_up:
            report(f"warming up with {counted(num_warm_up, 'request')}")
            await warm_up(caller, workload, num_warm_up, callers)
        return await measure(caller, served, workload, load, _until(flags, load), report)


def _report(line: str) -> None:
    click.echo(line, err=True)


def _until(flags: dict[str, Any], load: Load) -> Until:
    num_requests, duration_s = flags["requests"], flags["duration"]
    if num_requests is None and duration_s is None:
        num_requests = _DEFAULT_OPEN_REQUESTS if isinstance(load, OpenLoop) else max(16, 4 * load.concurrency)
    return Until(num_requests, duration_s or math.inf)


def _workload(flags: dict[str, Any], served: Served) -> Workload:
    """Return the requests to send. Raises ConfigError where prompt and answer would not fit the context."""
    prompt, new = flags["prompt_tokens"], flags["new_tokens"]
    if prompt.most + new.most > served.max_context:
        both = f"{prompt.most} prompt tokens and {new.most} new ones"
        raise ConfigError("--prompt-tokens", f"{both} are beyond the server's context of {served.max_context}")
    return Workload(prompt, new, served.vocab_size, flags["seed"])
