"""Replicas, alone or behind an engine, with scripted time and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppserve import wire
from ppserve.core.grid import RankGrid
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.steps import Step
from ppserve.core.plan import StepPlan, StepStamps
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import SequenceEvent
from ppserve.core.scheduling.slots import PROBE
from ppserve.head.engine.background_masks import MaskThreads
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import Replica, StepObserver
from ppserve.head.engine.streams import OpenRequest, TokenOutput
from ppserve.tokenizer import no_tokenizer
from tests.core.scheduling.rig import a_request
from tests.head.engine.scripted import BLOCK_SIZE, SECOND, RanksRig, ScriptedControl, decision
from tests.simulated_stage import SimulatedStage

MS = 1_000_000


class Notes(StepObserver):
    """The callbacks, in order, but for loads. in_flight: steps, with each load."""

    def __init__(self) -> None:
        self.called: list[tuple[object, ...]] = []
        self.in_flight: list[int] = []

    def on_step_sent(self, replica: int, step: Step, scheduler: Scheduler) -> None:
        self.called.append(("sent", step.plan.step_id))

    def on_step_reported(self, replica: int, step: Step, stage: int) -> None:
        self.called.append(("reported", step.plan.step_id, stage))

    def on_stage_died(self, replica: int, stage: int, cause: str) -> None:
        self.called.append(("died", stage, cause))

    def on_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self.called.append(("output", opened.request.id))

    def on_load(self, replica: int, scheduler: Scheduler, in_flight: int, num_waiting: int) -> None:
        self.in_flight.append(in_flight)


class Rig(RanksRig[list[SequenceEvent]]):
    """The last of several replicas, so ranks are not stages. Its stages draw token 3, when the test says so."""

    def __init__(self, num_stages: int = 2, num_tensor: int = 1, num_replicas: int = 2, **config: Any) -> None:
        self.grid = RankGrid(num_tensor, num_replicas, num_stages)
        control, self.notes, self.request_queue = ScriptedControl(), Notes(), RequestQueue()
        about = self.grid, "here", lambda hellos, split: decision(num_stages, split, **config), control
        members = [Members(*about, number) for number in range(num_replicas)]
        super().__init__(control, members[-1])
        rest = control, [self.notes], lambda: self.now_ns, self.request_queue
        self.replicas = [Replica(each, *rest) for each in members]
        self.replica = self.replicas[-1]
        self.stages = [
            SimulatedStage(BLOCK_SIZE, place, draw_token=lambda *_: 3) for place in range(len(self.ranks))
        ]

    def hear(self, *events: Received | Disconnected) -> list[SequenceEvent]:
        return [outcome for event in events for outcome in self.replica.handle_rank(event)]

    def say(self, rank: int, *messages: wire.FromStage) -> list[SequenceEvent]:
        return self.hear(*[Received(rank, self.now_ns, message) for message in messages])

    def greet(self, rank: int, weights: str = "") -> None:
        """A stage process of this rank connects and loads its weights."""
        self.hello(rank, weights=weights)
        self.loaded(rank)

    def form(self, reason: str | None = None) -> None:
        """The first epoch. reason: what each rank's self-test found."""
        self.load(*self.ranks, reason=reason)
        self.join()

    def submit(self, *names: str, max_tokens: int = 6) -> None:
        for name in names:
            self.ask(a_request(name, 9, max_tokens, salt=len(name)))

    def ask(self, request: Request) -> None:
        self.request_queue.submit(request, self.now_ns / SECOND)
        self.replica.note_demand(True)

    def refill(self) -> list[StepPlan]:
        """The plans of a turn; every rank that is used was sent each of them, in order."""
        self.control.sent.clear()
        self.request_queue.admit(self.now_ns / SECOND)
        self.replica.refill(self.now_ns)
        ranks = self.members.ranks_in_use
        sent = {rank: [m for r, m in self.control.sent if r == rank and isinstance(m, wire.Plan)]
                for rank in self.ranks}  # fmt: skip
        assert all([m.plan for m in sent[rank]] == [m.plan for m in sent[ranks[0]]] for rank in ranks)
        assert not any(sent[rank] for rank in self.ranks if rank not in ranks)
        return [m.plan for m in sent[ranks[-1]]]

    def result(self, plan: StepPlan, place: int, compute_ns: int = MS) -> wire.Result:
        """A rank's result of a step that it computed until now. Those of the last stage in use draw."""
        begun, stage = self.now_ns - compute_ns, self.stages[place]
        layout = self.members.all[place].layout
        stage.draws = layout is not None and layout.is_last
        return wire.Result(stage.compute(plan, StepStamps(begun, begun, begun, begun, self.now_ns, self.now_ns)))

    def compute(self, plan: StepPlan) -> list[SequenceEvent]:
        """Every rank in use takes a millisecond for the step."""
        events: list[SequenceEvent] = []
        for place, rank in enumerate(self.members.ranks_in_use):
            self.now_ns += MS
            events += self.say(rank, self.result(plan, place))
        return events

    def wait(self, seconds: float, *, silent: tuple[int, ...] = ()) -> list[SequenceEvent]:
        """Ticks every half second. All ranks but the silent ones answer pings meanwhile."""
        events: list[SequenceEvent] = []
        for _ in range(round(2 * seconds)):
            self.now_ns += SECOND // 2
            self.answer(*(rank for rank in self.ranks if rank not in silent))
            events += self.replica.tick()
        return events

    def lose(self, rank: int, cause: str = "exit") -> list[SequenceEvent]:
        """A rank's process dies; the others leave the epoch."""
        epoch = self.members.epoch
        events = self.hear(Disconnected(rank, cause))
        for other in self.ranks:
            if other != rank:
                events += self.say(other, wire.Broken(epoch, "told"))
        return events

    def convicts(self, rank: int, pause_s: int = 0, cause: str = "exit") -> bool:
        """This rank's process dies, after the head has stood still, and comes back: whether a request fails."""
        for plan in self.refill():
            if plan.slices == (PROBE,):
                self.compute(plan)
                self.refill()
        self.now_ns += pause_s * SECOND
        events = self.lose(rank, cause)
        self.greet(rank)
        self.wait(1)
        self.join()
        return any(event.error is not None for event in events)

    def times(self) -> tuple[StageTimes, ...]:
        return self.replica.read().times


