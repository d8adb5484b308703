"""Seeded random walks over the scheduler: every request gets the tokens that it gets when it runs alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from ppserve.core.cost_model import StageCost, StepSize
from ppserve.core.request import FinishReason, OutputOptions, Request, SamplingParams, StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence
from ppserve.core.scheduling.speculation import PromptLookup
from tests.core.scheduling.rig import Oracle, SchedulerRig
from tests.simulated_stage import EOS_ID, VOCAB_SIZE, MadeUpFilter, expected_answer
from tests.slow import quick_first


def random_request(rng: random.Random, name: str, now: float, shared_prompt: tuple[int, ...]) -> Request:
    """Any mixture of features, often with a prefix that other requests have too."""
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
        length_end=FinishReason.CONTEXT_LENGTH if rng.random() < 0.2 else FinishReason.MAX_TOKENS,
        priority=rng.choice((0, 0, 0, 1, -1)),
        caller=rng.choice("abc"),
        deadline_s=now + rng.uniform(0, 400) if rng.random() < 0.15 else None,
    )
    if rng.random() < 0.2:
        index = rng.randrange(request.num_sequences)
        answer = expected_answer(request, index).token_ids
        resume_ids = answer[: rng.randrange(len(answer) + 1)]
        return replace(request, resume_index=index, resume_ids=resume_ids, deadline_s=None)
    return request


class RandomCosts(StageCost):
    """Random predictions: they may make steps slow, but no token wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def seconds(self, size: StepSize) -> float:
        return self._rng.choice((0.0, 1e-6, 0.01, 0.2)) * (size.rows + size.context + size.sampled)


def walk(
    seed: int,
    num_stages: int,
    prefill_chunk: int | None,
    prefix_cache: bool,
    speculate: int | None = None,
    rate: float | None = None,
) -> SchedulerRig:
    """rate: of the oracle; None for the product's own drafter."""
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
        eos_ids=(EOS_ID,),
        speculate=speculate,
        runs_ahead=num_stages == 1,
    )
    costs = [RandomCosts(seed)] if seed % 2 else []

    def new_drafter(sequence: Sequence) -> PromptLookup | Oracle:
        return PromptLookup() if rate is None else Oracle(sequence, rate)

    rig = SchedulerRig(
        config, 2 * 3 * 80 // config.block_size, costs, new_drafter, skips=lambda: rng.random() < 0.5
    )
    shared_prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(24))
    for i in range(400):
        rig.now += rng.choice((0.0, 0.01, 1.0))
        action = rng.random()
        if action < 0.16:
            request = random_request(rng, f"r{i}", rig.now, shared_prompt)
            is_filtered = rng.random() < 0.2 and not request.resume_ids
            rig.submit(request, MadeUpFilter(i) if is_filtered else None)
        elif action < 0.20 and rig.requests:
            rig.tell(rig.request_queue.abort(rng.choice(list(rig.requests)), FinishReason.CANCELLED))
        elif action < 0.21 and losses < 2:  # a third in a row would fail the request in flight, rightly
            rig.lose_stage()
            losses += 1
        elif action < 0.22:
            rig.scheduler.slots.resize(rng.randrange(1, num_stages + 2))
        elif action < 0.62:
            rig.schedule_one()
        elif rig.pipeline.num_in_flight:
            running = list(rig.scheduler._running.values())
            if running and rng.random() < 0.03:
                stopping = rng.choice(running)
                rig.stop(stopping.request.id, stopping.index)
            rig.commit_one()
        rig.check()
    rig.drain()
    return rig


def seeds_of(*case: object) -> tuple[int, int]:
    """Return the seeds of two walks, the second with random costs. No two cases walk alike, so few of each reach
    much together."""
    first = 2 * random.Random(repr(case)).randrange(10**6)
    return first, first + 1


@pytest.mark.parametrize("num_stages", quick_first([3, 1, 2, 4]))
@pytest.mark.parametrize("prefill_chunk", [None, 1, 5])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_any_walk_gives_everybody_the_tokens_of_an_undisturbed_run(
    num_stages: int, prefill_chunk: int | None, prefix_cache: bool
) -> None:
    for seed in seeds_of(num_stages, prefill_chunk, prefix_cache):
        rig = walk(seed, num_stages, prefill_chunk, prefix_cache)
        rig.check_answers()
        assert rig.scheduler.kv_usage == 0
        assert len(rig.requests) > 20


@pytest.mark.parametrize("num_stages", quick_first([2, 1, 4]))
@pytest.mark.parametrize("speculate", quick_first([5, 1]))
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0, None])
def test_no_draft_token_changes_a_token(num_stages: int, speculate: int, rate: float | None) -> None:
    """Draft tokens forced into every step that decodes: always wrong, sometimes right, always right, and the
    product's own."""
    outcomes: Counter[str] = Counter()
    for seed in seeds_of(num_stages, speculate, rate):
        rig = walk(seed, num_stages, None if seed % 2 else 5, bool(seed % 3), speculate, rate)
        rig.check_answers()
        assert rig.scheduler.kv_usage == 0
        outcomes.update(rig.scheduler.num_draft_tokens)
        assert sum(rig.scheduler.num_draft_tokens.values()) <= rig.num_draft_tokens
    if rate is not None:  # the product's own drafter is right by chance only, among random tokens
        assert (outcomes["accepted"] > 0) == (rate > 0)
    assert (outcomes["rejected"] > 0) or rate == 1.0


@pytest.mark.slow
def test_the_walks_reach_every_feature() -> None:
    """The walks reach every feature; otherwise their success would prove nothing."""
    seen: set[str] = set()
    for seed in range(24):
        rig = walk(seed, 1 + seed % 4, None, True, speculate=seed % 3)
        seen |= {str(event.finish) for events in rig.events.values() for event in events}
        seen |= {"cached" for events in rig.events.values() for event in events if event.cached_tokens}
        seen |= {"scored" for events in rig.events.values() for event in events if event.prompt_logprobs}
        seen |= {"ahead" for _ in range(rig.num_ahead)}
        seen |= {plan.phase for plan in rig.pipeline.plans}
        seen |= {f"epoch {plan.epoch}" for plan in rig.pipeline.plans}
        seen |= {"resumed" for request in rig.requests.values() if request.resume_ids}
    reasons = {str(reason) for reason in FinishReason}
    features = {"ahead", "cached", "scored", "resumed", "prefill", "decode", "mixed"}
    assert seen >= reasons | features | {"epoch 0", "epoch 1", "epoch 2"}
