"""The control plane's sockets: which connections are accepted, which end, and why."""

from __future__ import annotations

import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.control_sockets import SocketControlPlane
from ppserve.process.handshake import make_proof
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello as hello_of
from tests.process.test_network import finds_out_after_20_s

ARCH = gpt2_architecture(4, 64, 4, 128, 300, 300, 256)
SECRET = b"the secret of this server"
WITHIN_S = 20.0
AGES_S = 3600.0
HEARTBEAT = wire.Heartbeat(1, 2)
SOON, LATE = {"handshake_timeout_s": 0.5}, {"handshake_timeout_s": AGES_S}
# Of the sockets' buffers: systems differ, and let them grow to many megabytes.
_SMALL = 1 << 18
Events = list[Received | Disconnected]


class Plane(SocketControlPlane):
    """The head's end, on a free port of this host. It has two ranks."""

    def __init__(self, ends: ExitStack, **settings: float) -> None:
        self.ends = ends
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL)
        self.port = listener.getsockname()[1]
        super().__init__(listener, 2, SECRET, **settings)
        ends.callback(self.close, 0)

    def proven(self, rank: int) -> Rank:
        return Rank(self).prove(self, rank)

    def greeted(self, rank: int) -> Rank:
        peer = self.proven(rank)
        peer.say(hello(rank))
        until(self, lambda events: [event.rank for event in events if isinstance(event, Received)] == [rank])
        return peer

    def serves(self, rank: int, peer: Rank) -> bool:
        """Whether a rank is still heard."""
        peer.say(HEARTBEAT)
        return told(until(self, bool)) == [(rank, HEARTBEAT)]


class Rank:
    """The other end of a connection: a rank, or a stranger."""

    def __init__(self, control: Plane) -> None:
        self.connection = socket.create_connection(("127.0.0.1", control.port), timeout=WITHIN_S)
        control.ends.callback(self.connection.close)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        self._reader = wire.FrameReader(wire.FromHead)
        (self.challenge,) = self.hear_from(control)

    def hear_from(self, control: Plane) -> list[Any]:
        """What the head says when it is polled."""
        while not select.select([self.connection], [], [], 0)[0]:
            control.poll(0.01)
        return self.hear()

    def say(self, *messages: wire.FromStage | wire.Proof) -> None:
        self.connection.sendall(b"".join(map(wire.encode, messages)))

    def proof(self, rank: int, secret: bytes = SECRET) -> wire.Proof:
        """What is right to answer to the head's challenge."""
        return wire.Proof(rank, make_proof("rank", secret, rank, self.challenge.nonce, b"mine"), b"mine")

    def prove(self, control: Plane, rank: int) -> Rank:
        """Prove who it is, up to the head's Welcome."""
        self.say(self.proof(rank))
        welcome = wire.Welcome(make_proof("head", SECRET, rank, self.challenge.nonce, b"mine"))
        assert self.hear_from(control) == [welcome]
        return self

    def hear(self, number: int = 1) -> list[Any]:
        """Messages that arrived; waits for so many. Fewer when the head has hung up."""
        messages: list[Any] = []
        while len(messages) < number and (received := self.connection.recv(1 << 16)):
            messages += self._reader.feed(received)
        return messages

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing comes but, perhaps, a refusal."""
        try:
            return all(isinstance(message, wire.Refused) for message in self.hear()) and self.hear() == []
        except ConnectionResetError:  # what it had said was not read
            return True


def hello(rank: int) -> wire.Hello:
    return hello_of(rank, 2, ARCH)


@pytest.fixture
def control(request: pytest.FixtureRequest) -> Iterator[Plane]:
    """Its settings are the fixture's parameter."""
    with ExitStack() as ends:
        yield Plane(ends, **getattr(request, "param", {}))


def until(control: Plane, condition: Callable[[Events], bool]) -> Events:
    """What the head receives, until the condition holds."""
    events: Events = []
    deadline_s = time.monotonic() + WITHIN_S
    while not condition(events):
        assert time.monotonic() < deadline_s, events
        events += control.poll(0.1)
    return events


def told(events: Events) -> list[tuple[int, object]]:
    """Return (rank, message or cause) of each, without its time."""
    return [(event.rank, event.message if isinstance(event, Received) else event.cause) for event in events]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(WITHIN_S)
    return not thread.is_alive()


# ---- who gets in ----


def test_messages_come_in_order_with_their_rank_however_they_are_cut(control: Plane) -> None:
    said = [hello(1), wire.Loading(1, 2), wire.Failed("no memory")]
    peer = Rank(control)
    stream = wire.encode(peer.proof(1))
    for at in range(0, len(stream), 7):
        peer.connection.sendall(stream[at : at + 7])
        assert control.poll(0) == []
    assert [type(answer) for answer in peer.hear()] == [wire.Welcome]
    stream, events = b"".join(map(wire.encode, said)), list[Received | Disconnected]()
    for at in range(0, len(stream), 7):
        peer.connection.sendall(stream[at : at + 7])
        events += control.poll(0)
    events += until(control, lambda more: len(events) + len(more) == 3)
    assert told(events) == [(1, message) for message in said]
    times = [event.arrived_ns for event in events if isinstance(event, Received)]
    assert times == sorted(times)