class Reader:
    """A sink that keeps its outputs."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        self.outputs += outputs

    @property
    def finish(self) -> FinishReason | None:
        """None while it has not ended."""
        return self.outputs[-1].finish if self.outputs else None


class EngineRig(Rig):
    """An engine of replicas of one rank each, which compute when the test says so."""

    def __init__(
        self, *weights: str, num_replicas: int = 1, masks: MaskThreads | None = None, **config: Any
    ) -> None:
        """weights: of the replicas that have formed. masks: what makes masks beside the engine."""
        super().__init__(1, num_replicas=num_replicas, **config)
        self._num_computed = 0
        rest = self.notes.on_output, lambda call: call(), lambda: self.now_ns
        self.engine = Engine(self.replicas, self.control, *rest, masks=masks)
        if masks is not None:
            self.request_queue.new_masks = masks.source
        for rank, which in enumerate(weights):
            self.greet(rank, weights=which)
            self.say(rank, wire.StoreOpened(1, 1), wire.Ready(1))

    def hear(self, *events: Received | Disconnected) -> list[SequenceEvent]:
        self.control.arrived += events
        self.engine.turn()
        return []

    def open(self, request: Request) -> Reader:
        """Raises the error of a request that is refused."""
        reader = Reader()
        queued = self.engine.submit(OpenRequest(request, reader.push, no_tokenizer()))
        self.engine.turn()
        queued.result(0)
        return reader

    def finish(self, *readers: Reader) -> None:
        """The only rank computes steps until these have ended."""
        while not all(reader.finish for reader in readers):
            assert self.compute_next(), "no step is in flight, and they have not ended"

    def compute_next(self) -> bool:
        """The only rank computes the oldest plan that it was sent. Returns whether there was one."""
        plans = [message.plan for _, message in self.control.sent if isinstance(message, wire.Plan)]
        if len(plans) == self._num_computed:
            return False
        self._num_computed += 1
        self.say(0, self.result(plans[self._num_computed - 1], 0))
        return True

    @property
    def serving(self) -> list[bool]:
        return [replica.serves for replica in self.replicas]


def formed(num_stages: int = 2, num_tensor: int = 1, **config: Any) -> Rig:
    rig = Rig(num_stages, num_tensor, **config)
    rig.form()
    assert rig.replica.serves
    return rig


def finished(events: list[SequenceEvent]) -> list[str]:
    """Requests that ended by themselves."""
    return [event.request_id for event in events if event.finish is not None]
