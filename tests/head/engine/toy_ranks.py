"""An engine with toy ranks: they answer as stages do, compute on `ToyPipeline`, and are controlled by the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ppserve import wire
from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.grid import RankGrid
from ppserve.core.plan import StepPlan, StepResult, StepStamps
from ppserve.core.request import Request
from ppserve.core.sampling_state import SamplingUpdate
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.member import Decision
from ppserve.head.engine.members import Members
from ppserve.head.engine.observer import Observer
from ppserve.head.engine.replica import Replica
from ppserve.head.engine.streams import OpenRequest, TokenOutput
from ppserve.library.local import LocalControlPlane, LocalLink
from tests.core.toy_pipeline import EOS_ID, VOCAB_SIZE, ToyPipeline
from tests.hellos import hello

ARCH = Architecture(4, 64, 4, 128, VOCAB_SIZE, VOCAB_SIZE, 256, eos_id=EOS_ID)
BLOCK_SIZE = 4
NUM_BLOCKS = 64
WITHIN_S = 20.0


class Reader:
    """A sink whose outputs any thread can read."""

    def __init__(self) -> None:
        self._outputs: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self._outputs.put(output)

    def next(self) -> TokenOutput:
        return self._outputs.get(timeout=WITHIN_S)

    def rest(self) -> list[TokenOutput]:
        """Up to and including the end of the (only) sequence."""
        outputs = [self.next()]
        while outputs[-1].finish is None and outputs[-1].error is None:
            outputs.append(self.next())
        return outputs


class Stages:
    """All ranks of one pipeline, in one thread. hold: while it is cleared, steps wait."""

    def __init__(self, control: LocalControlPlane, clock: Callable[[], int]) -> None:
        self.links = control.links
        self.plans: list[StepPlan] = []
        # Of each plan its epoch, and the newest epoch that stage 0 was told to form.
        self.arrived: list[tuple[int, int]] = []
        self.shutdown_codes: dict[int, int] = {}
        self.hold = threading.Event()
        self.hold.set()
        self._toy = ToyPipeline(BLOCK_SIZE)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._epoch = 0
        self._clock = clock

    def start(self) -> None:
        for rank in self.links:
            self.greet(rank)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()

    def greet(self, rank: int) -> None:
        self.links[rank].send(hello(rank, len(self.links), ARCH, wire.StageHost("host", "here")))

    def die(self, rank: int) -> None:
        """The rank's process dies."""
        self.links[rank].hang_up("exit")

    def _run(self) -> None:
        while len(self.shutdown_codes) < len(self.links):
            for rank, link in self.links.items():
                try:
                    _, message = link.inbox.get(timeout=0.01)
                except queue.Empty:
                    continue
                self._take(rank, link, message)

    def _take(self, rank: int, link: LocalLink, message: Any) -> None:
        match message:
            case wire.Assign():
                link.send(wire.Loaded("cpu", 1, 1, 10, 10 * NUM_BLOCKS, ""))
            case wire.Form(epoch):
                if rank == 0:
                    self._epoch = epoch
                    self._toy.lose()  # what earlier epochs wrote is worth nothing
                    link.send(wire.StoreOpened(epoch, 1))
                link.send(wire.Ready(epoch))
            case wire.Abandon(epoch):
                link.send(wire.Broken(epoch, "told"))
            case wire.Plan(plan, told) if rank == len(self.links) - 1:
                self.arrived.append((plan.epoch, self._epoch))
                self._compute(plan, told)
            case wire.Shutdown(code):
                self.shutdown_codes[rank] = code
                link.hang_up("exit")

    def _compute(self, plan: StepPlan, told: SamplingUpdate) -> None:
        assert self.hold.wait(WITHIN_S)
        if plan.epoch != self._epoch:
            return
        self.plans.append(plan)
        self._toy.send(plan, told)
        result = self._toy.run_one()
        for rank, link in self.links.items():
            stamps = StepStamps(*(self._clock() for _ in range(6)))
            mine = StepResult(plan.epoch, plan.step_id, rank, stamps)
            is_last = rank == len(self.links) - 1
            link.send(wire.Result(replace(result, stage=rank, stamps=stamps) if is_last else mine))


@dataclass
class Running:
    """A started engine and its parts."""

    engine: Engine
    replica: Replica
    stages: Stages
    readers: dict[str, Reader] = field(default_factory=dict)

    def submit(self, request: Request) -> Reader:
        """Queue a request. Raises the error if it is refused."""
        reader = Reader()
        self.engine.submit(OpenRequest(request, reader)).result(WITHIN_S)
        return reader


class ToyRules:
    """Layers divided evenly, and the configuration of the test."""

    def __init__(self, num_stages: int, config: dict[str, Any]) -> None:
        self._num_stages = num_stages
        settings = {"max_model_len": 128, "block_size": BLOCK_SIZE, "eos_id": EOS_ID, **config}
        self._config = SchedulerConfig(num_stages, **settings)

    def decide(self, hellos: tuple[wire.Hello, ...]) -> Decision:
        layouts = stage_layouts(Split((8 // self._num_stages,) * self._num_stages))
        return Decision(ARCH, layouts, "float32", "shm", self._config)

    def num_blocks(self, decision: Decision, loaded: tuple[wire.Loaded, ...]) -> int:
        return min(stage.kv_bytes // stage.block_bytes for stage in loaded)


@contextmanager
def running(num_stages: int = 2, *observers: Observer, **config: Any) -> Iterator[Running]:
    """A formed pipeline of toy ranks; stopped at the end."""
    control = LocalControlPlane(range(num_stages))
    members = Members(RankGrid(1, 1, num_stages), "here", ToyRules(num_stages, config), control)
    clock_ns = _Clock()
    replica = Replica(members, control, observers, clock_ns, RequestQueue())
    engine = Engine([replica], control, observers, lambda call: call(), clock_ns)
    stages = Stages(control, clock_ns)
    engine.start()
    stages.start()
    try:
        engine.formed.result(WITHIN_S)
        yield Running(engine, replica, stages)
    finally:
        stages.hold.set()
        engine.stop()
        engine.join(WITHIN_S)
        stages.join()
        assert not engine.is_alive()


class _Clock:
    """A clock that advances by 1 µs at every reading."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns
