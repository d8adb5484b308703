"""The requests of a load: lengths of prompts and answers, tokens, and when they are due.

A request depends on the seed and its number alone, not on the order in which requests are sent. Prompts are
random tokens, so no two share a prefix that the server could have cached.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Question:
    """One request."""

    number: int
    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless requests for a model."""

    prompt: Lengths
    new: Lengths
    """Of answers; drawn independently of the prompts."""
    vocab_size: int
    seed: int = 0

    def question(self, number: int) -> Question:
        """The request of a number, always the same. Numbers below 0 are for the warm-up."""
        rng = random.Random(f"question {self.seed} {number}")
        num_prompt, num_new = self.prompt.draw(rng), self.new.draw(rng)
        return Question(number, tuple(rng.choices(range(self.vocab_size), k=num_prompt)), num_new)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds after the start, `rate` a second on average. Infinite: all at once."""
    rng = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        yield at_s
        if not math.isinf(rate):
            at_s += rng.expovariate(rate)
