"""All stages in one process: a queue per link and `tensor.to(device)`. The baseline of the other transports."""

from __future__ import annotations

from itertools import pairwise
from queue import SimpleQueue

import torch

from ppserve.core.plan import StepPlan
from ppserve.errors import TransportError
from ppserve.stage.transport.frames import Frames, ReceiveOrder
from ppserve.stage.transport.handover import Handover

# A frame with its step, so that a skipped step is noticed; None: the other end is closed.
_Frames = SimpleQueue[tuple[int, Handover] | None]


Ends = tuple[_Frames | None, _Frames | None]
"""Of one stage: frames from the previous stage (None: this is the first), and to the next (None: the last)."""


def make_ends(num_stages: int) -> tuple[Ends, ...]:
    """A queue between each two neighbours, as every stage sees them."""
    links: list[_Frames] = [SimpleQueue() for _ in range(num_stages - 1)]
    return tuple(pairwise([None, *links, None]))


class LocalTransport:
    """One stage's links to its neighbours in the same process. `frames` may differ in device between stages."""

    name = "local"

    def __init__(self, frames: Frames, ends: Ends) -> None:
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
        self._order.take(plan)
        self._check_open()
        frame = self._incoming.get()
        self._check_open()
        if frame is None:
            raise TransportError("local: the previous stage is closed")
        step_id, handover = frame
        assert step_id == plan.step_id, f"the previous stage sent step {step_id} where step {plan.step_id} is next"
        self._frames.check(plan, handover.hidden_TD)
        return handover.taken(self._frames.device)

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        assert self._outgoing is not None, "the last stage sends nothing"
        self._frames.check(plan, hidden_TD)
        self._check_open()
        self._outgoing.put((plan.step_id, Handover.of(hidden_TD)))
        return hidden_TD.nbytes

    def warm_up(self) -> None:
        pass

    def interrupt(self) -> None:
        self._closed = True
        if self._incoming is not None:
            self._incoming.put(None)

    def close(self) -> None:
        """Ends the next stage's wait as well: it gets TransportError."""
        self._closed = True
        for link in (self._incoming, self._outgoing):
            if link is not None:
                link.put(None)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("local: the transport is closed")


def connect(frames: tuple[Frames, ...]) -> tuple[LocalTransport, ...]:
    """The transports of a pipeline's stages, first to last; `frames` differ in nothing but their device."""
    return tuple(map(LocalTransport, frames, make_ends(len(frames))))