def test_the_head_finds_out_after_20_s_that_a_ranks_host_is_gone(control: Plane) -> None:
    Rank(control)
    (peer,) = control._strangers
    assert isinstance(peer.connection, socket.socket)
    assert finds_out_after_20_s(peer.connection)


Says = Callable[[Rank], bytes]
REFUSED: dict[str, Says] = {
    "a wrong secret": lambda peer: wire.encode(peer.proof(0, b"another secret")),
    "another rank's proof": lambda peer: wire.encode(replace(peer.proof(0), rank=1)),
    "a proof for another number": lambda peer: wire.encode(replace(peer.proof(0), nonce=b"yours")),
    "a rank below all": lambda peer: wire.encode(peer.proof(-1)),
    "a rank beyond all": lambda peer: wire.encode(peer.proof(2)),
    "a Hello without a proof": lambda peer: wire.encode(hello(0)),
    "a farewell without a proof": lambda peer: wire.encode(wire.Failed("its stage dies at once")),
    "a part of a frame, and noise": lambda peer: b"\x10\0\0\0abc" + b"\xff" * 5000,
    "a Hello right behind the proof": lambda peer: wire.encode(peer.proof(0)) + wire.encode(hello(0)),
    "two proofs": lambda peer: 2 * wire.encode(peer.proof(0)),
    "no message": lambda peer: b"GET / HTTP/1.1\r\n\r\n",
    "too long a message": lambda peer: (wire.MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "little") + b"x",
}


def cut_off(control: Plane, stranger: Rank) -> Events:
    """What the head hears until it has ended the stranger's connection."""
    waiting, events = in_thread(lambda: stranger.is_cut_off), list[Received | Disconnected]()
    while waiting.is_alive():
        events += control.poll(0.1)
    return events


@pytest.mark.parametrize("says", REFUSED.values(), ids=REFUSED)
def test_strangers_are_cut_off_and_ranks_stay(control: Plane, says: Says) -> None:
    known, stranger = control.greeted(1), Rank(control)
    stranger.connection.sendall(says(stranger))
    assert cut_off(control, stranger) == []
    assert control.serves(1, known)


@pytest.mark.parametrize("is_proven", [False, True])
@pytest.mark.parametrize(
    ("words", "control"),
    [
        (b"", SOON),
        (wire.encode(hello(0))[:-1], SOON),
        (wire.encode(HEARTBEAT), LATE),
        (wire.encode(hello(1)), LATE),
    ],
    indirect=["control"],
    ids=["nothing", "a part", "no Hello", "another rank's"],
)
def test_who_does_not_finish_the_handshake_is_cut_off_and_a_silent_rank_is_not(
    control: Plane, words: bytes, is_proven: bool
) -> None:
    silent = control.greeted(1)
    stranger = control.proven(0) if is_proven else Rank(control)
    stranger.connection.sendall(words)
    assert cut_off(control, stranger) == []
    assert control.serves(1, silent)


@pytest.mark.parametrize("control", [LATE], indirect=True)
def test_of_too_many_strangers_the_oldest_go_and_a_rank_still_gets_in(control: Plane) -> None:
    strangers = [Rank(control) for _ in range(40)]
    rank = control.greeted(0)
    assert strangers[0].is_cut_off
    assert strangers[-19].is_cut_off
    strangers[-1].prove(control, 1).say(hello(1))
    assert told(until(control, bool)) == [(1, hello(1))]
    assert control.serves(0, rank)


def test_without_free_descriptors_ranks_are_served_and_nothing_spins(control: Plane) -> None:
    """The ranks that waited get in when there are descriptors again."""
    rank, stranger = control.greeted(0), Rank(control)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as late:
        late.settimeout(WITHIN_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno(), hard))
        try:
            late.connect(("127.0.0.1", control.port))
            assert control.poll(WITHIN_S) == []
            assert has_ended(in_thread(lambda: control.poll(0.05))), "the listener is not asked again at once"
            assert control.serves(0, rank)
            # To judge a stranger needs no descriptor either; this one claims to be a rank that is there.
            stranger.say(stranger.proof(0))
            assert cut_off(control, stranger) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waiting = in_thread(lambda: late.recv(1))
        while waiting.is_alive():
            assert control.poll(0.05) == []


# ---- who is gone ----


