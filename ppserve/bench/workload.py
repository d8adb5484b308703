"""The requests of a load: lengths of prompts and answers, tokens, and when they are due.

A request depends on the seed and its number alone, not on the order in which requests are sent. Prompts are
random tokens, so no two share a prefix that the server could have cached.
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


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of numbers of tokens; both ends are included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`128` or `uniform:64:256`. Raises ValueError."""
        match = re.fullmatch(r"\s*(?:uniform:(\d{1,9}):)?(\d{1,9})\s*", text)
        most = int(match[2]) if match else 0
        least = int(match[1]) if match and match[1] else most
        if not 1 <= least <= most:
            raise ValueError(f"{text!r} is not a length such as 128 or uniform:64:256")
        return cls(least, most)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


Sizes = Callable[[int, random.Random], tuple[int, int]]
"""How long the prompt and the answer of the request of a number are, in tokens."""


def drawn_sizes(prompt: Lengths, new: Lengths) -> Sizes:
    """Both drawn independently."""
    return lambda number, rng: (prompt.draw(rng), new.draw(rng))


@dataclass(frozen=True, slots=True)
class Question:
    """One request."""

    number: int
    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless requests for a model."""

    sizes: Sizes
    vocab_size: int
    seed: int = 0

    def question(self, number: int) -> Question:
        """The request of a number, always the same. Numbers below 0 are for the warm-up."""
        rng = random.Random(f"question {self.seed} {number}")
        prompt_tokens, new_tokens = self.sizes(number, rng)
        return Question(number, tuple(rng.choices(range(self.vocab_size), k=prompt_tokens)), new_tokens)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds after the start, `rate` a second on average. Infinite: all at once."""
    rng = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        yield at_s
        if not math.isinf(rate):
            at_s += rng.expovariate(rate)


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


def clip(prompt_tokens: int, new_tokens: int, max_context: int) -> tuple[int, int]:
    """Lengths that fit the context together: the answer keeps up to half of it, the prompt what is left.

    The prompt is cut first because the number of generated tokens decides most of the load.
    """
    new = max(1, min(new_tokens, max_context // 2)) if prompt_tokens + new_tokens > max_context else new_tokens
    return max(1, min(prompt_tokens, max_context - new)), new
