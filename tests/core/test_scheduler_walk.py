"""Seeded random walks over the scheduler: whatever happens, everybody gets exactly the right tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from artificial import EOS_ID, VOCAB_SIZE, ArtificialPipeline, expected_answer

from ppserve.core.block_manager import BlockManager
from ppserve.core.request import FinishReason, OutputOptions, Request, SamplingParams, StopConditions
from ppserve.core.scheduler import Scheduler, SchedulerConfig, SequenceEvent
from ppserve.errors import Overloaded

CUT_SHORT = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.STOP_STRING)


@dataclass
class House:
    """A scheduler, its pipeline, and everything the streams were told."""

    config: SchedulerConfig
    num_blocks: int = 48
    now: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    events: dict[tuple[str, int], list[SequenceEvent]] = field(default_factory=lambda: defaultdict(list))
    ended_by_engine: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, self.config.block_size)
        self.scheduler = Scheduler(self.config, self.blocks)
        self.pipeline = ArtificialPipeline(self.config.block_size)

    def tell(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        for event in events:
            self.events[event.request_id, event.index].append(event)
        return events

    def submit(self, request: Request) -> bool:
        try:
            self.scheduler.submit(request, self.now)
        except Overloaded:
            return False
        self.requests[request.id] = request
        return True

    def schedule_one(self) -> bool:
        self.tell(self.scheduler.expire(self.now))
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert plan.slices, "a step is never empty"
            self.pipeline.send(plan)
        return plan is not None

    def commit_one(self) -> list[SequenceEvent]:
        return self.tell(self.scheduler.commit(self.pipeline.run_one(), self.now))

    def lose_stage(self) -> None:
        self.pipeline.lose()
        self.tell(self.scheduler.lose_stage(self.scheduler.epoch + 1, self.now))

    def drain(self) -> None:
        while self.scheduler.has_work:
            while self.schedule_one():
                self.scheduler.check_invariants()
            if self.pipeline.num_in_flight:
                self.commit_one()
            else:
                assert not self.scheduler.has_work, "work, but nothing to do"
            self.scheduler.check_invariants()

    def check_answers(self) -> None:
        """Exactly one terminal event per sequence, and only tokens of the undisturbed run."""
        for request in self.requests.values():
            resumed = request.resume_index is not None
            indices = [request.resume_index] if resumed else range(request.num_sequences)
            for index in indices:
                self._check_answer(request, index)

    def _check_answer(self, request: Request, index: int) -> None:
        events = self.events[request.id, index]
        right = expected_answer(request, index)
        ends = [e for e in events if e.is_terminal]
        first = len(request.resume_ids)
        tokens = [e.token_id for e in events if e.token_id is not None]
        assert [e.offset for e in events if e.token_id is not None] == list(range(first, first + len(tokens)))
        if (request.id, index) in self.ended_by_engine:
            assert ends == []
            assert tuple(tokens) == right.token_ids[first : first + len(tokens)]
            return
        assert len(ends) == 1
        assert events[-1] is ends[0]
        assert ends[0].error is None
        assert tuple(tokens) == right.token_ids[first : first + len(tokens)]
        scores = tuple(p.logprob for e in events for p in e.prompt_logprobs)
        if ends[0].finish not in CUT_SHORT:
            assert ends[0].finish == right.finish
            assert tuple(tokens) == right.token_ids[first:]
            if index == 0 and not request.resume_ids:
                assert scores == right.prompt_logprobs


def random_request(rng: random.Random, name: str, now: float, shared_prompt: tuple[int, ...]) -> Request:
    """Any mixture of features; often with a prefix that others have too."""
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 3, 8, 9, 17, 25))))
    if rng.random() < 0.5:
        prompt = shared_prompt[: rng.randrange(1, len(shared_prompt))] + prompt
    max_tokens = rng.choice((0, 1, 2, 5, 12, 20))
    stop = StopConditions(
        max_tokens,
        min_tokens=rng.choice((0, 0, min(3, max_tokens))),
        stop_token_ids=rng.choice(((), (3,), (EOS_ID, 11))),
        ignore_eos=rng.random() < 0.3,
    )
    sampling = SamplingParams(seed=rng.randrange(100), repetition_penalty=rng.choice((1.0, 1.0, 1.1)))
    output = OutputOptions(prompt_logprobs=rng.choice((None, None, None, 0, 2)))
    request = Request(
        name,
        prompt,
        stop,
        sampling,
        output,
        num_sequences=rng.choice((1, 1, 1, 2, 3)),
        limited_by_context=rng.random() < 0.2,
        priority=rng.choice((0, 0, 0, 1, -1)),
        caller=rng.choice("abc"),
        deadline_s=now + rng.uniform(0, 400) if rng.random() < 0.15 else None,
    )
    if rng.random() < 0.2:
        index = rng.randrange(request.num_sequences)
        answer = expected_answer(request, index).token_ids
        return Request(
            name,
            prompt,
            stop,
            sampling,
            output,
            num_sequences=request.num_sequences,
            resume_index=index,
            resume_ids=answer[: rng.randrange(len(answer) + 1)],
            limited_by_context=request.limited_by_context,
        )
    return request


def walk(seed: int, num_stages: int, prefill_chunk: int | None, prefix_cache: bool) -> House:
    rng = random.Random(seed)
    losses = 0
    config = SchedulerConfig(
        num_stages,
        max_num_seqs=9,
        max_queue=12,
        max_queue_tokens=400,
        max_model_len=128,
        block_size=rng.choice((1, 4, 8)),
        prefill_chunk=prefill_chunk,
        prefix_cache=prefix_cache,
        eos_id=EOS_ID,
        aging_s=20.0,
    )
    house = House(config, num_blocks=2 * 3 * 80 // config.block_size)
    shared_prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(24))
    for i in range(400):
        house.now += rng.choice((0.0, 0.01, 1.0))
        action = rng.random()
        if action < 0.16:
            house.submit(random_request(rng, f"r{i}", house.now, shared_prompt))
        elif action < 0.20 and house.requests:
            house.tell(house.scheduler.abort(rng.choice(list(house.requests)), FinishReason.CANCELLED))
        elif action < 0.21 and losses < 2:  # a third in a row would fail the request in flight, rightly
            house.lose_stage()
            losses += 1
        elif action < 0.22:
            house.scheduler.set_microbatches(rng.randrange(1, num_stages + 2))
        elif action < 0.62:
            house.schedule_one()
        elif house.pipeline.num_in_flight:
            for event in house.commit_one():
                if not event.is_terminal and rng.random() < 0.01:
                    house.scheduler.finish(event.sequence_id, FinishReason.STOP_STRING, house.now)
                    house.ended_by_engine.add((event.request_id, event.index))
        house.scheduler.check_invariants()
    house.drain()
    return house


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("prefill_chunk", [None, 1, 5])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_any_walk_gives_everybody_the_tokens_of_an_undisturbed_run(
    num_stages: int, prefill_chunk: int | None, prefix_cache: bool
) -> None:
    for seed in range(8):
        house = walk(seed, num_stages, prefill_chunk, prefix_cache)
        house.check_answers()
        assert house.scheduler.kv_usage == 0
        assert len(house.requests) > 20
