"""The transport between threads of one process: a queue between each two stages, and `tensor.to(device)`.

The other transports are measured against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue

import torch

from ppserve.core.plan import StepPlan
from ppserve.errors import TransportError
from ppserve.stage.transport.frames import Frames, ReceiveOrder


@dataclass(frozen=True, slots=True)
class _Frame:
    """Hidden states that the stream of one thread computes, and that of another thread uses."""

    step_id: int
    hidden_TD: torch.Tensor
    made: torch.cuda.Event | None
    """An event after the work that computes them, on a GPU; None on CPUs."""

    @classmethod
    def record(cls, step_id: int, hidden_TD: torch.Tensor) -> _Frame:
        """Make a frame. The thread that computes the hidden states calls this; it does not wait."""
        if not hidden_TD.is_cuda:
            return cls(step_id, hidden_TD, None)
        return cls(step_id, hidden_TD, torch.cuda.current_stream(hidden_TD.device).record_event())

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on the receiving thread's device. The thread's stream waits for it; the thread does
        not."""
        if self.made is not None:
            # A copy to another device is work of this one.
            stream = torch.cuda.current_stream(self.hidden_TD.device)
            stream.wait_event(self.made)
            # Otherwise the stream that made it would reuse the memory once no tensor has it, even before it is
            # read.
            self.hidden_TD.record_stream(stream)
        return self.hidden_TD.to(device)


_Queue = SimpleQueue[_Frame | None]
"""A queue of frames. A None in it says that the other end is closed."""
QueuePair = tuple[_Queue | None, _Queue | None]
"""A stage's queues: from the previous stage (None for the first), and to the next (None for the last)."""


def make_queues(num_stages: int) -> tuple[QueuePair, ...]:
    """Make a queue between each two neighbours. Return the two queues of every stage."""
    links: list[_Queue] = [SimpleQueue() for _ in range(num_stages - 1)]
    return tuple(pairwise([None, *links, None]))


class LocalTransport:
    """A `Transport` between threads of this process. The `frames` of its stages may differ in their device."""

    def __init__(self, frames: Frames, ends: QueuePair) -> None:
        self._frames = frames
        self._incoming, self._outgoing = ends
        self._order = ReceiveOrder()
        self._closed = False

    def post_receive(self, plan: StepPlan) -> None:
        assert self._incoming is not None, "the first stage receives nothing"
        self._frames.check(plan)
        self._order.post(plan)

    def receive(self, plan: StepPlan) -> torch.Tensor:
        assert self._incoming is not None, "the first stage receives nothing"
        self._order.check_next(plan)
        self._check_open()
        frame = self._incoming.get()
        self._check_open()
        if frame is None:
            raise TransportError("local: the previous stage is closed")
        sent, next_id = frame.step_id, plan.step_id
        assert sent == next_id, f"the previous stage sent step {sent} where step {next_id} is next"
        self._frames.check(plan, frame.hidden_TD)
        return frame.on(self._frames.device)

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        assert self._outgoing is not None, "the last stage sends nothing"
        self._frames.check(plan, hidden_TD)
        self._check_open()
        self._outgoing.put(_Frame.record(plan.step_id, hidden_TD))
        return hidden_TD.nbytes

    def warm_up(self) -> None:
        pass

    def interrupt(self) -> None:
        self._closed = True
        if self._incoming is not None:
            self._incoming.put(None)

    def close(self) -> None:
        self._closed = True
        for link in (self._incoming, self._outgoing):
            if link is not None:
                link.put(None)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("local: the transport is closed")


def connect(frames: tuple[Frames, ...]) -> tuple[LocalTransport, ...]:
    """Connect the stages of a pipeline within this process. Return a transport for each stage. frames: those of
    each stage, which may differ only in their device."""
    return tuple(map(LocalTransport, frames, make_queues(len(frames))))
