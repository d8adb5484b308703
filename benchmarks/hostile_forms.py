"""Streams beside hostile forms: whether each form is refused, how late tokens get, and what memory stays.

    python benchmarks/hostile_forms.py [--rounds 5] [--seconds 8] [--flags '--stages 2'] [--tree CHECKOUT]

16 streams have answers of a form. In every second turn another process sends hostile forms over HTTP, one after
the other, in random order: schemas that lie deep within each other, have 100,000 alternatives, a product of
unions, a megabyte; expressions with many states; grammars that can be read in many ways. A gap is the time between
two messages of one stream, from 1 s after the turn's begin on. Memory is that of the head, and of all processes of
the server: before the first turn, after the last, and once small forms have replaced those that are kept.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import random
import shlex
import statistics
import time
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import psutil
from local_server import THIS_TREE, Address, cpu_name, running
from structured import SCHEMAS, FormCaller

from ppserve.client.messages import to_message
from ppserve.core.figures import percentile

CALLERS = 16
NEW_TOKENS = 400
MEBIBYTE = 1 << 20
WITHIN_S = 60.0
SETTLE_S = 1.0
NUM_KEPT = 64
"""The forms that a head keeps."""


def _nested(schema: Any, depth: int, keyword: str = "items") -> str:
    return f'{{"{keyword}":' * depth + json.dumps(schema) + "}" * depth


def _json_form(schema: str) -> str:
    return f'{{"json": {schema}}}'


FORMS = {
    "nested 64 deep, as the limit allows": _json_form(_nested({"type": "integer"}, 64)),
    "nested 5,000 deep": _json_form(_nested(True, 5_000)),
    "nested 90,000 deep": _json_form(_nested(True, 90_000)),
    "enum of 100,000": _json_form(json.dumps({"enum": [str(number) for number in range(100_000)]})),
    "enum of 10,000, as the limit allows": _json_form(json.dumps({"enum": [str(n) for n in range(10_000)]})),
    "anyOf of 50,000": _json_form(json.dumps({"anyOf": [{"const": number} for number in range(50_000)]})),
    "10,000 properties": _json_form(json.dumps({"properties": {f"p{n}": {"type": "null"} for n in range(9_990)}})),
    "product of unions": _json_form(
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(20)]} for i in range(9)]})
    ),
    "1 MiB of description": _json_form(json.dumps({"description": "x" * (MEBIBYTE - 200)})),
    "more than 1 MiB": _json_form(json.dumps({"description": "x" * MEBIBYTE})),
    "choice of 100,000": json.dumps({"choice": [str(number) for number in range(100_000)]}),
    "expression of 100,000 words": json.dumps({"regex": "|".join(map(str, range(100_000)))}),
    "expression of 30,000 words": json.dumps({"regex": "|".join(map(str, range(30_000)))}),
    "expression of 2^900 states": json.dumps({"regex": "[ab]*a[ab]{900}"}),
    "expression that repeats such": json.dumps({"regex": "([ab]*a[ab]{900}){500}"}),
    "expression of repeats in repeats": json.dumps({"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"}),
    "grammar of many readings": json.dumps({"grammar": 'start: start start start | start start | "a" | "b" |'}),
    "grammar of 200,000 bytes": json.dumps(
        {"grammar": "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(9_000)) + '\nr9000: "c"'}
    ),
}
"""`structured_outputs` as JSON text. Some are within the limits, and are served or fail by their own."""


@dataclass(slots=True)
class Told:
    """What the server said to one form, each time."""

    statuses: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)


def send_all(address: str, seconds: float, seed: int, answers: Any) -> None:
    """Send forms, in a process of its own. answers: a queue, which gets (name, status, seconds)."""
    until_s, chance = time.monotonic() + seconds, random.Random(seed)
    while time.monotonic() < until_s:
        name = chance.choice([*FORMS])
        answers.put((name, *_ask(address, FORMS[name])))
    answers.put(None)


def _ask(address: str, form: str) -> tuple[str, float]:
    """The status of the answer, with the first words of a refusal, and the seconds that it took."""
    body = f'{{"prompt": "Once", "max_tokens": 8, "temperature": 0, "structured_outputs": {form}}}'
    begun_s = time.monotonic()
    connection = http.client.HTTPConnection(address, timeout=WITHIN_S)
    try:
        connection.request("POST", "/v1/completions", body.encode(), {"content-type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
    except OSError as error:
        return type(error).__name__, time.monotonic() - begun_s
    finally:
        connection.close()
    said = found.get("error", {}).get("message", "")
    return f"{answer.status} {said[:160]}".strip(), time.monotonic() - begun_s


class Streams:
    """Answers of a form, one behind the other for each caller; and when their messages came."""

    def __init__(self, caller: FormCaller) -> None:
        self._caller = caller

    async def gaps(self, seconds: float, seed: int) -> list[float]:
        """Seconds between the messages of each stream, for a time."""
        settled_s = time.perf_counter() + SETTLE_S
        until_s = settled_s + seconds

        async def listen(number: int) -> list[float]:
            found: list[float] = []
            while time.perf_counter() < until_s:
                request = to_message("Once upon a time", {"max_tokens": NEW_TOKENS, "seed": seed + number})
                request.structured_output.kind = request.structured_output.JSON_SCHEMA
                request.structured_output.source = SCHEMAS[number % len(SCHEMAS)]
                times = []
                async with aclosing(self._caller.arrivals(request)) as arrivals:
                    async for at_s, _ in arrivals:
                        times.append(at_s)
                        if at_s > until_s:
                            break
                found += [after - before for before, after in pairwise(times) if before > settled_s]
            return found

        return [gap for gaps in await asyncio.gather(*map(listen, range(CALLERS))) for gap in gaps]


@dataclass(slots=True)
class Seen:
    calm: list[list[float]] = field(default_factory=list)
    """The gaps of each undisturbed turn, in seconds; and of each disturbed one."""
    disturbed: list[list[float]] = field(default_factory=list)
    told: dict[str, Told] = field(default_factory=lambda: defaultdict(Told))
    memory: list[tuple[float, float]] = field(default_factory=list)
    """MiB of the head and of all processes, each time."""


def head_of(address: Address) -> psutil.Process:
    """The process that listens."""
    port = int(address.grpc.rpartition(":")[2])
    found = (each for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port)
    return psutil.Process(next(each.pid for each in found if each.pid))


def memory_of(head: psutil.Process) -> tuple[float, float]:
    """MiB of a head; and of it with all processes that it has started."""
    own = head.memory_info().rss / MEBIBYTE
    return own, own + sum(child.memory_info().rss / MEBIBYTE for child in head.children(recursive=True))


async def measure(address: Address, rounds: int, seconds: float) -> Seen:
    seen, head = Seen(), head_of(address)
    context = multiprocessing.get_context("spawn")
    async with FormCaller(address.grpc) as caller:
        streams = Streams(caller)
        await streams.gaps(2.0, 0)
        _ask(address.http, '{"regex": "a"}')
        seen.memory.append(memory_of(head))
        for number in range(rounds):
            seen.calm.append(await streams.gaps(seconds, 100 * number))
            answers = context.Queue()
            process = context.Process(target=send_all, args=(address.http, seconds, number, answers))
            process.start()
            seen.disturbed.append(await streams.gaps(seconds, 100 * number))
            while (told := await asyncio.to_thread(answers.get)) is not None:
                name, status, took_s = told
                seen.told[name].statuses.add(status)
                seen.told[name].seconds.append(took_s)
            process.join()
            late_ms = 1e3 * (max(seen.disturbed[-1]) - max(seen.calm[-1]))
            print(f"round {number}: late by {late_ms:.1f} ms at most; load {os.getloadavg()[0]:.1f}", flush=True)
        seen.memory.append(memory_of(head))
        for count in range(NUM_KEPT):
            _ask(address.http, f'{{"regex": "a{{{count}}}"}}')
        seen.memory.append(memory_of(head))
    return seen


def table(seen: Seen) -> str:
    """Markdown: what each form was told; quantiles of gaps in ms; memory in MiB."""
    lines = ["| form | answer | seconds, median and most |", "|---|---|---|"]
    for name, told in seen.told.items():
        times = told.seconds
        lines.append(
            f"| {name} | {'; '.join(sorted(told.statuses))} | {statistics.median(times):.2f}, {max(times):.2f} |"
        )
    lines += ["", "| gaps, ms | p50 | p99 | p99.9 | longest of a turn, median | longest |", "|---" * 6 + "|"]
    for words, turns in (("undisturbed", seen.calm), ("disturbed", seen.disturbed)):
        every, longest = [gap for turn in turns for gap in turn], [max(turn) for turn in turns]
        figures = (
            *(percentile(every, percent) for percent in (50, 99, 99.9)),
            statistics.median(longest),
            max(longest),
        )
        lines.append(f"| {words} | " + " | ".join(f"{1e3 * figure:.1f}" for figure in figures) + " |")
    lines += ["", "| MiB of | before | after | with small forms kept |", "|---" * 4 + "|"]
    for words, *memory in zip(("the head", "all processes"), *seen.memory, strict=True):
        lines.append(f"| {words} | " + " | ".join(f"{each:.0f}" for each in memory) + " |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--rounds", default=5)
@click.option("--seconds", default=8.0, help="Of a turn.")
@click.option("--flags", default="--stages 2 --dtype float32 --force-cpu", help="Of the server.")
@click.option("--tree", default=THIS_TREE, type=click.Path(path_type=Path, exists=True, resolve_path=True))
def main(rounds: int, seconds: float, flags: str, tree: Path) -> None:
    print(cpu_name(), flush=True)
    with running(shlex.split(flags), tree) as address:
        seen = asyncio.run(measure(address, rounds, seconds))
    print("\n" + table(seen))


if __name__ == "__main__":
    main()