def test_a_new_process_is_accepted_once_the_old_ones_end_was_read(control: Plane) -> None:
    """The new one is told to try again before that. What the old one said last comes before its end."""
    last_words = wire.Broken(1, "reset")
    old, early, new = control.greeted(0), Rank(control), Rank(control)
    early.say(early.proof(0))
    assert cut_off(control, early) == []
    old.say(last_words)
    old.connection.close()
    assert told(until(control, lambda events: len(events) == 2)) == [(0, last_words), (0, "exit")]
    control.send((0,), wire.Ping(1))
    assert control.poll(0) == []
    new.prove(control, 0).say(hello(0))
    assert told(until(control, bool)) == [(0, hello(0))]


def test_of_several_processes_with_the_same_rank_the_first_to_greet_is_it(control: Plane) -> None:
    slow, quick, late = control.proven(0), control.proven(0), Rank(control)
    quick.say(hello(0))
    assert told(until(control, bool)) == [(0, hello(0))]
    slow.say(hello(0))
    assert cut_off(control, slow) == []
    late.say(late.proof(0))
    assert cut_off(control, late) == []
    control.send((0,), wire.Ping(7))
    assert quick.hear() == [wire.Ping(7)]


def test_a_keeper_that_gives_up_is_heard_and_then_has_said_everything(control: Plane) -> None:
    given_up = wire.Failed("its stage dies at once")
    keeper = control.proven(0)
    keeper.say(given_up, wire.Failed("and more"))
    assert told(until(control, bool)) == [(0, given_up)]
    assert keeper.is_cut_off
    assert control.poll(0) == []


UNFIT = [b"\x05\x00\x00\x00hello", (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"), wire.encode(wire.Ping(1))]


@pytest.mark.parametrize("words", UNFIT)
def test_a_rank_that_breaks_the_schema_is_gone(control: Plane, words: bytes) -> None:
    peer, other = control.greeted(0), control.greeted(1)
    peer.connection.sendall(words)
    assert told(until(control, bool)) == [(0, "protocol")]
    assert peer.is_cut_off
    assert control.serves(1, other)


def test_a_rank_that_is_dropped_is_gone_once_and_its_process_sees_it(control: Plane) -> None:
    peer = control.greeted(0)
    control.drop(0, "stuck")
    control.drop(0, "stuck")
    control.drop(1, "never came")
    assert told(control.poll(WITHIN_S)) == [(0, "stuck")]
    assert peer.is_cut_off
    assert control.poll(0) == []


# ---- sending ----


LONG = wire.Form(1, StageLayout(0, 1, 0, 4), 1, 1, "x" * (1 << 20), "here", 1, "here")


def test_nobody_waits_for_a_rank_that_does_not_read_and_later_it_gets_everything(control: Plane) -> None:
    slow, reader = control.greeted(0), control.greeted(1)

    def say() -> None:
        for _ in range(32):
            control.send((0,), LONG)
        control.send((0, 1), wire.Ping(4))

    assert has_ended(in_thread(say))
    assert reader.hear() == [wire.Ping(4)]
    heard = list[object]()
    reading = in_thread(lambda: heard.extend(slow.hear(33)))
    while reading.is_alive():
        assert control.poll(0.05) == []
    assert heard == [LONG] * 32 + [wire.Ping(4)]
    assert control.serves(0, slow)


def test_what_is_kept_for_a_rank_is_bounded(control: Plane) -> None:
    control.greeted(0)
    for _ in range(80):
        control.send((0,), LONG)
    assert told(control.poll(0)) == [(0, "timeout")]


# ---- waking and closing ----


def test_another_thread_ends_a_poll_and_any_number_of_wakes_before_one_do_not_block(control: Plane) -> None:
    heard: list[Events] = []
    polling = in_thread(lambda: heard.append(control.poll(AGES_S)))
    assert polling.is_alive()
    control.wake()
    assert has_ended(polling)
    assert heard == [[]]
    waking = in_thread(lambda: [control.wake() for _ in range(10_000)])  # a socket holds some hundreds
    assert has_ended(waking)
    assert has_ended(in_thread(lambda: control.poll(AGES_S)))
    control.close(0)
    control.wake()  # after the end it does nothing


def test_closing_waits_for_ranks_that_hang_up(control: Plane) -> None:
    peers = control.greeted(0), control.greeted(1)
    control.send((0, 1), wire.Shutdown(3))
    closing_down = in_thread(lambda: control.close(AGES_S))
    for peer in peers:
        assert peer.hear() == [wire.Shutdown(3)]
        assert closing_down.is_alive()
        peer.connection.close()
    assert has_ended(closing_down)


def test_closing_cuts_off_whoever_does_not_hang_up(control: Plane) -> None:
    ends = control.greeted(0), Rank(control), control.proven(1)
    control.close(0.01)
    assert all(end.is_cut_off for end in ends)
    with pytest.raises(ConnectionRefusedError):
        Rank(control)
