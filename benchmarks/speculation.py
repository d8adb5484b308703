"""Guesses for few callers: tokens per second with `--speculate auto` beside `off`, in one process (`Pipeline`).

    python benchmarks/speculation.py [MODEL_DIR] [--stages 2] [--callers 1] [--rates 0.3,0.5,0.7,0.9]

First with a drafter that is right as often as it is told, beside what equal stages without overheads would gain by
depth alone, P / (P - (P - 1) a); width (several guesses in one step) may gain more. Then with the product's
drafter on texts of several kinds. Both settings take turns, on pipelines that are open at the same time; medians
of --repetitions. All answers must be equal. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence as Seq

from ppserve import Completion, Pipeline
from ppserve.core.request import Request
from ppserve.core.scheduling.drafter import Guess

TEXTS = {
    "story": "Once upon a time",
    "list": "one two three four five six seven eight nine ten " * 4,
    "refrain": "The miller went to the mill. The baker went to the mill. The tailor went to the mill. " * 2,
    "code-like": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
}


class Rated:
    """Knows the answer, and guesses right at a set rate."""

    def __init__(self, answer: Seq[int], first: int, rate: float) -> None:
        self._answer, self._first, self._rate = answer, first, rate
        self._chance = random.Random(1)
        self._guessed: dict[int, int] = {}

    def guess(self, token_ids: Seq[int], guesses: Seq[int]) -> Guess | None:
        place = len(token_ids) + len(guesses) - self._first
        if place >= len(self._answer):
            return None
        if place not in self._guessed:
            right = self._chance.random() < self._rate
            self._guessed[place] = self._answer[place] if right else 1 - min(1, self._answer[place])
        return Guess(self._guessed[place], self._rate)


def timed(pipeline: Pipeline, prompts: list[str], new_tokens: int) -> tuple[float, list[Completion]]:
    """Tokens per second, and the answers."""
    began = time.perf_counter()
    answers = pipeline.complete_all(prompts, max_tokens=new_tokens, temperature=0, ignore_eos=True, token_ids=True)
    return len(prompts) * new_tokens / (time.perf_counter() - began), answers


def compare(flags: argparse.Namespace, prompts: list[str], rate: float | None) -> tuple[float, float]:
    """Medians of tokens per second: (off, auto). rate: None for the product's drafter."""
    common = {"dtype": flags.dtype, "threads": 1}
    known: dict[tuple[int, ...], list[int]] = {}

    def rated(request: Request, _index: int) -> Rated:
        assert rate is not None
        return Rated(known[request.prompt_ids], len(request.prompt_ids), rate)

    own = {} if rate is None else {"new_drafter": rated}
    with (
        Pipeline(flags.model, flags.stages, speculate=0, **common) as off,
        Pipeline(flags.model, flags.stages, speculate=None, **own, **common) as auto,
    ):
        _, right = timed(off, prompts, flags.new)
        for prompt, completion in zip(prompts, right, strict=True):
            known[tuple(off._ids_of(prompt))] = [token.id for token in completion.sequences[0].tokens]
        speeds: dict[Pipeline, list[float]] = {off: [], auto: []}
        for repetition in range(flags.repetitions + 1):
            for pipeline in (off, auto):
                speed, answers = timed(pipeline, prompts, flags.new)
                if [a.text for a in answers] != [a.text for a in right]:
                    raise SystemExit("an answer differs")
                if repetition:
                    speeds[pipeline].append(speed)
    return statistics.median(speeds[off]), statistics.median(speeds[auto])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rates", default="0.0,0.3,0.5,0.7,0.9")
    parser.add_argument("--repetitions", type=int, default=5)
    flags = parser.parse_args()
    story = [f"{TEXTS['story']}, {number}" for number in range(flags.callers)]
    for rate in map(float, flags.rates.split(",")):
        off, auto = compare(flags, story, rate)
        ideal = flags.stages / (flags.stages - (flags.stages - 1) * rate)
        gain = f"x{auto / off:.2f}, depth alone x{ideal:.2f}"
        print(f"right {rate:.1f}: off {off:.1f} auto {auto:.1f} tokens/s, {gain}", flush=True)
    for kind, text in TEXTS.items():
        off, auto = compare(flags, [f"{text} {number}" for number in range(flags.callers)], None)
        print(f"{kind}: off {off:.1f} auto {auto:.1f} tokens/s, x{auto / off:.2f}", flush=True)


if __name__ == "__main__":
    main()
