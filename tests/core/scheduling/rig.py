"""A scheduler on a simulated stage, which stands for a pipeline, and a record of the events of every sequence."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from msgspec import structs

from ppserve.core.cost_model import StageCost
from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import StepPlan
from ppserve.core.request import FinishReason, Request, StopConditions
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import Sequence, SequenceEvent, TextRule
from ppserve.core.scheduling.speculation import DraftToken, PromptLookup
from ppserve.core.scheduling.token_filter import ImmediateMasks
from ppserve.errors import Overloaded
from tests.core.scheduling.invariants import check_ends, check_scheduler
from tests.simulated_stage import CUT_SHORT, EOS_ID, VOCAB_SIZE, MadeUpFilter, SimulatedStage, expected_answer, mix


@dataclass
class SchedulerRig:
    """See the module."""

    config: SchedulerConfig
    num_blocks: int = 48
    costs: Seq[StageCost] = ()
    new_drafter: Callable[[Sequence], object] = PromptLookup
    skips: Callable[[], bool] = lambda: True  # whether the pipeline hears in time of a cancelled step
    request_queue: RequestQueue = field(default_factory=RequestQueue)
    now: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    filters: dict[str, MadeUpFilter] = field(default_factory=dict)  # by request
    events: dict[tuple[str, int], list[SequenceEvent]] = field(default_factory=lambda: defaultdict(list))
    stopping: set[tuple[str, int]] = field(default_factory=set)
    num_draft_tokens: int = 0  # sent
    num_ahead: int = 0  # steps sent ahead

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, self.config.block_size)
        self.steps = Steps(self.config.num_stages)
        self.scheduler = Scheduler(self.config, self.blocks, self.costs, new_drafter=self.new_drafter)
        self.request_queue.add_scheduler(self.scheduler)
        self.pipeline = SimulatedStage(self.config.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.request_queue.groups) or self.scheduler.is_busy

    def tell(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        for event in events:
            self.events[event.request_id, event.index].append(event)
        return events

    def submit(self, request: Request, token_filter: MadeUpFilter | None = None) -> bool:
        try:
            self.request_queue.submit(request, self.now, token_filter, self._text_rule(request.id))
        except Overloaded:
            return False
        if token_filter is not None:
            self.filters[request.id] = token_filter
        self.requests[request.id] = request
        return True

    def schedule_one(self) -> StepPlan | None:
        self.tell(self.request_queue.expire(self.now))
        self.request_queue.admit(self.now)
        self.tell(self.request_queue.take_masks(self.scheduler))
        plan = self.request_queue.schedule(self.scheduler, self.now)
        if plan is not None:
            assert plan.slices, "a step is never empty"
            self.num_draft_tokens += sum(slice_.num_draft_tokens for slice_ in plan.slices)
            self.steps.sent(plan, 0, 0, self.scheduler.slots.num_slots)
            self.num_ahead += plan.is_ahead
            self.pipeline.send(plan)
        return plan

    def commit_one(self) -> list[SequenceEvent]:
        for step in self.scheduler.ahead.take_cancelled():
            self.pipeline.skipped |= {step} if self.skips() else set()
            self.pipeline.cancelled.add(step)
        self.send_masks()
        result = self.pipeline.run_one()
        for stage in range(self.config.num_stages):
            self.steps.reported(structs.replace(result, stage=stage), 0)
        return self.tell(self.request_queue.commit(self.scheduler, result, self.now))

    def send_masks(self) -> None:
        """What was sent ahead gets its masks."""
        self.tell(self.request_queue.take_masks(self.scheduler))
        if (masks := self.scheduler.ahead.take_masks()) is not None:
            assert masks.step_id not in self.pipeline.masks, "they were sent twice"
            self.pipeline.masks[masks.step_id] = masks.masks

    def stop(self, request_id: str, index: int) -> None:
        """The answer's next token completes a stop string."""
        self.stopping.add((request_id, index))

    def _text_rule(self, request_id: str) -> TextRule:
        def read(index: int, token_id: int, finish: FinishReason | None) -> FinishReason | None:
            return FinishReason.STOP_STRING if (request_id, index) in self.stopping else finish

        return read

    def check(self) -> None:
        """What must hold between any two calls; for a rig that has its request queue alone."""
        check_scheduler(self.scheduler, self.request_queue)
        check_ends(self.request_queue, self.requests.values(), self.events)

    def lose_stage(self) -> None:
        self.lose()
        self.form()

    def lose(self, failed: Set[int] = frozenset({0})) -> list[SequenceEvent]:
        """These ranks failed: there is no pipeline until another one forms."""
        self.pipeline.lose()
        self.steps.lost()
        return self.tell(self.request_queue.record_loss(self.request_queue.give_back(self.scheduler), failed))

    def form(self) -> None:
        self.scheduler.open(self.scheduler.slots.epoch)

    def drain(self) -> None:
        while self.has_work:
            while self.schedule_one() is not None:
                self.check()
            if self.pipeline.num_in_flight:
                self.commit_one()
            else:
                assert not self.has_work, "work, but nothing to do"
            self.check()

    def turn(self) -> list[SequenceEvent]:
        """Fill the pipeline, and get one step back."""
        fill(self)
        return self.commit_one()

    def finish(self) -> None:
        self.drain()
        self.check_answers()

    def check_answers(self) -> None:
        """Every sequence had exactly one terminal event, and the tokens that it has when it runs alone."""
        for request in self.requests.values():
            resumed = request.resume_index is not None
            indices = [request.resume_index] if resumed else range(request.num_sequences)
            for index in indices:
                self._check_answer(request, index)

    def _check_answer(self, request: Request, index: int) -> None:
        events = self.events[request.id, index]
        right = expected_answer(request, index, token_filter=self.filters.get(request.id))
        ends = [e for e in events if e.is_terminal]
        first = len(request.resume_ids)
        tokens = [e.token_id for e in events if e.token_id is not None]
        assert [e.offset for e in events if e.token_id is not None] == list(range(first, first + len(tokens)))
        assert len(ends) == 1
        assert events[-1] is ends[0]
        assert ends[0].error is None
        finish = ends[0].finish
        assert finish is not None
        assert right.allows((*right.token_ids[:first], *tokens), finish)
        scores = tuple(p.logprob for e in events for p in e.prompt_logprobs)
        if finish not in CUT_SHORT and index == 0 and not request.resume_ids:
            assert scores == right.prompt_logprobs


