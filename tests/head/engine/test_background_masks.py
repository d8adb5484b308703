"""Masks that are made beside the engine's thread: a filter that does not answer delays its own request alone."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

from ppserve.core.request import FinishReason
from ppserve.core.scheduling.token_filter import Mask
from ppserve.errors import AnswerImpossible, PpserveError, RequestFailed
from ppserve.grammar.state import GrammarFilter
from ppserve.head.engine.background_masks import (
    MOST_LOST,
    NUM_AT_ONCE,
    NUM_PROVING,
    QUICK_S,
    SLOW_S,
    TURN_S,
    BackgroundMasks,
    MaskThreads,
)
from ppserve.head.engine.streams import OpenRequest
from ppserve.tokenizer import no_tokenizer
from tests.core.scheduling.rig import a_request
from tests.grammar.words import compiled
from tests.head.engine.replica_rig import EngineRig, Reader

LIMIT_S = 60.0


@dataclass
class Woken:
    """What the threads told: the engine's part, without an engine."""

    masks: list[float] = field(default_factory=list)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    now_s: float = 0.0

    def wait(self) -> None:
        assert self.turn.acquire(timeout=LIMIT_S), "the engine was not woken"


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def threads(woken: Woken) -> Iterator[MaskThreads]:
    threads = MaskThreads(woken.turn.release, woken.masks.append, clock=lambda: woken.now_s)
    yield threads
    threads.close()


