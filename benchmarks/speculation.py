"""Draft tokens for few callers: tokens per second with `--speculate auto` beside `off`, in turns, with equal
answers.

    python benchmarks/speculation.py all          everything; ends with a verdict
    python benchmarks/speculation.py equal        1,000 mixed requests with draft tokens forced: answers alone, no
    times python benchmarks/speculation.py kills        stages killed in mid-draft token: answers alone, no times
    python benchmarks/speculation.py rates        `Pipeline`, a drafter that is right as often as it is told
    python benchmarks/speculation.py texts        `Pipeline`, the product's drafter on texts of several kinds
    python benchmarks/speculation.py servers      the same over servers
    python benchmarks/speculation.py callers      2 to 64 callers over servers, sampled
    python benchmarks/speculation.py draft        over servers, the built-in model draft tokens for a deeper one
    python benchmarks/speculation.py new clients    what others lose beside a stream whose draft tokens are all
    right

Ratios are medians of turns, with their standard error and the quartiles; `off beside off` is the machine by
itself. There are turns for --seconds for each load, at least 4, and for less where the error is below 1% sooner.
The ways of guessing were tried for --warm tokens before. In one process, the same pipeline runs with and without
draft tokens. With the rates stands the gain by depth alone of equal stages without overheads, P / (P - (P - 1)
a), and what the simulator says of the same load with the times of this run (`speculation_simulated.py`). Run it
on an otherwise idle machine.

Verdicts: every load at least 0.97 times as fast, at least 85% of the gain by depth alone, the simulator within
10%, the first tokens of those who come beside a stream, and no draft tokens for 16 callers and more. How a
measurement's error counts is told in `verdicts.py`. Exit code 1 if any fails, 2 if some are unclear. A drafter
that is `told` another probability than its rate overestimates itself.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from local_server import Address, running
from safetensors.torch import load_file, save_file
from speculation_runs import (
    LONG,
    BesideAStream,
    DeepSteps,
    Prompts,
    Rated,
    Run,
    in_process,
    over_grpc,
)
from speculation_simulated import Times, simulated
from verdicts import LEAST_RATIO, Ratio, Verdicts

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests and tools are no packages of the environment

from ppserve import Client, Pipeline
from ppserve.core.request import Request
from ppserve.core.scheduling.drafter import Drafter
from ppserve.model.checkpoint.opening import TINY
from tests.e2e.serving import serving
from tests.e2e.test_losing_stages import draft_tokens
from tests.library.mixed import assert_same, guesses_of, mixed_requests, tiny, together
from tools.make_random_gpt2 import Shape, write_checkpoint

TEXTS = {
    "story": LONG,
    "list": "one two three four five six seven eight nine ten " * 4,
    "refrain": "The miller went to the mill. The baker went to the mill. The tailor went to the mill. " * 2,
    "code-like": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
}
# How often draft tokens are right, and how often the drafter says so.
RATES = ((0.0, 0.5), (0.3, 0.3), (0.3, 0.9), (0.5, 0.5), (0.7, 0.7), (0.9, 0.9))
LEAST_SHARE_OF_DEPTH, MOST_OFF_SIMULATED = 0.85, 0.10
# For so many callers nothing is drafted, whatever the times are: this counts, and needs no idle machine.
MANY, MOST_GUESSES = 16, 0.01
LEAST_TURNS, ERROR_ENOUGH = 4, 0.01
# What a server loads and forks with its first requests would count against one of two that are compared.
SETTLING_REQUESTS, SETTLING_S = 3, 10.0
# Of `new clients`: how many come at once, and how many seconds lie between them, from and to.
NEWCOMERS = {
    "one after the other": (1, (0.0, 0.0)),
    "75 to 225 ms apart": (1, (0.075, 0.225)),
    "four at once, 75 to 225 ms apart": (4, (0.075, 0.225)),
    "2.1 to 2.5 s apart": (1, (2.1, 2.5)),
}
# Of `equal`: the share of requests that come so few at a time that stages would stand idle; how many of the others
# come at a time.
SHARE_OF_FEW, WAVE = 0.3, 8


class Bench:
    """ratios: of each kind of load, all of them. firsts: the time to the first token, auto / off, of all loads."""

    def __init__(self, flags: argparse.Namespace, folder: Path) -> None:
        self._flags = flags
        self._folder = folder
        self._guessing: Address | None = None  # the server of the two that draft tokens
        self._targets: Seq[str] = ()  # of both
        self.ratios: defaultdict[str, list[float]] = defaultdict(list)
        self.firsts: list[float] = []
        self.verdicts = Verdicts()

    def compare(self, kind: str, name: str, off: Run, auto: Run, prompts: Prompts, **options: Any) -> Ratio:
        """`auto` and `off` by turns, each `auto` beside the `off` before and after it: a machine that grows slower
        favours neither; these two say how much the machine does by itself. No server has two turns in a row:
        after one of the other, first tokens were 1.04 to 1.15 times as late. Prints the ratios."""
        options = {"max_tokens": self._flags.new, "ignore_eos": True, **options}
        speeds, controls, firsts, first_controls = [], [], [], []
        _, _, right = off(prompts, options)
        until_s = time.monotonic() + self._flags.seconds
        for _ in range(-(-self._flags.warm // (len(prompts) * int(options["max_tokens"])))):
            if time.monotonic() < until_s:
                auto(prompts, options)
        before, before_first_s, _ = off(prompts, options)
        until_s = time.monotonic() + self._flags.seconds
        while True:
            drafted, guessed_first_s, texts = auto(prompts, options)
            after, after_first_s, _ = off(prompts, options)
            if texts != right:
                raise SystemExit(f"{name}: an answer differs")
            speeds.append(drafted * (1 / before + 1 / after) / 2)
            firsts.append(2 * guessed_first_s / (before_first_s + after_first_s))
            controls.append(after / before)
            first_controls.append(after_first_s / before_first_s)
            before, before_first_s = after, after_first_s
            if len(speeds) < LEAST_TURNS:
                continue
            ratio, beside = Ratio.of(speeds), Ratio.of(controls)
            if time.monotonic() > until_s or max(ratio.error, beside.error) < ERROR_ENOUGH:
                break
        self.ratios[kind] += speeds
        self.firsts += firsts
        first, first_beside = Ratio.of(firsts), Ratio.of(first_controls)
        told = f"first token {first}, off beside off {first_beside}"
        print(f"{name}: {ratio} of {before:.0f} tokens/s, off beside off {beside}; {told}", flush=True)
        self.verdicts.at_least(ratio.middle, max(ratio.error, beside.error), LEAST_RATIO, name)
        if kind == "newcomers":
            error = max(first.error, first_beside.error)
            self.verdicts.at_most(first.middle, error, 1 / LEAST_RATIO, f"{name}, first token")
        return ratio

    def equal(self) -> None:
        """Every option, draft tokens forced into every step and gap, by every kind of drafter."""
        requests = mixed_requests(self._flags.requests)
        requests = [(prompt, options | {"token_ids": True}) for prompt, options in requests]
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
                seed = request.sampling.seed
                return Rated(known[seed, index], len(request.prompt_ids), rate, seed)

            kinds[f"right {rate}"] = {"new_drafter": rated}
        for stages in (1, 2, 4):
            for kind, settings in kinds.items():
                with tiny(stages, speculate=5, **settings) as pipeline:
                    deep, first = DeepSteps(pipeline), 0
                    while first < len(requests):
                        # As many callers as stages leave no gap for a step on draft tokens alone.
                        wave = max(1, stages - 1) if first < SHARE_OF_FEW * len(requests) else WAVE
                        answers = together(pipeline, requests[first : first + wave])
                        for drafted, answer in zip(answers, right[first:], strict=False):
                            assert_same(drafted, answer)
                        first += wave
                    made = guesses_of(pipeline)
                told = f"{len(requests)} answers equal: {stages} stages, {kind}, {made}, {deep.count} deep steps"
                print(told, flush=True)
                if (deep.count > 0) != (stages > 1):
                    raise SystemExit(f"{deep.count} deep steps on {stages} stages: nothing is shown of them")

    def kills(self) -> None:
        """A stage killed under each of many answers, with draft tokens forced. One caller at a time, because as
        many callers as stages leave no gap for a step on draft tokens."""
        with serving(2) as calm, serving(2, "--speculate", "4") as server:
            with Client(calm.grpc) as plain, Client(server.grpc) as drafted:
                for number in range(self._flags.kills):
                    options: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True, "seed": number}
                    right = plain.generate(TEXTS["story"], **options).text
                    text, kill_at = "", 20 + 53 * number % 400
                    for count, chunk in enumerate(drafted.stream(TEXTS["story"], **options), 1):
                        text += chunk.text
                        if count == kill_at:
                            os.kill(server.stage_pid(number % 2), signal.SIGKILL)
                    if text != right:
                        raise SystemExit("an answer differs after a loss")
                    if (epoch := drafted.topology().epoch) < number + 2:
                        raise SystemExit(f"answer {number} was done before its stage was killed: epoch {epoch}")
            made = draft_tokens(server)
        print(f"{self._flags.kills} stages killed in mid-draft token: answers equal, {made}", flush=True)

    # ---- in one process -------------------------------------------------------------------------------

    def rates(self) -> None:
        for name, model, new in ("built-in", "tiny", 96), ("124M", str(self._big()), 48):
            if name not in self._flags.models.split(","):
                continue
            for rate, told in RATES:
                load = f"right {rate:.1f}" + (f", told {told:.1f}" if told != rate else "")
                if self._flags.only in load:
                    self._rate(f"{name}, {load}", model, rate, told, new)

    def _rate(self, load: str, model: str, rate: float, told: float, new: int) -> None:
        prompt = [7, 11, 13, 17, 19]
        known: list[int] = []
        # Of answers with draft tokens. Seeds are fewer: where no draft token is asked for, no drafter is made.
        runs, seeds = itertools.count(), itertools.count()

        def rated(request: Request, _index: int) -> Drafter:
            return Rated(known, len(request.prompt_ids), rate, next(seeds), told)

        def guessing(prompts: Prompts, options: dict[str, object]) -> tuple[float, float, list[str]]:
            next(runs)
            return auto(prompts, options)

        stages = self._flags.stages
        with self._pipeline(model, new_drafter=rated) as (off, auto, *times):
            options = {"temperature": 0, "max_tokens": self._flags.new, "ignore_eos": True}
            known += map(int, off([prompt], options)[2][0].split())
            ratio = self.compare(load, load, off, guessing, [prompt], **options | {"max_tokens": new})
            if told != rate:
                return
            predicted = simulated(*times, rate, len(prompt), new, next(runs) - ratio.count, ratio.count)
        ideal, error = stages / (stages - (stages - 1) * rate), ratio.error
        if rate:
            wanted = 1 + LEAST_SHARE_OF_DEPTH * (ideal - 1)
            claim = f"{load}, {LEAST_SHARE_OF_DEPTH:.0%} of the gain by depth alone, x{ideal:.2f}"
            self.verdicts.at_least(ratio.middle, error, wanted, claim)
        off_by = abs(predicted.middle / ratio.middle - 1)
        claim = f"{load}, simulated {predicted}, off by"
        error = math.hypot(error / ratio.middle, predicted.error / predicted.middle)
        self.verdicts.at_most(off_by, error, MOST_OFF_SIMULATED, claim, other=0.0)

    def texts(self) -> None:
        with self._pipeline("tiny") as (off, auto, *_):
            for kind, text in TEXTS.items():
                for temperature in (0, 1):
                    drawn = f"temperature {temperature}"
                    self.compare(drawn, f"{kind}, {drawn}", off, auto, [text], temperature=temperature, seed=1)

    @contextmanager
    def _pipeline(self, model: str, **settings: object) -> Iterator[tuple[Run, Run, Times, Times]]:
        """One pipeline without draft tokens and with them, and its times."""
        with Pipeline(
            model, self._flags.stages, dtype="float32", threads=1, speculate=None, **settings,  # type: ignore[arg-type]
        ) as pipeline:  # fmt: skip
            off, auto = Times(pipeline), Times(pipeline)
            yield in_process(pipeline, off, 0), in_process(pipeline, auto, None), off, auto

    # ---- servers --------------------------------------------------------------------------------------

    def servers(self) -> None:
        with self._servers("tiny", self._flags.stages) as (off, auto):
            for kind, text in TEXTS.items():
                for temperature in (0, 1):
                    drawn = f"temperature {temperature}"
                    options = {"temperature": temperature, "seed": 1}
                    if self._flags.only in (load := f"servers, {kind}, {drawn}"):
                        self.compare(drawn, load, off, auto, [text], **options)

    def callers(self) -> None:
        for name, model, stages, counts in (
            ("built-in", "tiny", self._flags.stages, (2, 4, 16, 64)),
            ("deep", str(self._deep(0.02)), 4, (2, 4, 16)),
        ):
            with self._servers(model, stages) as (off, auto):
                for count in counts:
                    prompts = [f"{TEXTS['story']}, {number}" for number in range(count)]
                    for temperature in (0, 1):
                        kind = f"{count} callers, temperature {temperature}"
                        load = f"servers, {name}, {stages} stages, {kind}"
                        # Many have enough tokens all together.
                        new = self._flags.new if count <= 4 else self._flags.new // 2
                        options = {"seed": 1, "temperature": temperature, "max_tokens": new}
                        before = sum(draft_tokens(self._guessing).values())
                        ratio = self.compare(kind, load, off, auto, prompts, **options)
                        made = sum(draft_tokens(self._guessing).values()) - before
                        share = made / (ratio.count * count * new)
                        if count >= MANY:
                            self.verdicts.at_most(share, 0.0, MOST_GUESSES, f"{load}, draft tokens per token")

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
        for stages in sorted({self._flags.stages, 4}):
            with self._servers(model, stages, *draft) as (off, auto):
                load = f"servers, {stages} stages"
                self.compare("stream", f"{load}, a stream alone", off, auto, [LONG], max_tokens=300, temperature=0)
                for name, (at_once, apart_s) in NEWCOMERS.items():
                    if self._flags.only not in name:
                        continue
                    both = [BesideAStream(target, at_once, apart_s) for target in self._targets]
                    few = prompts if apart_s[1] < 1 else prompts[:5]
                    self.compare("newcomers", f"{load}, new clients {name}", *both, few, max_tokens=1, seed=1)
                    before, drafted = (statistics.fmean(run.stream_speeds) for run in both)
                    print(f"    the stream beside them: {drafted:.0f} tokens/s, without draft tokens {before:.0f}")

    @contextmanager
    def _servers(self, model: str, stages: int, *flags: str) -> Iterator[Seq[Run]]:
        common = ["--model", model, "--stages", str(stages), "--threads", "1", "--dtype", "float32"]
        with ExitStack() as stack:
            off = stack.enter_context(running(common))
            self._guessing = auto = stack.enter_context(running([*common, "--speculate", "auto", *flags]))
            self._targets = off.grpc, auto.grpc
            runs = [over_grpc(target) for target in self._targets]
            for run in runs:
                for _ in range(SETTLING_REQUESTS):
                    run([LONG], {"max_tokens": 16})
            time.sleep(SETTLING_S)
            yield runs

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("equal", "kills", "rates", "texts", "servers", "callers", "draft", "newcomers")
    parser.add_argument("parts", nargs="*", choices=(*parts, "all"), default="all")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--models", default="built-in,124M", help="Of `rates`.")
    parser.add_argument(
        "--only", default="", help="Of rates, servers, new clients: loads with this in their name."
    )
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--requests", type=int, default=1000, help="Of `equal`.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="Of turns of a load, at least.")
    parser.add_argument("--warm", type=int, default=400, help="Tokens of a load before its turns.")
    flags = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # the model of 124M has no tokenizer
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(flags, Path(folder))
        for part in parts if "all" in flags.parts else flags.parts:
            getattr(bench, part)()
    for kind, ratios in bench.ratios.items():
        # One text's median differs by some 4% from run to run; that of all texts of a kind tells more.
        print(f"all of {kind}: {Ratio.of(ratios)}")
    if bench.firsts:
        first = Ratio.of(bench.firsts)
        bench.verdicts.at_most(first.middle, first.error, 1 / LEAST_RATIO, "the first token, all loads")
    sys.exit(bench.verdicts.end())


if __name__ == "__main__":
    main()
