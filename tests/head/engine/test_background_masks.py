"""Masks that are made beside the engine's thread: a filter that does not answer delays its own request alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from ppserve.core.request import FinishReason
from ppserve.core.scheduling.token_filter import Mask
from ppserve.errors import AnswerImpossible, PpserveError, RequestFailed
from ppserve.grammar.state import GrammarFilter
from ppserve.head.engine.background_masks import (
    ALONE,
    MAX_TOGETHER,
    NUM_AT_ONCE,
    SLOW_S,
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

    def wait(self) -> None:
        assert self.turn.acquire(timeout=LIMIT_S), "the engine was not woken"


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def threads(woken: Woken) -> Iterator[MaskThreads]:
    threads = MaskThreads(woken.turn.release, woken.masks.append)
    yield threads
    threads.close()


@dataclass
class Gated:
    """A filter that answers once the gate is open; it must not be asked by two threads at once."""

    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    takes_s: float = 0.0

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        assert self.lock.acquire(blocking=False), "two threads at once"
        try:
            self.asked.append(tuple(output_ids))
            assert self.gate.wait(LIMIT_S)
            time.sleep(self.takes_s)
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
    gated = Gated()
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


def test_masks_of_forms_are_made_together_and_are_those_that_each_form_gives(
    woken: Woken, threads: MaskThreads
) -> None:
    grammars = compiled("regex", "(ab|c)*"), compiled("json_schema", {"type": "integer"})
    sources = [BackgroundMasks(GrammarFilter(grammars[n % 2]), threads) for n in range(MAX_TOGETHER + 3)]
    answers = [*b"abc"], [*b"-17"]
    for length in range(4):
        asked = [each.ask(tuple(answers[n % 2][:length])) for n, each in enumerate(sources)]
        assert threads.wait(LIMIT_S)
        for n, each in enumerate(asked):
            assert each.made == Mask(GrammarFilter(grammars[n % 2]).allowed(answers[n % 2][:length]))
    assert len(woken.masks) == 4 * len(sources)


def test_requests_whose_masks_were_slow_together_are_asked_alone_for_a_while(threads: MaskThreads) -> None:
    masks = BackgroundMasks(GrammarFilter(compiled("regex", "a*")), threads)
    wanted = masks.ask(())
    assert threads.wait(LIMIT_S)
    for times_alone in (ALONE, ALONE**2):
        assert masks.kind is GrammarFilter
        masks.note_made(wanted, Mask(b"\xff"), 2 * SLOW_S, num_together=2)
        assert masks.is_slow
        for _ in range(times_alone):
            assert masks.kind is None
            masks.note_made(wanted, Mask(b"\xff"), SLOW_S / 2, num_together=1)
        assert not masks.is_slow


def test_the_masks_of_a_request_do_not_keep_the_forms_of_others(threads: MaskThreads) -> None:
    grammar, open_ones = compiled("regex", "a*"), deque[BackgroundMasks](maxlen=2)
    all_of_them = list[weakref.ref[BackgroundMasks]]()
    for step in range(12):
        open_ones.append(BackgroundMasks(GrammarFilter(grammar), threads))
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


@dataclass
class Faulty:
    """A filter that is asked together with others; some fail."""

    error: Exception | None = None

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        if self.error is not None:
            raise self.error
        return b"\xff"

    @staticmethod
    def allowed_together(asked: Sequence[tuple[Faulty, Sequence[int]]]) -> list[bytes | PpserveError]:
        return [each.allowed(output_ids) for each, output_ids in asked]


def test_a_filter_that_fails_among_others_ends_its_own_request_alone(threads: MaskThreads) -> None:
    filters = [Faulty(), Faulty(ValueError("a fault")), Faulty()]
    sources = [BackgroundMasks(each, threads) for each in filters]
    assert {each.kind for each in sources} == {Faulty}, "they are asked together"
    first, failed, last = [each.ask(()) for each in sources]
    assert threads.wait(LIMIT_S)
    assert first.made == last.made == Mask(b"\xff")
    assert isinstance(failed.made, RequestFailed)


def test_rules_that_are_no_forms_are_asked_alone(threads: MaskThreads) -> None:
    assert BackgroundMasks(Gated(), threads).kind is None
