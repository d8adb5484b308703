"""Output tokens per second where all answers have a form, beside none, by turns; and the time of masks.

    python benchmarks/structured.py [--cells 'smollm2:bfloat16:2:64'] [--rounds 3] [--seconds 10] [--tree CHECKOUT]

Random prompts of 64 tokens, at temperature 1, over gRPC, with the load generator on the same machine. Every
answer has 128 tokens: the forms are JSON schemas of longer lists (of objects, numbers, enums and texts) in
turn. A cell is a model, a dtype, a number of stages and of callers. A ratio is of two turns of one round on one
server, whose order changes; the table has medians. Tokens count from 2 s after a turn's begin until its end.
The time of a mask is what ppserve_mask_seconds tells, at its 99th percentile.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shlex
import statistics
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import count, groupby, product
from pathlib import Path
from typing import Any

import click
from local_server import THIS_TREE, Address, cpu_name, running
from prometheus_client.parser import text_string_to_metric_families
from throughput import DTYPES, STAGES

from ppserve.bench.caller import Caller
from ppserve.bench.measure import introduce
from ppserve.client.messages import to_message
from ppserve.v1 import generation_pb2 as pb

MODELS = ("tiny", "smollm2")
CALLERS = (16, 64)
PROMPT_TOKENS, NEW_TOKENS = 64, 128
SETTLE_S = 2.0
_TEXT = {"type": "string", "minLength": 3, "maxLength": 30}
_ROWS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"name": _TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "city": _TEXT},
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "weight": {"type": "number"},
            "tags": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3},
        },
        "required": ["colour", "weight", "tags"],
        "additionalProperties": False,
    },
    {"anyOf": [_TEXT, {"type": "integer"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}]},
    {"type": "string", "pattern": "^[A-Z][a-z]+ [0-9]{4}-[0-9]{2}-[0-9]{2}$"},
)
SCHEMAS = tuple(json.dumps({"type": "array", "items": rows, "minItems": 100}) for rows in _ROWS)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    model: str
    dtype: str
    stages: int
    callers: int

    def __str__(self) -> str:
        return f"{self.model}:{self.dtype}:{self.stages}:{self.callers}"

    def server_flags(self) -> list[str]:
        return ["--model", self.model, *shlex.split(f"{DTYPES[self.dtype]} {STAGES[self.stages]} --force-cpu")]


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second without forms and with them; seconds of a mask."""

    cell: Cell
    free: float
    formed: float
    mask_mean_s: float
    mask_p99_s: float

    @property
    def ratio(self) -> float:
        return self.formed / self.free


class FormCaller(Caller):
    """A caller of any request."""

    async def arrivals(self, request: pb.GenerateRequest) -> AsyncGenerator[tuple[float, int], None]:
        """Yield when messages arrive, and how many tokens they have. Cancels the request if it is closed early."""
        call = self._stub.Generate(request)
        try:
            async for message in call:
                yield time.perf_counter(), message.num_tokens
        finally:
            call.cancel()