class Oracle:
    """Draft tokens from the undisturbed run: each is right as often as `rate` says."""

    def __init__(self, sequence: Sequence, rate: float, probability: float | None = None) -> None:
        self._first = len(sequence.request.prompt_ids)
        token_filter = None
        if sequence.masks is not None:
            assert isinstance(sequence.masks, ImmediateMasks)
            token_filter = sequence.masks.token_filter
            assert isinstance(token_filter, MadeUpFilter)
        self._answer = expected_answer(sequence.request, sequence.index, token_filter=token_filter).token_ids
        self._rng = random.Random(sequence.index)
        self._rate, self._probability = rate, rate if probability is None else probability

    def draft(self, token_ids: Seq[int], draft_ids: Seq[int]) -> DraftToken | None:
        place = len(token_ids) + len(draft_ids) - self._first
        right = self._answer[place] if place < len(self._answer) else EOS_ID
        token_id = right if self._rng.random() < self._rate else (right + 1) % VOCAB_SIZE
        return DraftToken(token_id, self._probability)


def a_rig(num_stages: int = 2, num_blocks: int = 400, **config: object) -> SchedulerRig:
    settings = {"max_model_len": 1024, "block_size": 4, "eos_ids": (EOS_ID,), **config}
    return SchedulerRig(SchedulerConfig(num_stages, **settings), num_blocks)  # type: ignore[arg-type]


def prompt_of(num_tokens: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(mix(salt, i) % VOCAB_SIZE for i in range(num_tokens))


def a_request(
    name: str, num_prompt: int = 6, max_tokens: int = 6, salt: int | None = None, **fields: object
) -> Request:
    """Return a request that ends by max_tokens only, unless `stop` says more."""
    stop = fields.pop("stop", StopConditions(max_tokens, ignore_eos=True))
    prompt = prompt_of(num_prompt, mix(*name.encode()) if salt is None else salt)
    return Request(name, prompt, stop, **fields)  # type: ignore[arg-type]


def fill(rig: SchedulerRig) -> list[StepPlan]:
    plans = []
    while (plan := rig.schedule_one()) is not None:
        plans.append(plan)
    return plans
