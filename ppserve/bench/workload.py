"""The requests of a load: lengths of prompts and answers, tokens, and when they are due.

A request depends on the seed and its number alone, not on the order in which requests are sent. Prompts are
random tokens: no two share a prefix that the server could have cached, except that of `shared_prefix`.
"""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from ppserve.errors import ConfigError

Lengths = Callable[[random.Random], int]
"""Draws a number of tokens, at least 1."""


def parse_lengths(text: str) -> Lengths:
    """`128`, `uniform:64:256` (both included) or `lognormal:MEDIAN:SIGMA`. Raises ValueError.

    Log-normal: many short ones, few very long ones. SIGMA is the standard deviation of the logarithm.
    """
    match text.strip().split(":"):
        case [count] | ["fixed", count]:
            always = _count(count)
            return lambda rng: always
        case ["uniform", low, high]:
            least, most = _count(low), _count(high)
            if least > most:
                raise ValueError(f"{text!r}: {low} is above {high}")
            return lambda rng: rng.randint(least, most)
        case ["lognormal", median, sigma]:
            mean_log, spread = math.log(_positive(median, 1e9)), _positive(sigma, 10.0)
            return lambda rng: max(1, round(rng.lognormvariate(mean_log, spread)))
    raise ValueError(f"{text!r} is not a length such as 128, uniform:64:256 or lognormal:128:0.8")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is not a number of tokens")
    return int(text)


def _positive(text: str, most: float) -> float:
    value = float(text)
    if not 0 < value <= most:
        raise ValueError(f"{text!r} is not a number above 0, up to {most:g}")
    return value


# ---- recorded traffic ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. at_s: seconds after the first."""

    at_s: float
    prompt_tokens: int
    new_tokens: int


def read_trace(path: Path, num_requests: int | None = None, time_scale: float = 1.0) -> tuple[TraceRow, ...]:
    """The first requests of a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, by their times.

    time_scale: 2.0 = twice as fast as recorded. Raises ConfigError naming the line and the column.
    """
    rows: list[tuple[datetime, int, int]] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if missing := {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(table.fieldnames or ()):
                raise ConfigError("--trace", f"{path} has no column {min(missing)}")
            for number, row in enumerate(table, start=2):
                if len(rows) == num_requests:
                    break
                try:
                    at = _time(row)
                    if rows and (at.tzinfo is None) != (rows[0][0].tzinfo is None):
                        raise ValueError("TIMESTAMP: some have a time zone, and others have none")
                    rows.append((at, _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens")))
                except ValueError as error:
                    raise ConfigError("--trace", f"{path}:{number}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("--trace", f"cannot read {path}: {error}") from None
    if not rows:
        raise ConfigError("--trace", f"{path} holds no requests")
    rows.sort(key=itemgetter(0))
    first = rows[0][0]
    return tuple(TraceRow((at - first).total_seconds() / time_scale, prompt, new) for at, prompt, new in rows)


def _time(row: dict[str, str]) -> datetime:
    said = row["TIMESTAMP"]
    try:
        return datetime.fromisoformat(said)
    except (TypeError, ValueError):
        raise ValueError(f"TIMESTAMP: {said!r} is not a time such as 2023-11-16 18:15:46") from None


def _tokens(row: dict[str, str], column: str) -> int:
    """At least one: some traces have answers without tokens."""
    said = row[column]
    if said is None or not re.fullmatch(r"\s*\d{1,9}\s*", said):
        raise ValueError(f"{column}: {said!r} is not a number of tokens")
    return max(1, int(said))


def poisson_arrivals(rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Endless arrival times, in seconds after the start; `rate` a second on average.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, below 1 requests come in
    bursts, above 1 more evenly. With an infinite rate all arrive at once.
    """
    rng = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        yield at_s
        if not math.isinf(rate):
            at_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))


# ---- questions ---------------------------------------------------------------------------------------------


Sizes = Callable[[int, random.Random], tuple[int, int]]
"""How long the prompt and the answer of the request of a number are, in tokens."""


def drawn_sizes(prompt: Lengths, new: Lengths) -> Sizes:
    """Both drawn independently."""
    return lambda number, rng: (prompt(rng), new(rng))


def recorded_sizes(rows: tuple[TraceRow, ...]) -> Sizes:
    """Those of recorded traffic, in its order, repeated without end."""
    sizes = [(row.prompt_tokens, row.new_tokens) for row in rows]
    return lambda number, rng: sizes[number % len(sizes)]


@dataclass(frozen=True, slots=True)
class Question:
    """One request. was_clipped: it was longer than the context."""

    number: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    was_clipped: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless requests that fit a model.

    shared_prefix: how many tokens precede every prompt: the same ones, or one of `num_prefixes` such prefixes.
    """

    sizes: Sizes
    vocab_size: int
    max_context: int
    seed: int = 0
    shared_prefix: int = 0
    num_prefixes: int = 1

    def question(self, number: int) -> Question:
        """The request of a number, always the same. Numbers below 0 are for the warm-up."""
        rng = random.Random(f"question {self.seed} {number}")
        own, new = self.sizes(number, rng)
        prompt_tokens, new_tokens = clip(self.shared_prefix + own, new, self.max_context)
        prefix = self._prefix(rng.randrange(self.num_prefixes))[:prompt_tokens]
        prompt_ids = (*prefix, *rng.choices(range(self.vocab_size), k=prompt_tokens - len(prefix)))
        was_clipped = (prompt_tokens, new_tokens) != (self.shared_prefix + own, new)
        return Question(number, prompt_ids, new_tokens, was_clipped)

    def _prefix(self, which: int) -> list[int]:
        rng = random.Random(f"prefix {self.seed} {which}")
        return rng.choices(range(self.vocab_size), k=min(self.shared_prefix, self.max_context))


def clip(prompt_tokens: int, new_tokens: int, max_context: int) -> tuple[int, int]:
    """Lengths that fit the context together: the answer keeps up to half of it, the prompt what is left.

    The prompt is cut first because the number of generated tokens decides most of the load.
    """
    new = max(1, min(new_tokens, max_context // 2)) if prompt_tokens + new_tokens > max_context else new_tokens
    return max(1, min(prompt_tokens, max_context - new)), new