class Turn:
    """A closed loop of callers for a time."""

    def __init__(self, caller: FormCaller, vocab_size: int, seed: int, has_form: bool) -> None:
        self._caller = caller
        self._vocab_size = vocab_size
        self._seed = seed
        self._has_form = has_form
        self._arrivals: list[tuple[float, int]] = []

    async def tokens_per_s(self, callers: int, seconds: float) -> float:
        begin_s, numbers = time.perf_counter() + SETTLE_S, count()
        end_s = begin_s + seconds

        async def ask_in_turn() -> None:
            while time.perf_counter() < end_s:
                await self._ask(next(numbers), end_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(ask_in_turn())
        return sum(tokens for at_s, tokens in self._arrivals if begin_s <= at_s < end_s) / seconds

    async def _ask(self, number: int, end_s: float) -> None:
        rng = random.Random(f"{self._seed} {number}")
        prompt = rng.choices(range(256, self._vocab_size), k=PROMPT_TOKENS)
        request = to_message(prompt, {"max_tokens": NEW_TOKENS, "seed": number})
        if self._has_form:
            request.structured_output.kind = request.structured_output.JSON_SCHEMA
            request.structured_output.source = SCHEMAS[number % len(SCHEMAS)]
        else:
            request.stop.ignore_eos = True
        async with aclosing(self._caller.arrivals(request)) as arrivals:
            async for at_s, num_tokens in arrivals:
                self._arrivals.append((at_s, num_tokens))
                if at_s > end_s:
                    return


def mask_times(address: Address) -> dict[float, float]:
    """How many masks took at most so many seconds; at -1 the sum of their seconds."""
    with urllib.request.urlopen(f"http://{address.metrics}/metrics") as page:
        text = page.read().decode()
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == "ppserve_mask_seconds" else ():
            if sample.name.endswith("_bucket"):
                found[float(sample.labels["le"])] = sample.value
            elif sample.name.endswith("_sum"):
                found[-1.0] = sample.value
    return found


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The upper bound of the bucket in which this share of the masks ends."""
    total = after[math.inf] - before[math.inf]
    edges = (edge for edge in sorted(after) if edge >= 0 and after[edge] - before[edge] >= share * total)
    return next(edges) if total else math.nan


async def measure(address: Address, cells: Sequence[Cell], number: int, seconds: float) -> list[Round]:
    rounds = []
    async with FormCaller(address.grpc) as caller:
        vocab_size = (await introduce(caller, address.grpc)).vocab_size
        for has_form in (True, False):  # a first one compiles forms
            await Turn(caller, vocab_size, -1, has_form).tokens_per_s(8, 1.0)
        for place, cell in enumerate(cells):
            rates, before = {}, mask_times(address)
            for has_form in (False, True) if (number + place) % 2 == 0 else (True, False):
                # Prompts of its own: those of the turn before are in the prefix cache.
                turn = Turn(caller, vocab_size, 200 * number + 2 * place + has_form, has_form)
                rates[has_form] = await turn.tokens_per_s(cell.callers, seconds)
                await asyncio.sleep(0.5)
            after = mask_times(address)
            num_masks = after[math.inf] - before[math.inf]
            mean_s = (after[-1.0] - before[-1.0]) / num_masks if num_masks else math.nan
            rounds.append(Round(cell, rates[False], rates[True], mean_s, quantile(before, after, 0.99)))
    return rounds


def run(cells: Sequence[Cell], tree: Path, num_rounds: int, seconds: float) -> Iterator[Round]:
    for number in range(num_rounds):
        for _, group in groupby(cells, lambda cell: (cell.model, cell.dtype, cell.stages)):
            of_server = list(group)
            with running(of_server[0].server_flags(), tree) as address:
                yield from asyncio.run(measure(address, of_server, number, seconds))


def table(rounds: Sequence[Round]) -> str:
    """Markdown: a row for each cell, medians of its rounds."""
    lines = [
        "| model:dtype:stages:callers | none | all | all/none (least to most) | mask, mean | p99 |",
        "|---" * 6 + "|",
    ]
    for cell in dict.fromkeys(each.cell for each in rounds):
        of_cell = [each for each in rounds if each.cell == cell]
        free, formed = (
            statistics.median(values) for values in zip(*((r.free, r.formed) for r in of_cell), strict=True)
        )
        ratios = [each.ratio for each in of_cell]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        mean_us, p99_us = (
            1e6 * statistics.median(times)
            for times in zip(*((r.mask_mean_s, r.mask_p99_s) for r in of_cell), strict=True)
        )
        lines.append(f"| {cell} | {free:.0f} | {formed:.0f} | {spread} | {mean_us:.0f} us | {p99_us:.0f} us |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--cells", default="tiny:float32:*,smollm2:bfloat16:*", help="Patterns of cells, with commas.")
@click.option("--rounds", default=3)
@click.option("--seconds", default=10.0, help="Of a turn.")
@click.option("--tree", default=THIS_TREE, type=click.Path(path_type=Path, exists=True, resolve_path=True))
def main(cells: str, rounds: int, seconds: float, tree: Path) -> None:
    every = [Cell(*parts) for parts in product(MODELS, DTYPES, STAGES, CALLERS)]
    chosen = [cell for cell in every if any(fnmatch(str(cell), pattern) for pattern in cells.split(","))]
    print(cpu_name(), flush=True)
    measured = []
    for each in run(chosen, tree, rounds, seconds):
        load = os.getloadavg()[0]
        print(f"{each.cell!s:28} {each.free:8.1f} {each.formed:8.1f} {each.ratio:.3f} load {load:.1f}", flush=True)
        measured.append(each)
    print("\n" + table(measured))


if __name__ == "__main__":
    main()