@dataclass
class Gated:
    """A filter that answers once the gate is open; it must not be asked by two threads at once."""

    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    takes_s: float = 0.0
    woken: Woken | None = None
    """Has the clock by which it takes so long."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        assert self.lock.acquire(blocking=False), "two threads at once"
        try:
            self.asked.append(tuple(output_ids))
            assert self.gate.wait(LIMIT_S)
            if self.woken is not None:
                self.woken.now_s += self.takes_s
            if len(output_ids) == 3:
                raise PpserveError("three are too many")
            return b"\xff"
        finally:
            self.lock.release()


def test_a_slow_filter_delays_its_own_request_alone(woken: Woken, threads: MaskThreads) -> None:
    rig, gated = EngineRig("", max_num_seqs=4, masks=threads), Gated()
    slow = Reader()
    opened = OpenRequest(a_request("slow", max_tokens=3, num_sequences=2), slow.push, no_tokenizer(), (), gated)
    queued = rig.engine.submit(opened)
    rig.engine.turn()
    queued.result(0)
    rig.finish(rig.open(a_request("other", max_tokens=9)))
    assert not slow.outputs
    gated.gate.set()
    while not opened.is_complete:
        if not rig.compute_next():
            woken.wait()
            rig.engine.turn()
    ends = [output for output in slow.outputs if output.finish]
    assert [output.finish for output in ends] == [FinishReason.MAX_TOKENS] * 2
    assert len(woken.masks) == len(gated.asked) == 3, "two equal answers share their masks"
    assert all(seconds >= 0 for seconds in woken.masks)


def test_what_a_filter_raises_ends_the_request_of_its_sequence(woken: Woken, threads: MaskThreads) -> None:
    rig, gated, reader = EngineRig("", masks=threads), Gated(), Reader()
    gated.gate.set()
    opened = OpenRequest(a_request("r", max_tokens=9), reader.push, no_tokenizer(), (), gated)
    rig.engine.submit(opened)
    rig.engine.turn()
    while not opened.is_complete:
        if not rig.compute_next():
            woken.wait()
            rig.engine.turn()
    assert [output.token_id is not None for output in reader.outputs] == [True] * 3 + [False]
    assert isinstance(reader.outputs[-1].error, AnswerImpossible)
    rig.finish(rig.open(a_request("other")))


def test_sequences_with_the_same_tokens_share_a_mask(woken: Woken, threads: MaskThreads) -> None:
    gated = Gated()
    gated.gate.set()
    masks = BackgroundMasks(gated, threads)
    asked = [masks.ask((token_id,)) for token_id in (1, 1, 1, 2, 2)]
    assert threads.wait(LIMIT_S)
    assert [each.made for each in asked] == [Mask(b"\xff")] * 5
    assert gated.asked == [(1,), (2,)]


def test_a_slow_mask_leaves_those_that_the_engine_waits_for_to_other_threads(
    woken: Woken, threads: MaskThreads
) -> None:
    slow = [Gated() for _ in range(NUM_AT_ONCE + 1)]
    quick = Gated()
    quick.gate.set()
    sources = [BackgroundMasks(each, threads) for each in (*slow, quick)]
    asked = [source.ask(()) for source in sources]
    assert threads.wait(SLOW_S)
    woken.wait()
    assert [each.made is not None for each in asked] == [False] * len(slow) + [True]
    for each in slow:
        each.gate.set()
        woken.wait()
    assert all(each.made for each in asked)


def test_the_engine_waits_for_the_masks_that_it_asked_for_and_is_woken_for_late_ones(
    woken: Woken, threads: MaskThreads
) -> None:
    gated = Gated(woken=woken)
    masks = BackgroundMasks(gated, threads)
    assert not threads.wait(LIMIT_S), "none was asked for"
    gated.gate.set()
    asked = masks.ask((0,))
    assert threads.wait(LIMIT_S)
    assert asked.made is not None
    assert not woken.turn.acquire(blocking=False), "nobody is woken for a mask that was waited for"
    gated.gate.clear()
    gated.takes_s = 2 * SLOW_S
    asked = masks.ask((1,))
    assert threads.wait(SLOW_S), "it was asked for, and is not there"
    assert asked.made is None, "the gate is closed"
    assert not threads.wait(LIMIT_S), "it is waited for once"
    gated.gate.set()
    woken.wait()
    assert asked.made is not None
    asked = masks.ask((2,))
    assert not threads.wait(LIMIT_S), "the last one was slow"
    woken.wait()
    assert asked.made is not None


@dataclass
class Timed:
    """A filter that takes as long as it is told, by its own clock, and notes the threads that ask it."""

    now_s: float = 0.0
    takes_s: float = 0.0
    asked_by: list[str] = field(default_factory=list)

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        self.asked_by.append("engine" if threading.current_thread() is threading.main_thread() else "thread")
        self.now_s += self.takes_s
        return bytes([1 << len(output_ids) % 8])

    def threads(self) -> MaskThreads:
        return MaskThreads(lambda: None, lambda seconds: None, clock=lambda: self.now_s)


def made_by(masks: BackgroundMasks, threads: MaskThreads, timed: Timed, length: int) -> str:
    """Ask for a mask in a turn of its own. Return who made it."""
    asked = masks.ask((7,) * length)
    while asked.made is None:
        threads.wait(LIMIT_S)
    threads.wait(LIMIT_S)
    assert asked.made == Mask(bytes([1 << length % 8]))
    return timed.asked_by[-1]


def test_the_engine_makes_the_masks_of_a_request_whose_masks_were_quick() -> None:
    timed = Timed(takes_s=0.9 * QUICK_S)
    threads = timed.threads()
    masks, lengths = BackgroundMasks(timed, threads), count()
    for times in (NUM_PROVING, NUM_PROVING**2, NUM_PROVING**3):
        timed.takes_s = 0.9 * QUICK_S
        assert {made_by(masks, threads, timed, next(lengths)) for _ in range(times)} == {"thread"}
        assert {made_by(masks, threads, timed, next(lengths)) for _ in range(20)} == {"engine"}
        timed.takes_s = 2 * SLOW_S
        assert made_by(masks, threads, timed, next(lengths)) == "engine", "nobody could know"
        timed.now_s += timed.takes_s / MOST_LOST
    threads.close()


def test_slow_masks_take_a_small_share_of_the_engines_time_even_if_every_request_has_one() -> None:
    timed, lost_s = Timed(), 0.0
    threads = timed.threads()
    for _ in range(100):
        masks = BackgroundMasks(timed, threads)
        timed.takes_s = 0.9 * QUICK_S
        for length in range(NUM_PROVING):
            made_by(masks, threads, timed, length)
        timed.takes_s = 10 * SLOW_S
        if made_by(masks, threads, timed, NUM_PROVING) == "engine":
            lost_s += timed.takes_s
    assert 2 * timed.takes_s < lost_s <= MOST_LOST * timed.now_s + timed.takes_s
    threads.close()


def test_masks_that_are_neither_quick_nor_slow_are_made_by_threads() -> None:
    timed = Timed(takes_s=0.9 * QUICK_S)
    threads = timed.threads()
    masks, lengths = BackgroundMasks(timed, threads), count()
    for _ in range(2):
        timed.takes_s = 0.9 * QUICK_S
        assert {made_by(masks, threads, timed, next(lengths)) for _ in range(NUM_PROVING)} == {"thread"}
        assert made_by(masks, threads, timed, next(lengths)) == "engine"
        timed.takes_s = (QUICK_S + SLOW_S) / 2
        assert made_by(masks, threads, timed, next(lengths)) == "engine"
        assert made_by(masks, threads, timed, next(lengths)) == "thread"
    threads.close()


def test_the_engine_makes_as_many_masks_in_a_turn_as_it_has_time_for() -> None:
    timed = Timed(takes_s=0.9 * QUICK_S)
    threads = timed.threads()
    half = math.ceil(TURN_S / timed.takes_s)
    proven = [BackgroundMasks(timed, threads) for _ in range(2 * half)]
    for each in proven:
        for length in range(NUM_PROVING):
            made_by(each, threads, timed, length)
    for turn in range(3):
        timed.asked_by.clear()
        asked = [each.ask((9,) * (turn + 1)) for each in proven]
        while not all(each.made for each in asked):
            assert threads.wait(LIMIT_S)
        proven[0].ask((8,) * (turn + 1))
        while threads.wait(LIMIT_S):
            pass
        assert timed.asked_by == ["engine"] * half + ["thread"] * (half + 1)
    threads.close()


class Stepped:
    """A filter that makes one mask at a time, when it may go on."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        self.begun.release()
        assert self.may_go_on.acquire(timeout=LIMIT_S)
        return b"\xff"


