"""What `speculation.py` runs: requests to a `Pipeline` or a server, and drafters that are right at a set rate."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from speculation_simulated import Times

from ppserve import AsyncClient, Pipeline
from ppserve.core.ledger.steps import Step
from ppserve.core.plan import SPECULATIVE
from ppserve.core.scheduling.drafter import DraftToken
from ppserve.head.engine.watcher import Watcher

LONG = "Once upon a time"

Prompts = Seq[str | Seq[int]]
Run = Callable[[Prompts, dict[str, object]], tuple[float, float, list[str]]]
"""Runs all prompts together: (tokens per second, seconds to the first token, texts)."""


class Rated:
    """Knows the answer, and draft tokens right at a set rate. told: how likely it says that a draft token is
    right; None: the rate. seed: of which draft tokens are right. Each answer needs its own: of 48 draft tokens at
    a rate of 0.5, those of seed 1 are right 0.6 times."""

    def __init__(self, answer: Seq[int], first: int, rate: float, seed: int, told: float | None = None) -> None:
        self._answer, self._first, self._rate = answer, first, rate
        self._told = rate if told is None else told
        self._chance = random.Random(seed)
        self._guessed: dict[int, int] = {}

    def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> DraftToken | None:
        place = len(token_ids) + len(draft_tokens) - self._first
        if place >= len(self._answer):
            return None
        if place not in self._guessed:
            right = self._chance.random() < self._rate
            self._guessed[place] = self._answer[place] if right else 1 - min(1, self._answer[place])
        return DraftToken(self._guessed[place], self._told)


class DeepSteps(Watcher):
    """Counts the steps on draft tokens alone that a pipeline sends."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.count = 0
        (replica,) = pipeline._engine._fleet.replicas
        replica._watcher = self

    def dispatched(self, step: Step) -> None:
        self.count += step.plan.phase == SPECULATIVE


def in_process(pipeline: Pipeline, times: Times, forced: int | None) -> Run:
    """forced: as `speculate`, from then on. The same pipeline may so run without draft tokens and with them; of
    two pipelines, one was up to 20% slower at the same steps, by where its threads and its memory were."""

    def run(prompts: Prompts, options: dict[str, object]) -> tuple[float, float, list[str]]:
        (replica,) = pipeline._engine._fleet.replicas
        assert replica.scheduler is not None
        replica.scheduler._speculation._forced = forced
        times.watch()
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


class BesideAStream:
    """A `Run`: the prompts come so many at once, while one caller has long greedy answers. Only they are counted,
    by means, because a few wait longer than the others. apart_s: pauses between them, from and to.
    stream_speeds: tokens per second of that one caller, of all calls."""

    def __init__(self, target: str, at_once: int, apart_s: tuple[float, float]) -> None:
        self.stream_speeds: list[float] = []
        self._target, self._at_once, self._apart_s = target, at_once, apart_s

    def __call__(self, prompts: Prompts, options: dict[str, object]) -> tuple[float, float, list[str]]:
        return asyncio.run(self._all_of(prompts, options))

    async def _all_of(self, prompts: Prompts, options: dict[str, object]) -> tuple[float, float, list[str]]:
        answers, busy_s, num_streamed = [], 0.0, 0
        async with AsyncClient(self._target) as client:

            async def one_long_after_the_other() -> None:
                nonlocal num_streamed
                while True:
                    async for chunk in client.stream(LONG, max_tokens=900, ignore_eos=True, temperature=0):
                        num_streamed += len(chunk.tokens)

            stream = asyncio.create_task(one_long_after_the_other())
            await asyncio.sleep(0.3)
            num_before, began = num_streamed, time.perf_counter()
            for first in range(0, len(prompts), self._at_once):
                came = time.perf_counter()
                wave = prompts[first : first + self._at_once]
                answers += await asyncio.gather(*(one(client, prompt, options) for prompt in wave))
                busy_s += time.perf_counter() - came
                await asyncio.sleep(random.uniform(*self._apart_s))
            self.stream_speeds.append((num_streamed - num_before) / (time.perf_counter() - began))
            stream.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stream
        first_s = statistics.fmean(answer[0] for answer in answers)
        return sum(answer[2] for answer in answers) / busy_s, first_s, [answer[1] for answer in answers]
