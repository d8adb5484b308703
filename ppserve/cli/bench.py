"""`ppserve bench`: load a server, and report throughput, latencies and its stages' time."""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ppserve.bench.caller import Caller
from ppserve.bench.load import ClosedLoop, Load, OpenLoop, Until
from ppserve.bench.measure import Served, introduce, measure, warm_up
from ppserve.bench.progress import ProgressLine
from ppserve.bench.report import render_sweep, render_table, write_csv, write_json
from ppserve.bench.summary import Measurement, Summary, parse_objectives, summarize
from ppserve.bench.workload import (
    Lengths,
    TraceRow,
    Workload,
    drawn_sizes,
    parse_lengths,
    poisson_arrivals,
    read_trace,
    recorded_sizes,
)
from ppserve.cli.connection import connection, connection_options
from ppserve.cli.output import say
from ppserve.cli.types import COUNTS, Number, Parsed
from ppserve.errors import ConfigError

T = TypeVar("T")
_COUNT = click.IntRange(min=1)
_POSITIVE = Number(min=0, min_open=True)
_FACTOR = Number(1e-6, 1e6)
_OUT = click.Path(dir_okay=False, path_type=Path)
_IN = click.Path(exists=True, dir_okay=False, path_type=Path)
_SEEDS = 1 << 32
DEFAULT_CONCURRENCY = 16
DEFAULT_OPEN_REQUESTS = 100


_LENGTHS = Parsed("lengths", parse_lengths)


