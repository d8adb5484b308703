"""A stage in a thread, and the head's side of it in the test's hands. Nothing here is a process or a socket."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ppserve import wire
from ppserve.config import CacheSettings, ServeConfig
from ppserve.core.architecture import Split, StageLayout, stage_layouts
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.errors import TransportError
from ppserve.model.checkpoint import Checkpoint
from ppserve.stage.connecting import Connections, Connector
from ppserve.stage.device import DeviceSetup
from ppserve.stage.link import HeadLink
from ppserve.stage.loop import StageLoop
from ppserve.stage.probe import ProbeResult
from ppserve.stage.transport import Frames
from ppserve.stage.transport.gather import NoGather
from tests.model.random_checkpoint import RandomCheckpoint, architecture

WITHIN_S = 60.0
BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS = 16, 8, 64
CPU = DeviceSetup(torch.device("cpu"), "float32", stages_here=1)


class Poisoned(DeviceSetup):
    """A GPU whose context is lost to this process, in which everything else may still look well."""

    def raise_if_lost(self) -> None:
        raise torch.AcceleratorError("an illegal address")


CONFIG = ServeConfig(cache=CacheSettings(block_size=BLOCK_SIZE))
GREEDY = Draw(SamplingParams(temperature=0.0))

_Message = TypeVar("_Message")


@dataclass
class OneStage:
    """The head's side. told: what the stage has told its keeper."""

    link: HeadLink
    said: queue.SimpleQueue[wire.FromStage]
    exit_code: Future[int]
    told: list[str] = field(default_factory=list)
    layout: StageLayout = field(default_factory=lambda: StageLayout(0, 1, 0, 4))
    """The layout of the layers that it was last told to load."""

    def tell(self, message: wire.FromHead) -> None:
        self.link.handle_message(time.monotonic_ns(), message)

    def next(self) -> wire.FromStage:
        """What the stage says next, whatever it is."""
        return self.said.get(timeout=WITHIN_S)

    def hear(self, kind: type[_Message]) -> _Message:
        """The next message, which must be of this kind."""
        message = self.next()
        assert isinstance(message, kind), message
        return message

    def assign(self, layout: StageLayout) -> wire.FromStage:
        """What the stage says when it has loaded, or cannot."""
        self.layout = layout
        self.tell(wire.Assign(layout))
        while isinstance(message := self.next(), wire.Loading):
            pass
        return message

    def load(self, layout: StageLayout) -> wire.Loaded:
        message = self.assign(layout)
        assert isinstance(message, wire.Loaded), message
        return message

    def form(self, epoch: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.tell(wire.Form(epoch, self.layout, num_blocks, MAX_ROWS, "local", "", store_port=1, address=""))

    def enter(self, epoch: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.form(epoch, num_blocks)
        assert self.hear(wire.Ready).epoch == epoch


@contextmanager
def stages(
    split: str, connector: Connector, checkpoint: Checkpoint | None = None, only: int | None = None
) -> Iterator[list[OneStage]]:
    """Loaded stages of a pipeline, or one of them. All end with the test."""
    checkpoint = checkpoint or RandomCheckpoint(architecture())
    layouts = stage_layouts(Split.parse(split))
    wanted = layouts if only is None else (layouts[only],)
    with ThreadPoolExecutor(len(wanted)) as threads:
        running = [start(threads, each.stage, len(layouts), connector, checkpoint) for each in wanted]
        try:
            for stage, layout in zip(running, wanted, strict=True):
                stage.hear(wire.Hello)
                stage.load(layout)
            yield running
        finally:
            for stage in running:
                for epoch in (1, 2):  # whatever it waits for
                    stage.tell(wire.Abandon(epoch))
                stage.tell(wire.Shutdown())
    for stage in running:
        stage.exit_code.result(WITHIN_S)


def start(
    threads: ThreadPoolExecutor,
    stage: int,
    num_stages: int,
    connector: Connector,
    checkpoint: Checkpoint,
    compute: DeviceSetup = CPU,
) -> OneStage:
    """A stage that has just begun; its Hello is to be heard yet."""
    said: queue.SimpleQueue[wire.FromStage] = queue.SimpleQueue()
    link = HeadLink(said.put)
    order = wire.Start(CONFIG, stage, num_stages)
    loop = StageLoop(order, ProbeResult(checkpoint, compute, ""), link, connector)
    told: list[str] = []
    return OneStage(link, said, threads.submit(loop.run, told.append), told)


def plan(epoch: int, step_id: int, token_ids: tuple[int, ...] = (1, 2, 3), start: int = 0) -> StepPlan:
    """A step of one sequence that draws."""
    return StepPlan(epoch, step_id, 0, (Slice(0, start, token_ids, (0, 1), GREEDY),))


class Obedient:
    """A transport that does what the test says. log: what the stage asked of it, in order. ends: what was done to
    end it. fails_at: what raises `error` at once, by its name in the log."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.log: list[str] = []
        self.ends: list[str] = []
        self.fails_at = ""
        self.arrived = threading.Semaphore(0)
        self.taken = threading.Semaphore(0)
        self.waiting = threading.Event()
        self.breaks = False
        self.error: Exception = TransportError("obedient: broken")
        self.closed = False
        self.may_close = threading.Event()
        self.may_close.set()
        self._interrupted = False

    def post_receive(self, plan: StepPlan) -> None:
        self._note(f"expect {plan.step_id}")

    def receive(self, plan: StepPlan) -> torch.Tensor:
        self.log.append(f"receive {plan.step_id}")
        self._wait(self.arrived)
        return torch.ones(plan.num_tokens, self.frames.width)

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        self.log.append(f"send {plan.step_id}")
        self._wait(self.taken)
        return hidden_TD.nbytes

    def _wait(self, turn: threading.Semaphore) -> None:
        self.waiting.set()
        assert turn.acquire(timeout=WITHIN_S)
        self.waiting.clear()
        if self.breaks or self._interrupted:
            error = copy(self.error)  # a cycle: it refers to this frame
            raise error

    def warm_up(self) -> None:
        self._note("warm up")

    def _note(self, asked: str) -> None:
        self.log.append(asked)
        if asked == self.fails_at:
            raise self.error

    def interrupt(self) -> None:
        self.ends.append("interrupt")
        self._interrupted = True
        self.arrived.release()
        self.taken.release()

    def close(self) -> None:
        assert self.may_close.wait(WITHIN_S)
        self.ends.append("close")
        self.closed = True


class ByHand:
    """A connector whose transports the test keeps. on_open: called before a transport is made."""

    def __init__(self, on_open: Callable[[wire.Form], None] = lambda form: None) -> None:
        self.opened: list[Obedient] = []
        self.left = 0
        self.on_open = on_open

    def connect(self, form: wire.Form, frames: Frames, link: HeadLink) -> Connections:
        self.on_open(form)
        self.opened.append(Obedient(frames))
        return Connections(self.opened[-1], NoGather())

    def leave_epoch(self) -> None:
        self.left += 1
