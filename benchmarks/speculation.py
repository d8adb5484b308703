"""Guesses for few callers: tokens per second with `--speculate auto` beside `off`, in turns, with equal answers.

    python benchmarks/speculation.py all          everything; ends with a verdict
    python benchmarks/speculation.py equal        1,000 mixed requests with guesses forced: answers alone, no times
    python benchmarks/speculation.py kills        stages killed in mid-guess: answers alone, no times
    python benchmarks/speculation.py rates        `Pipeline`, a drafter that is right as often as it is told
    python benchmarks/speculation.py texts        `Pipeline`, the product's drafter on texts of several kinds
    python benchmarks/speculation.py servers      the same over servers
    python benchmarks/speculation.py callers      2 to 64 callers over servers, sampled
    python benchmarks/speculation.py draft        over servers, the built-in model guesses for a deeper one
    python benchmarks/speculation.py newcomers    what others lose beside a stream whose guesses are all right

Ratios are medians of --repetitions, with the quartiles beside them; `off beside off` is the machine by itself; `at
best` compares the fastest turns. With the rates stands the gain by depth alone of equal stages without overheads,
P / (P - (P - 1) a), and the simulator's prediction from times of this run. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_server import running
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests and tools are no packages of the environment

from ppserve import AsyncClient, Client, Pipeline
from ppserve.core.request import Request
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.drafter import Drafter, Guess
from ppserve.model.checkpoint.opening import TINY
from ppserve.planning.simulator import Machine, SimulatedRequest, Simulator, Wires
from tests.e2e.serving import serving
from tests.e2e.test_losing_stages import draft_tokens
from tests.library.mixed import assert_same, guesses_of, mixed_requests, tiny, together
from tools.make_random_gpt2 import Shape, write_checkpoint

TEXTS = {
    "story": "Once upon a time",
    "list": "one two three four five six seven eight nine ten " * 4,
    "refrain": "The miller went to the mill. The baker went to the mill. The tailor went to the mill. " * 2,
    "code-like": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
}
RATES = (0.0, 0.3, 0.5, 0.7, 0.9)
LEAST_RATIO = 0.97
WAVE = 8

Prompts = Seq[str | Seq[int]]
Run = Callable[[Prompts, dict[str, object]], tuple[float, float, list[str]]]
"""Runs all prompts together: (tokens per second, seconds to the first token, texts)."""
Connect = Callable[[str], Run]


@dataclass(frozen=True, slots=True)
class Ratio:
    """auto / off: the median and the quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Seq[float]) -> Ratio:
        low, middle, high = statistics.quantiles(ratios, n=4)
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"x{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


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