@click.command(short_help="Load a server and say what it did.")
@click.option(
    "--concurrency",
    type=_COUNT,
    help="Callers with one request each at a time. With --rate or --trace:"
    f" requests in flight at most.  [default: {DEFAULT_CONCURRENCY}; with those, no limit]",
)
@click.option("--sweep", type=COUNTS, help="One run for each of these concurrencies, such as 1,2,4,8.")
@click.option("--rate", type=_POSITIVE, help="Open loop: so many requests a second, at random; inf = all at once.")
@click.option(
    "--burstiness",
    type=_FACTOR,
    default=1.0,
    show_default=True,
    help="Of --rate: 1 = Poisson, below 1 in clumps, above 1 more even.",
)
@click.option(
    "--trace",
    type=_IN,
    help="Open loop: arrivals and lengths of a CSV with TIMESTAMP, ContextTokens,"
    " GeneratedTokens; with --rate only its lengths.",
)
@click.option("--time-scale", type=_FACTOR, default=1.0, show_default=True, help="2 = the trace twice as fast.")
@click.option(
    "--prompt-tokens",
    type=_LENGTHS,
    default="128",
    show_default=True,
    help="128, uniform:64:256 or lognormal:MEDIAN:SIGMA.",
)
@click.option("--new-tokens", type=_LENGTHS, default="64", show_default=True, help="Likewise, per answer.")
@click.option(
    "--shared-prefix", type=click.IntRange(0), default=0, help="Tokens before every prompt, all the same."
)
@click.option(
    "--num-prefixes", type=_COUNT, default=1, show_default=True, help="How many different such prefixes."
)
@click.option(
    "--requests",
    type=_COUNT,
    help="Requests to send.  [default: 4 per caller, at least 16; open loop: "
    f"{DEFAULT_OPEN_REQUESTS}; no limit with --duration]",
)
@click.option("--duration", type=_POSITIVE, help="Seconds after which no more are sent.")
@click.option(
    "--warm-up",
    "num_warm_up",
    type=click.IntRange(0),
    help="Requests before, not counted.  [default: one per caller]",
)
@click.option("--temperature", type=Number(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--timeout", "timeout_s", type=_POSITIVE, help="Deadline of each request in seconds.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=lambda: secrets.randbelow(_SEEDS),
    show_default="a new one",
    help="Same seed, same prompts and arrivals; and on the same server prompts that it knows.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="NAME:MS ...",
    help="Count requests that keep all limits, such as ttft:500 tpot:50 (or e2el), in milliseconds.",
)
@click.option("--metrics", metavar="HOST:PORT", help="Also report what the server's metrics page counted.")
@click.option("--json", "json_path", type=_OUT, help="Write the figures as JSON.")
@click.option("--details", is_flag=True, help="In the JSON, every request's latencies too.")
@click.option("--csv", "csv_path", type=_OUT, help="Write the figures as CSV, one row per run.")
@click.option("--plot", "plot_path", type=_OUT, help="Draw throughput and latency; needs matplotlib.")
@click.option(
    "--stage-trace", type=_IN, help="For --plot: a file of the server's --trace, drawn as stages over time."
)
@connection_options
@click.argument("more_goodput", nargs=-1, metavar="")
def bench(more_goodput: tuple[str, ...], **flags: Any) -> None:
    """Load a server with random prompts, and print throughput, latencies and where its stages' time went.

    Without --rate or --trace a closed loop: --concurrency callers, each waits for its answer before it asks
    again. With them an open loop: requests are sent when they are due, and their latency counts from then.

    Ctrl-C ends the run early and reports what was answered until then.

    Exit codes: 0 all answered, 1 some failed or no server, 2 wrong usage, 130 interrupted.
    """
    objectives = _objectives(flags["goodput"], more_goodput)
    _check(flags)
    if flags["plot_path"]:
        from ppserve.bench.plot import check_plot

        check_plot(flags["plot_path"])
    measured = asyncio.run(_run_all(flags))
    summaries = [summarize(one, objectives) for one in measured]
    try:
        say(render_sweep(summaries) if len(summaries) > 1 else render_table(summaries[0]))
    finally:
        _write(flags, summaries, measured)
    if measured[-1].was_interrupted:
        say("\nInterrupted: requests on their way were cancelled and not counted.")
        sys.exit(130)
    sys.exit(1 if any(one.failed for one in summaries) else 0)


def _objectives(first: Sequence[str], more: Sequence[str]) -> dict[str, float]:
    """`--goodput ttft:500 tpot:50`: what follows the first limit arrives as arguments of the command."""
    if more and not first:
        raise click.UsageError(f"unexpected argument {more[0]!r}")
    try:
        return parse_objectives([*first, *more])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--goodput") from None


def _check(flags: dict[str, Any]) -> None:
    """Raises UsageError for flags that do not go together, ConfigError for a directory that does not exist."""
    if flags["sweep"] and (flags["rate"] or flags["trace"] or flags["concurrency"]):
        raise click.UsageError("--sweep goes over closed loops: leave out --concurrency, --rate and --trace")
    if flags["stage_trace"] and not flags["plot_path"]:
        raise click.UsageError("--stage-trace needs --plot")
    if flags["details"] and not flags["json_path"]:
        raise click.UsageError("--details needs --json")
    for name in ("json_path", "csv_path", "plot_path"):
        path: Path | None = flags[name]
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name.removesuffix('_path')}", f"there is no directory {path.parent}")


async def _run_all(flags: dict[str, Any]) -> list[Measurement]:
    """One measurement, or one for each point of a sweep."""
    rows = _trace_rows(flags)
    asking = {name: flags[name] for name in ("temperature", "timeout_s")}
    async with Caller(**connection(flags), **asking) as caller:
        served = await introduce(caller, flags["target"], flags["metrics"])
        workload = _workload(flags, served, rows)
        measured = []
        for place, concurrency in enumerate(flags["sweep"] or [flags["concurrency"]]):
            # Other prompts for every point: the server's prefix cache has those of the points before.
            own = replace(workload, seed=workload.seed + place)
            measured.append(await _run(flags, caller, served, own, concurrency, rows))
            if measured[-1].was_interrupted:
                break
        return measured