def test_the_engine_makes_no_mask_of_a_request_of_which_a_thread_makes_one(woken: Woken) -> None:
    threads, stepped = MaskThreads(woken.turn.release, woken.masks.append, clock=lambda: 0.0), Stepped()
    masks = BackgroundMasks(stepped, threads)
    for length in range(NUM_PROVING - 1):
        stepped.may_go_on.release()
        masks.ask((1,) * length)
        assert threads.wait(LIMIT_S)
    asked = [masks.ask((2,)), masks.ask((2, 2))]
    for _ in range(NUM_PROVING - 1):
        assert stepped.begun.acquire(timeout=LIMIT_S)
    assert threads.wait(0.0)
    assert stepped.begun.acquire(timeout=LIMIT_S)
    stepped.may_go_on.release()
    assert stepped.begun.acquire(timeout=LIMIT_S)
    assert asked[0].made, "the masks are proven to be quick"
    asked.append(masks.ask((2, 2, 2)))
    assert asked[2].made is None, "the thread at work comes to it"
    for _ in range(2):
        stepped.may_go_on.release()
    threads.wait(LIMIT_S)
    for _ in range(2):
        woken.wait()  # for the two that it waited for no longer
    assert all(each.made for each in asked)
    stepped.may_go_on.release()
    assert masks.ask((3,)).made, "the engine makes it"
    threads.close()


def test_the_masks_of_a_request_do_not_keep_those_of_others(threads: MaskThreads) -> None:
    open_ones = deque[BackgroundMasks](maxlen=2)
    all_of_them = list[weakref.ref[BackgroundMasks]]()
    for step in range(12):
        open_ones.append(BackgroundMasks(GrammarFilter(compiled("regex", "a*")), threads))
        all_of_them.append(weakref.ref(open_ones[-1]))
        for each in open_ones:
            each.ask((ord("a"),) * step)
        assert threads.wait(LIMIT_S)
    del each
    threads.close()
    for thread in threading.enumerate():
        if thread.name.startswith("mask"):
            thread.join(LIMIT_S)
    gc.collect()
    assert sum(kept() is not None for kept in all_of_them) == len(open_ones)


class Faulty:
    """A filter with a fault."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        raise ValueError("a fault")


def test_a_filter_that_fails_ends_its_own_request_alone(threads: MaskThreads) -> None:
    failed = BackgroundMasks(Faulty(), threads).ask(())
    right = BackgroundMasks(Timed(), threads).ask(())
    assert threads.wait(LIMIT_S)
    assert isinstance(failed.made, RequestFailed)
    assert right.made == Mask(b"\1")