class Bench:
    """ratios: of each kind of load, all of them. firsts: the time to the first token, auto / off, of all loads."""

    def __init__(self, flags: argparse.Namespace, folder: Path) -> None:
        self._flags = flags
        self._folder = folder
        self.ratios: defaultdict[str, list[float]] = defaultdict(list)
        self.firsts: list[float] = []

    def compare(self, kind: str, name: str, off: Run, auto: Run, prompts: Prompts, **options: object) -> None:
        """`auto` between two turns of `off`, so that a machine that grows slower favours neither; the two beside
        each other say how much the machine does by itself. Prints the ratios."""
        options = {"max_tokens": self._flags.new, "ignore_eos": True, **options}
        speeds, firsts, controls, best_plain, best_guessed = [], [], [], 0.0, 0.0
        for repetition in range(self._flags.repetitions + 1):
            before, before_first_s, right = off(prompts, options)
            guessed, guessed_first_s, texts = auto(prompts, options)
            after, after_first_s, _ = off(prompts, options)
            if texts != right:
                raise SystemExit(f"{name}: an answer differs")
            if repetition:
                speeds.append(guessed * (1 / before + 1 / after) / 2)
                firsts.append(2 * guessed_first_s / (before_first_s + after_first_s))
                controls.append(after / before)
                best_plain, best_guessed = max(best_plain, before, after), max(best_guessed, guessed)
        ratio = Ratio.of(speeds)
        self.ratios[kind] += speeds
        self.firsts += firsts
        best = f"at best x{best_guessed / best_plain:.2f} of {best_plain:.0f} tokens/s"
        beside = f"first token {Ratio.of(firsts)}; off beside off {Ratio.of(controls)}"
        print(f"{name}: {ratio}, {best}; {beside}", flush=True)

    def equal(self) -> None:
        """Every option, guesses forced into every step and gap, by every kind of drafter."""
        requests = [(prompt, options | {"token_ids": True}) for prompt, options in mixed_requests(1000)]
        with tiny(1, speculate=0) as plain:
            right = together(plain, requests)
        known = {
            (number, s.index): [token.id for token in s.tokens]
            for number, completion in enumerate(right)
            for s in completion.sequences
        }
        kinds: dict[str, dict[str, object]] = {"lookup": {}, "draft model": {"draft_model": "builtin"}}
        for rate in (0.0, 0.5, 1.0):

            def rated(request: Request, index: int, rate: float = rate) -> Drafter:
                return Rated(known[request.sampling.seed, index], len(request.prompt_ids), rate)

            kinds[f"right {rate}"] = {"new_drafter": rated}
        for stages in (1, 2, 4):
            for kind, settings in kinds.items():
                with tiny(stages, speculate=5, **settings) as pipeline:
                    for first in range(0, len(requests), WAVE):  # few at a time: many leave no room for guesses
                        answers = together(pipeline, requests[first : first + WAVE])
                        for guessed, answer in zip(answers, right[first:], strict=False):
                            assert_same(guessed, answer)
                    made = guesses_of(pipeline)
                print(f"{len(requests)} answers equal: {stages} stages, {kind}, {made}", flush=True)

    def kills(self) -> None:
        """A stage killed under each of many answers, with guesses forced. One caller at a time, because as many
        callers as stages leave no gap for a step on guesses."""
        with serving(2) as calm, serving(2, "--speculate", "4") as server:
            with Client(calm.grpc) as plain, Client(server.grpc) as guessed:
                for number in range(self._flags.kills):
                    options: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True, "seed": number}
                    right = plain.generate(TEXTS["story"], **options).text
                    text, kill_at = "", 20 + 53 * number % 400
                    for count, chunk in enumerate(guessed.stream(TEXTS["story"], **options), 1):
                        text += chunk.text
                        if count == kill_at:
                            os.kill(server.stage_pid(number % 2), signal.SIGKILL)
                    if text != right:
                        raise SystemExit("an answer differs after a loss")
                    if (epoch := guessed.topology().epoch) < number + 2:
                        raise SystemExit(f"answer {number} was done before its stage was killed: epoch {epoch}")
            made = draft_tokens(server)
        print(f"{self._flags.kills} stages killed in mid-guess: answers equal, {made}", flush=True)

    # ---- in one process -------------------------------------------------------------------------------

    def rates(self) -> None:
        for name, model, new in ("built-in", "tiny", 96), ("124M", str(self._big()), 48):
            if name not in self._flags.models.split(","):
                continue
            for rate in RATES:
                self._rate(name, model, rate, new)

    def _rate(self, name: str, model: str, rate: float, new: int) -> None:
        prompt = [7, 11, 13, 17, 19]
        known: list[int] = []

        def rated(request: Request, _index: int) -> Drafter:
            return Rated(known, len(request.prompt_ids), rate)

        stages = self._flags.stages
        with self._pipelines(model, new_drafter=rated) as (off, auto):
            right = off.complete(
                prompt, max_tokens=self._flags.new, temperature=0, ignore_eos=True, token_ids=True
            )
            known += [token.id for token in right.sequences[0].tokens]
            ideal = stages / (stages - (stages - 1) * rate)
            self.compare(
                f"right {rate:.1f}",
                f"{name}, right {rate:.1f}",
                in_process(off),
                in_process(auto),
                [prompt],
                temperature=0,
                max_tokens=new,
            )
            print(f"    depth alone x{ideal:.2f}, simulated x{simulated(auto, rate):.2f}", flush=True)

    def texts(self) -> None:
        with self._pipelines("tiny") as (off, auto):
            for kind, text in TEXTS.items():
                for temperature in (0, 1):
                    drawn = f"temperature {temperature}"
                    options = {"temperature": temperature, "seed": 1}
                    self.compare(drawn, f"{kind}, {drawn}", in_process(off), in_process(auto), [text], **options)

    @contextmanager
    def _pipelines(self, model: str, **settings: object) -> Iterator[tuple[Pipeline, Pipeline]]:
        with (
            Pipeline(model, self._flags.stages, dtype="float32", threads=1) as off,
            Pipeline(model, self._flags.stages, dtype="float32", threads=1, speculate=None, **settings) as auto,  # type: ignore[arg-type]
        ):
            yield off, auto

    # ---- servers --------------------------------------------------------------------------------------

    def servers(self) -> None:
        with self._servers("tiny", self._flags.stages) as (off, auto):
            for kind, text in TEXTS.items():
                for temperature in (0, 1):
                    drawn = f"temperature {temperature}"
                    options = {"temperature": temperature, "seed": 1}
                    self.compare(drawn, f"servers, {kind}, {drawn}", off, auto, [text], **options)

    def callers(self) -> None:
        for name, model, stages, counts in (
            ("built-in", "tiny", self._flags.stages, (2, 4, 16, 64)),
            ("deep", str(self._deep(0.02)), 4, (2, 4, 16)),
        ):
            with self._servers(model, stages) as (off, auto):
                for count in counts:
                    prompts = [f"{TEXTS['story']}, {number}" for number in range(count)]
                    load = f"servers, {name}, {stages} stages, {count} callers"
                    self.compare(f"{count} callers", load, off, auto, prompts, seed=1)

    def draft(self) -> None:
        for noise in (0.0, 0.01, 0.03):
            model = str(self._deep(noise))
            with self._servers(model, self._flags.stages, "--draft-model", "builtin") as (off, auto):
                for temperature in (0, 1):
                    name = f"servers, draft model, noise {noise}, temperature {temperature}"
                    self.compare("draft model", name, off, auto, [TEXTS["story"]], temperature=temperature, seed=1)

    def newcomers(self) -> None:
        prompts = [f"{text} {number}" for number in range(3) for text in TEXTS.values()]
        draft, model = ("--draft-model", "builtin"), str(self._deep(0.0))
        for stages in self._flags.stages, 4:
            with self._servers(model, stages, *draft, run=one_after_the_other) as both:
                load = f"servers, {stages} stages, newcomers beside a stream"
                self.compare("newcomers", load, *both, prompts, max_tokens=24, seed=1)

    @contextmanager
    def _servers(self, model: str, stages: int, *flags: str, run: Connect | None = None) -> Iterator[Seq[Run]]:
        run = run or over_grpc
        common = ["--model", model, "--stages", str(stages), "--threads", "1", "--dtype", "float32"]
        with ExitStack() as stack:
            off = stack.enter_context(running(common))
            auto = stack.enter_context(running([*common, "--speculate", "auto", *flags]))
            yield run(off.grpc), run(auto.grpc)

    # ---- models ---------------------------------------------------------------------------------------

    def _big(self) -> Path:
        folder = self._folder / "124M"
        if not folder.exists():
            write_checkpoint(folder, Shape())
        return folder

    def _deep(self, noise: float) -> Path:
        """The built-in model, with 40 random layers after its own. noise: deviation of what they add."""
        folder = self._folder / f"deep-{noise}"
        if not folder.exists():
            shape = Shape(num_layers=48, width=160, num_heads=5, vocab_size=1280)
            write_checkpoint(folder, shape, dtype="bfloat16")
            file = folder / "model.safetensors"
            tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
            added_std = 0.02 / (2 * shape.num_layers) ** 0.5
            for name, tensor in tensors.items():
                if name.endswith("c_proj.weight"):
                    tensors[name] = tensor * (noise / added_std)
            save_file(tensors | load_file(TINY / "model.safetensors"), file, metadata={"format": "pt"})
            shutil.copy(TINY / "tokenizer.tiktoken", folder)
        return folder


def in_process(pipeline: Pipeline) -> Run:
    def run(prompts: Prompts, options: dict[str, object]) -> tuple[float, float, list[str]]:
        began = time.perf_counter()
        first_s, texts, count = None, dict.fromkeys(map(str, range(len(prompts))), ""), 0
        for piece in pipeline.generate(list(prompts), token_ids=True, **options):  # type: ignore[arg-type]
            first_s = first_s or time.perf_counter() - began
            texts[piece.request_id] += "".join(f" {token.id}" for token in piece.tokens)
            count += len(piece.tokens)
        return count / (time.perf_counter() - began), first_s or 0.0, list(texts.values())

    return run


async def one(client: AsyncClient, prompt: object, options: dict[str, object]) -> tuple[float, str, int]:
    began, first_s, text, count = time.perf_counter(), 0.0, "", 0
    async for chunk in client.stream(prompt, token_ids=True, **options):  # type: ignore[arg-type]
        first_s = first_s or time.perf_counter() - began
        text += chunk.text
        count += len(chunk.tokens)
    return first_s, text, count


def over_grpc(target: str) -> Run:
    async def all_of(prompts: Prompts, options: dict[str, object]) -> tuple[float, float, list[str]]:
        async with AsyncClient(target) as client:
            await client.is_serving()
            began = time.perf_counter()
            answers = await asyncio.gather(*(one(client, prompt, options) for prompt in prompts))
            wall_s = time.perf_counter() - began
        first_s = statistics.median(answer[0] for answer in answers)
        return sum(answer[2] for answer in answers) / wall_s, first_s, [answer[1] for answer in answers]

    return lambda prompts, options: asyncio.run(all_of(prompts, options))