def _trace_rows(flags: dict[str, Any]) -> tuple[TraceRow, ...]:
    if flags["trace"] is None:
        return ()
    wanted = flags["requests"] or (None if flags["duration"] else DEFAULT_OPEN_REQUESTS)
    return read_trace(flags["trace"], wanted, flags["time_scale"])


def _workload(flags: dict[str, Any], served: Served, rows: tuple[TraceRow, ...]) -> Workload:
    prompt: Lengths = flags["prompt_tokens"]
    sizes = recorded_sizes(rows) if rows else drawn_sizes(prompt, flags["new_tokens"])
    return Workload(
        sizes, served.vocab_size, served.max_context, flags["seed"], flags["shared_prefix"], flags["num_prefixes"]
    )


async def _run(
    flags: dict[str, Any],
    caller: Caller,
    served: Served,
    workload: Workload,
    concurrency: int | None,
    rows: tuple[TraceRow, ...],
) -> Measurement:
    load, rate = _load(flags, concurrency, rows)
    callers = load.concurrency if isinstance(load, ClosedLoop) else concurrency
    until = _until(flags, load, rows)
    num_warm_up = flags["num_warm_up"]
    if num_warm_up is None:
        num_warm_up = callers or 1
    if num_warm_up:
        await warm_up(caller, workload, num_warm_up, callers or 1)
    served = served.under(callers, rate, workload.seed)
    progress = ProgressLine(f"{callers} callers" if isinstance(load, ClosedLoop) else "open loop", until)
    try:
        return await measure(caller, served, workload, load, until, progress)
    finally:
        progress.close()


def _load(flags: dict[str, Any], concurrency: int | None, rows: tuple[TraceRow, ...]) -> tuple[Load, float]:
    """The load, and its requests per second (infinite for a closed loop)."""
    if flags["rate"]:
        arrivals_s = poisson_arrivals(flags["rate"], flags["seed"], flags["burstiness"])
        return OpenLoop(arrivals_s, concurrency), flags["rate"]
    if rows:
        span_s = rows[-1].at_s
        return OpenLoop([row.at_s for row in rows], concurrency), (len(rows) - 1) / span_s if span_s else math.inf
    return ClosedLoop(concurrency or DEFAULT_CONCURRENCY), math.inf


def _until(flags: dict[str, Any], load: Load, rows: tuple[TraceRow, ...]) -> Until:
    num_requests, duration_s = flags["requests"], flags["duration"]
    if num_requests is None and rows and not flags["rate"]:
        num_requests = len(rows)
    elif num_requests is None and duration_s is None:
        num_requests = DEFAULT_OPEN_REQUESTS if isinstance(load, OpenLoop) else max(16, 4 * load.concurrency)
    return Until(num_requests, duration_s)


def _write(flags: dict[str, Any], summaries: list[Summary], measured: list[Measurement]) -> None:
    """Raises ConfigError."""

    def plot(path: Path) -> None:
        from ppserve.bench.plot import draw

        draw(path, summaries, measured, flags["stage_trace"])

    details = [_details(one) for one in measured] if flags["details"] else None
    writers: dict[str, Callable[[Path], None]] = {
        "json": lambda path: write_json(path, summaries, details),
        "csv": lambda path: write_csv(path, summaries),
        "plot": plot,
    }
    for name, write in writers.items():
        path: Path | None = flags[f"{name}_path"]
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise ConfigError(f"--{name}", f"cannot write {path}: {error.strerror}") from None


def _details(measured: Measurement) -> dict[str, Any]:
    """One entry per request, in the order of their numbers; times in seconds."""
    answers = measured.answers
    return {
        "input_lens": [len(answer.question.prompt_ids) for answer in answers],
        "output_lens": [answer.num_tokens for answer in answers],
        "ttfts": [answer.ttft_s if answer.arrivals else None for answer in answers],
        "itls": [answer.itls_s for answer in answers],
        "errors": [answer.status if not answer.is_ok else "" for answer in answers],
    }
