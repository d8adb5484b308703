"""The control plane's sockets: which connections are accepted, which end, and why."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from ppserve import wire
from ppserve.core.architecture import Architecture
from ppserve.head.engine.control import Gone, Heard, SocketControlPlane

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)
SECRET = "the secret of this start"
WITHIN_S = 20.0
AGES_S = 3600.0
Events = list[Heard | Gone]


class Rank:
    """A rank's end of a connection. It can send anything."""

    def __init__(self, control: SocketControlPlane) -> None:
        self.connection = socket.create_connection(("127.0.0.1", control.port), timeout=WITHIN_S)
        self._reader = wire.FrameReader(wire.FromHead)

    def say(self, *messages: wire.FromStage) -> None:
        self.connection.sendall(b"".join(map(wire.encode, messages)))

    def hear(self) -> list[object]:
        """Waits for messages and returns them; empty when the head has closed the connection."""
        messages: list[object] = []
        while not messages:
            received = self.connection.recv(1 << 16)
            if not received:
                break
            messages = self._reader.feed(received)
        return messages

    @property
    def is_cut_off(self) -> bool:
        try:
            return self.hear() == []
        except ConnectionResetError:  # what it had said was not read
            return True


def hello(rank: int, token: str = SECRET) -> wire.Hello:
    return wire.Hello(token, rank, 2, "here", "/m", ARCH, "float32", None, False, None)


@contextmanager
def listening(**timeouts: float) -> Iterator[SocketControlPlane]:
    control = SocketControlPlane("127.0.0.1", 2, SECRET, **timeouts)
    try:
        yield control
    finally:
        control.close(0)


@contextmanager
def greeted(control: SocketControlPlane, rank: int) -> Iterator[Rank]:
    with connected(control) as peer:
        peer.say(hello(rank))
        until(control, lambda events: [event.rank for event in events if isinstance(event, Heard)] == [rank])
        yield peer


@contextmanager
def connected(control: SocketControlPlane) -> Iterator[Rank]:
    peer = Rank(control)
    with closing(peer.connection):
        yield peer


def until(control: SocketControlPlane, condition: Callable[[Events], bool]) -> Events:
    """What the head receives, until the condition holds."""
    events: Events = []
    deadline_s = time.monotonic() + WITHIN_S
    while not condition(events):
        assert time.monotonic() < deadline_s, events
        events += control.poll(0.1)
    return events


def told(events: Events) -> list[tuple[int, object]]:
    """Without times: (rank, message or cause)."""
    return [(event.rank, event.message if isinstance(event, Heard) else event.cause) for event in events]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(WITHIN_S)
    return not thread.is_alive()


# ---- who gets in ----


def test_messages_come_in_order_with_their_rank_however_they_are_cut() -> None:
    said = [hello(1), wire.Loading(1, 2), wire.Failed("no memory")]
    stream = b"".join(map(wire.encode, said))
    with listening() as control, connected(control) as peer:
        events: Events = []
        for at in range(0, len(stream), 7):
            peer.connection.sendall(stream[at : at + 7])
            events += control.poll(0)
        events += until(control, lambda more: len(events) + len(more) == 3)
        assert told(events) == [(1, message) for message in said]
        times = [event.arrived_ns for event in events if isinstance(event, Heard)]
        assert times == sorted(times)


