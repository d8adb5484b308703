"""A stage's socket to the head: what enters the inbox, what is answered at once, and when the head is lost."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ppserve import wire
from ppserve.process.lifetime import EXIT_HEAD_GONE
from ppserve.stage.link import SocketHeadLink
from tests.stage.one_stage import WITHIN_S, plan

pytestmark = pytest.mark.timeout(60)


@dataclass
class Ends:
    """A link, the head's end of its socket, and what the link told its owner."""

    link: SocketHeadLink
    head: socket.socket
    ended: queue.SimpleQueue[int]
    abandoned: queue.SimpleQueue[tuple[int, int, bool]]
    reader: wire.FrameReader = field(default_factory=lambda: wire.FrameReader(wire.FromStage))

    def tell(self, message: wire.FromHead) -> None:
        self.head.sendall(wire.encode(message))

    def hear(self) -> list[Any]:
        while not (messages := self.reader.feed(self.head.recv(1 << 16))):
            pass
        return messages

    def inbox(self) -> Any:
        return self.link.inbox.get(timeout=WITHIN_S)[1]


@pytest.fixture
def ends() -> Iterator[Ends]:
    head, stage = socket.socketpair()
    head.settimeout(WITHIN_S)
    ended, abandoned = queue.SimpleQueue[int](), queue.SimpleQueue[tuple[int, int, bool]]()
    with head, stage:
        link = SocketHeadLink(stage, ended.put, end_within_s=0.1)
        link.start(lambda epoch: abandoned.put((epoch, link.abandoned, link.inbox.empty())))
        yield Ends(link, head, ended, abandoned)


def test_a_ping_is_answered_at_once_and_plans_wait_in_order_with_their_times(ends: Ends) -> None:
    """The inbox is not read here, as during a long step."""
    plans = [wire.Plan(plan(1, step_id)) for step_id in range(3)]
    ends.head.sendall(b"".join(map(wire.encode, [*plans, wire.Ping(42)])))
    [heartbeat] = ends.hear()
    assert isinstance(heartbeat, wire.Heartbeat)
    assert heartbeat.echo_ns == 42
    arrived = [ends.link.inbox.get(timeout=WITHIN_S) for _ in plans]
    assert [message for _, message in arrived] == plans
    times = [0, *(at_ns for at_ns, _ in arrived)]
    assert times == sorted(times)
    assert ends.link.inbox.empty()


def test_an_abandoned_epoch_is_known_before_the_message_is_taken(ends: Ends) -> None:
    ends.tell(wire.Abandon(3))
    assert ends.inbox() == wire.Abandon(3)
    assert ends.abandoned.get(timeout=WITHIN_S) == (3, 3, True)


def test_a_cancel_overtakes_the_plans_before_it_and_is_never_seen(ends: Ends) -> None:
    ends.tell(wire.Plan(plan(1, 7)))
    ends.tell(wire.Cancel((7, 8)))
    ends.tell(wire.Plan(plan(1, 9)))
    first, second = ends.inbox(), ends.inbox()
    assert (first.plan.step_id, second.plan.step_id) == (7, 9)
    assert 7 in ends.link.cancelled
    assert 8 in ends.link.cancelled
    assert 9 not in ends.link.cancelled


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x05\x00\x00\x00hello",
        wire.encode(wire.Ready(1)),  # right for a stage, wrong from a head
        (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
    ],
    ids=["none, and the end of the connection", "no MessagePack", "of the other direction", "too large"],
)
def test_a_frame_that_breaks_the_schema_is_the_end(ends: Ends, frame: bytes) -> None:
    ends.head.sendall(frame)
    if not frame:
        ends.head.close()
    assert ends.ended.get(timeout=WITHIN_S) == EXIT_HEAD_GONE
    assert ends.link.inbox.empty()
    if not frame:
        ends.link.send(wire.Ready(1))
        assert ends.ended.get_nowait() == EXIT_HEAD_GONE


def test_after_shutdown_the_end_of_the_connection_means_nothing_and_a_stage_that_goes_on_is_ended(
    ends: Ends,
) -> None:
    ends.tell(wire.Shutdown(76))
    assert ends.inbox() == wire.Shutdown(76)
    ends.head.close()
    assert ends.ended.get(timeout=WITHIN_S) == 76
    assert ends.ended.empty()


def test_a_send_that_blocks_does_not_keep_messages_from_arriving(ends: Ends) -> None:
    """A head that reads nothing for a while: results wait in the socket, messages arrive, frames stay whole."""
    count = 20
    result = wire.Broken(1, "x" * 300_000)
    blocked = threading.Thread(target=lambda: [ends.link.send(result) for _ in range(count)])
    blocked.start()
    ends.tell(wire.Abandon(1))
    assert ends.inbox() == wire.Abandon(1)
    assert blocked.is_alive(), "6 MB fit into the socket: the test shows nothing"
    ends.tell(wire.Ping(42))  # answered in the reader's thread, in between
    heard: list[Any] = []
    while len(heard) < count + 1:
        heard += ends.hear()
    blocked.join(WITHIN_S)
    assert [message for message in heard if isinstance(message, wire.Broken)] == [result] * count
    assert ends.ended.empty()


def test_a_head_that_falls_silent_is_lost_and_one_that_speaks_is_not() -> None:
    head, stage = socket.socketpair()
    ended = queue.SimpleQueue[int]()
    with head, stage:
        link = SocketHeadLink(stage, ended.put, silence_s=0.3)
        link.start(lambda epoch: None)
        head.sendall(wire.encode(wire.Abandon(1)))
        assert link.inbox.get(timeout=WITHIN_S)[1] == wire.Abandon(1)
        assert ended.get(timeout=WITHIN_S) == EXIT_HEAD_GONE
    with pytest.raises(queue.Empty):
        link.inbox.get_nowait()