def one_after_the_other(target: str) -> Run:
    """The prompts come one at a time, while one long greedy answer is under way; only they are counted."""

    async def all_of(prompts: Prompts, options: dict[str, object]) -> tuple[float, float, list[str]]:
        async with AsyncClient(target) as client:
            greedy: dict[str, object] = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
            long = asyncio.create_task(one(client, TEXTS["story"], greedy))
            await asyncio.sleep(0.3)
            began = time.perf_counter()
            answers = [await one(client, prompt, options) for prompt in prompts]
            wall_s = time.perf_counter() - began
            if long.done():
                raise SystemExit("the long answer ended before the newcomers'")
            long.cancel()
        first_s = statistics.median(answer[0] for answer in answers)
        return sum(answer[2] for answer in answers) / wall_s, first_s, [answer[1] for answer in answers]

    return lambda prompts, options: asyncio.run(all_of(prompts, options))


def simulated(pipeline: Pipeline, rate: float) -> float:
    """What the simulator says, from this pipeline's measured costs of steps."""
    (reading,) = pipeline._engine.look()
    stages = tuple(card.cost for card in reading.stages)
    config = SchedulerConfig(len(stages))
    machine = Machine(stages, Wires(), 10_000)
    walls = []
    for acceptance in (0.0, rate):
        simulator = Simulator(machine, config, machine if acceptance else None, acceptance)
        walls.append(simulator.run([SimulatedRequest(0.0, 5, 600)]).wall_s)
    return walls[0] / walls[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("equal", "kills", "rates", "texts", "servers", "callers", "draft", "newcomers")
    parser.add_argument("parts", nargs="*", choices=(*parts, "all"), default="all")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--models", default="built-in,124M", help="Of `rates`.")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=9)
    flags = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # the model of 124M has no tokenizer
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(flags, Path(folder))
        for part in parts if "all" in flags.parts else flags.parts:
            getattr(bench, part)()
    for kind, ratios in bench.ratios.items():
        # One text's median differs by some 4% from run to run; that of all texts of a kind tells more.
        print(f"all of {kind}: {Ratio.of(ratios)}")
    if bench.ratios:
        lowest, first = min(map(statistics.median, bench.ratios.values())), statistics.median(bench.firsts)
        may = "may" if lowest >= LEAST_RATIO and first <= 1 / LEAST_RATIO else "may not"
        print(f"the first token, all loads: {Ratio.of(bench.firsts)}; at most {1 / LEAST_RATIO:.2f} wanted")
        print(f"lowest of the kinds: x{lowest:.2f}; at least {LEAST_RATIO} wanted: `auto` {may} be the default")


if __name__ == "__main__":
    main()