REFUSED = {
    "a wrong secret": wire.encode(hello(0, "another secret")),
    "a secret that begins well": wire.encode(hello(0, SECRET[:-1])),
    "a keeper with a wrong secret": wire.encode(wire.GaveUp("another secret", 0, "its stage dies")),
    "a rank below all": wire.encode(hello(-1)),
    "a rank beyond all": wire.encode(hello(2)),
    "no greeting": wire.encode(wire.Heartbeat(1, 2)),
    "a greeting after something else": wire.encode(wire.Heartbeat(1, 2)) + wire.encode(hello(0)),
    "no message": b"GET / HTTP/1.1\r\n\r\n",
    "too long a message": (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little") + b"x",
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_strangers_are_cut_off_and_ranks_stay(words: bytes) -> None:
    with listening() as control, greeted(control, 0) as known, connected(control) as stranger:
        stranger.connection.sendall(words)
        waiting = in_thread(lambda: stranger.is_cut_off)
        events: Events = []
        while waiting.is_alive():
            events += control.poll(0.1)
        assert events == []
        known.say(wire.Heartbeat(1, 2))
        assert told(until(control, bool)) == [(0, wire.Heartbeat(1, 2))]


@pytest.mark.parametrize("words", [b"", wire.encode(hello(0))[:-1]])
def test_a_stranger_that_never_finishes_its_greeting_is_cut_off(words: bytes) -> None:
    with listening(greeting_timeout_s=0.05) as control:
        with greeted(control, 1) as silent, connected(control) as stranger:
            stranger.connection.sendall(words)
            waiting = in_thread(lambda: stranger.is_cut_off)
            while waiting.is_alive():
                assert control.poll(0.1) == []
            # The control: a rank that says nothing has been admitted, and stays.
            silent.say(wire.Heartbeat(1, 2))
            assert told(until(control, bool)) == [(1, wire.Heartbeat(1, 2))]


def test_a_stranger_has_the_whole_greeting_timeout() -> None:
    with listening(greeting_timeout_s=AGES_S) as control, connected(control) as stranger:
        for _ in range(3):
            assert control.poll(0.01) == []
        stranger.say(hello(0))
        assert told(until(control, bool)) == [(0, hello(0))]


# ---- who is gone ----


def test_the_end_of_a_connection_is_an_event() -> None:
    with listening() as control:
        with greeted(control, 0) as peer:
            peer.say(wire.Failed("no memory"))
        events = until(control, lambda events: len(events) == 2)
        assert told(events) == [(0, wire.Failed("no memory")), (0, "exit")]
        control.send(0, wire.Ping(1))
        assert control.poll(0) == []


@pytest.mark.parametrize("end_first", [True, False])
def test_a_new_hello_and_the_old_connections_end_in_one_poll(end_first: bool) -> None:
    with listening() as control, greeted(control, 0) as old, connected(control) as new:
        assert control.poll(WITHIN_S) == []  # `new` is accepted
        steps = [old.connection.close, lambda: new.say(hello(0))]
        for step in steps if end_first else reversed(steps):
            step()
        events = until(control, lambda events: len(events) == 2)
        assert told(events) == [(0, "exit" if end_first else "replaced"), (0, hello(0))]
        new.say(wire.Heartbeat(1, 2))
        assert told(until(control, bool)) == [(0, wire.Heartbeat(1, 2))]


def test_a_new_hello_ends_an_old_connection_that_is_still_open() -> None:
    with listening() as control, greeted(control, 0) as old, connected(control) as new:
        new.say(hello(0))
        assert told(until(control, lambda events: len(events) == 2)) == [(0, "replaced"), (0, hello(0))]
        assert old.is_cut_off
        control.send(0, wire.Ping(7))
        assert new.hear() == [wire.Ping(7)]


def test_a_keeper_that_gives_up_is_heard_and_replaces_nobody() -> None:
    given_up = wire.GaveUp(SECRET, 0, "its stage dies at once")
    with listening() as control, greeted(control, 0) as peer:
        with connected(control) as keeper:
            keeper.say(given_up)
        assert told(until(control, bool)) == [(0, given_up)]
        control.send(0, wire.Ping(7))
        assert peer.hear() == [wire.Ping(7)]
        assert control.poll(0) == []


UNFIT = [b"\x05\x00\x00\x00hello", (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"), wire.encode(wire.Ping(1))]


@pytest.mark.parametrize("words", UNFIT)
def test_a_rank_that_breaks_the_schema_is_gone(words: bytes) -> None:
    with listening() as control, greeted(control, 0) as peer, greeted(control, 1) as other:
        peer.connection.sendall(words)
        assert told(until(control, bool)) == [(0, "protocol")]
        assert peer.is_cut_off
        other.say(wire.Heartbeat(1, 2))
        assert told(until(control, bool)) == [(1, wire.Heartbeat(1, 2))]


def test_a_rank_that_is_dropped_is_gone_once_and_its_process_sees_it() -> None:
    with listening() as control, greeted(control, 0) as peer:
        control.drop(0, "stuck")
        control.drop(0, "stuck")
        control.drop(1, "never came")
        assert told(control.poll(WITHIN_S)) == [(0, "stuck")]
        assert peer.is_cut_off
        assert control.poll(0) == []


# ---- sending ----


def test_everybody_gets_what_is_broadcast() -> None:
    with listening() as control, greeted(control, 0) as first, greeted(control, 1) as second:
        control.broadcast((0, 1), wire.Abandon(3))
        control.send(1, wire.Ping(4))
        assert first.hear() == [wire.Abandon(3)]
        heard = second.hear()
        assert (heard if len(heard) == 2 else heard + second.hear()) == [wire.Abandon(3), wire.Ping(4)]


def test_a_rank_that_does_not_read_is_gone_and_others_are_served() -> None:
    long = wire.Form(1, "x" * (1 << 20), 1, 1, "here", 1)
    with listening(send_timeout_s=0.05) as control, greeted(control, 0), greeted(control, 1) as reader:
        for _ in range(64):
            control.send(0, long)
        assert told(control.poll(WITHIN_S)) == [(0, "timeout")]
        control.broadcast((0, 1), wire.Ping(4))
        assert reader.hear() == [wire.Ping(4)]
        assert control.poll(0) == []


# ---- waking and closing ----


def test_another_thread_ends_a_poll_that_would_last() -> None:
    with listening() as control:
        heard: list[Events] = []
        polling = in_thread(lambda: heard.append(control.poll(AGES_S)))
        assert polling.is_alive()
        control.wake()
        assert has_ended(polling)
        assert heard == [[]]


def test_any_number_of_wakes_before_a_poll_do_not_block() -> None:
    with listening() as control:
        waking = in_thread(lambda: [control.wake() for _ in range(100_000)])
        assert has_ended(waking)
        assert has_ended(in_thread(lambda: control.poll(AGES_S)))


def test_closing_waits_for_ranks_that_hang_up() -> None:
    control = SocketControlPlane("127.0.0.1", 2, SECRET)
    with greeted(control, 0) as first, greeted(control, 1) as second:
        control.broadcast((0, 1), wire.Shutdown(3))
        closing_down = in_thread(lambda: control.close(AGES_S))
        for peer in (first, second):
            assert peer.hear() == [wire.Shutdown(3)]
            assert closing_down.is_alive()
            peer.connection.close()
        assert has_ended(closing_down)


def test_closing_cuts_off_whoever_does_not_hang_up() -> None:
    control = SocketControlPlane("127.0.0.1", 2, SECRET)
    with greeted(control, 0) as peer, connected(control) as stranger, connected(control) as keeper:
        keeper.say(wire.GaveUp(SECRET, 1, "its stage dies"))
        until(control, bool)
        control.close(0.01)
        assert all(end.is_cut_off for end in (peer, stranger, keeper))
        with pytest.raises(ConnectionRefusedError):
            Rank(control)


def test_a_wake_that_comes_after_the_end_does_nothing() -> None:
    with listening() as control:
        pass
    control.wake()
