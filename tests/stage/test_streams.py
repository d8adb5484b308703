"""NCCL's transfers and the stage's computation on two streams, with stand-ins for CUDA's and NCCL's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from parallel_state import ParallelGroup
from ppserve.stage.transport import Frames
from ppserve.stage.transport.nccl import StreamPassage
from ppserve.stage.transport.point_to_point import PointToPoint
from tests.pipelines import WIDTH, step


class Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


def test_streams_hand_buffers_over_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is received into behind the stage's last use of it, at first of its memory; a send goes behind the
    work that makes what is sent."""
    log: list[tuple[str, ...]] = []
    on = ["compute"]

    class Stream:
        def __init__(self, device: object, name: str = "transfers") -> None:
            self.name = name

        def record_event(self) -> str:
            log.append((self.name, "records", f"event {len(log)}"))
            return log[-1][2]

        def wait_event(self, event: str) -> None:
            log.append((self.name, "waits for", event))

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        on.append(stream.name)
        yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "compute"))
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, lambda *args, name=name, **kwargs: log.append((on[-1], name)) or Done())
    group = ParallelGroup((0, 1, 2), 1, None)  # type: ignore[arg-type]
    frames = Frames(WIDTH, torch.float32, 8, depth=1)
    transport = PointToPoint("nccl", frames, group, StreamPassage(frames.device))
    for number in range(3):
        transport.post_receive(step(number, 4))
    for number in range(2):
        transport.receive(step(number, 4))
    transport.send(step(0, 4), torch.zeros(4, WIDTH))
    assert log == [
        *[("compute", "records", "event 0"), ("compute", "records", "event 1")],
        *[("transfers", "waits for", "event 0"), ("transfers", "irecv")],
        *[("transfers", "waits for", "event 1"), ("transfers", "irecv")],
        *[("compute", "records", "event 6"), ("transfers", "waits for", "event 6"), ("transfers", "irecv")],
        *[("compute", "records", "event 9"), ("transfers", "waits for", "event 9"), ("transfers", "isend")],
    ]
