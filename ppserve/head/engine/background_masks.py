"""Masks of token filters, made by the engine's thread where that is quick, and else by threads beside it.

Most masks take 5 to 50 us, which is less than it takes to hand one over to a thread. But some take long: a
grammar's took 78 ms. So threads make a request's first masks. Once NUM_PROVING of them in a row were quick, the
engine makes the next ones when it asks for them. If one of these is slow after all, it has held up the engine
once, and threads make many more before the engine makes another one of this request. They also make those of all
other requests until slow masks have taken no more than MOST_LOST of the engine's time: else it would be held up
again and again by callers whose every request has one.

One thread at a time asks a request's filter, so a slow filter delays its own request. If as many slow ones run as
the pool has threads, they delay other requests with filters too, and nobody else. The engine waits a moment for
the masks that threads make, so that their sequences are in its next steps, and is woken for the others. For a
request whose last mask was slow it does not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ppserve.core.scheduling.token_filter import AskedMask, Mask, TokenFilter, make_mask
from ppserve.errors import RequestError, RequestFailed

log = logging.getLogger("ppserve.engine")

NUM_THREADS = 32
"""The pool has so many threads, and starts each when it is needed for the first time."""
NUM_AT_ONCE = 2
"""So many threads share the masks that the engine waits for. Once a slow one has held these up, more do."""
QUICK_S = 0.0002
"""A mask that takes no longer is quick."""
SLOW_S = 0.001
"""A mask that takes longer is slow. The engine waits for no mask of a request whose last one was."""
NUM_PROVING = 4
"""So many quick masks in a row let the engine make those of a request itself. Each slow one among these makes it
so many times more."""
TURN_S = 0.002
"""The engine makes no further mask in a turn in which its masks have taken so long. Threads make the others."""
MOST_LOST = 0.05
"""The share of the engine's computing time that slow masks may take."""
MAX_KEPT = 4
"""So many of a request's last masks are kept: its other sequences may have the same tokens."""

OnMask = Callable[[float], object]
"""Is called in any thread with the seconds that a mask took."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Wanted(AskedMask):
    """A mask that a thread is to make."""

    batch: _Batch
    """The masks that the engine waits for together."""


class _Batch:
    """Masks that the engine waits for together."""

    def __init__(self, wake: Callable[[], None], is_late: bool = False) -> None:
        """is_late: whether the engine does not wait for them, but is woken for each."""
        self.requests: deque[BackgroundMasks] = deque()
        """The requests for whose masks a thread has to be found."""
        self._wake = wake
        self._num_left = 0
        self._is_late = is_late
        self._changed = threading.Condition(threading.Lock())  # for the two above

    def add(self) -> None:
        """Note that a further mask is wanted."""
        with self._changed:
            self._num_left += 1

    def work(self) -> None:
        """Make masks until each request has a thread. Several threads may do so."""
        with suppress(IndexError):
            while True:
                self.requests.popleft().make_wanted()

    def note_made(self) -> None:
        """Note that one of the masks is there."""
        with self._changed:
            self._num_left -= 1
            is_late = self._is_late
            if not self._num_left:
                self._changed.notify()
        if is_late:
            self._wake()

    def wait(self, within_s: float) -> None:
        """Wait for all of them, but no longer than this; the engine is woken for those that come later."""
        with self._changed:
            self._is_late = not self._changed.wait_for(lambda: not self._num_left, within_s)


class MaskThreads:
    """Makes the masks of all requests of an engine. Its threads start with the first mask."""

    def __init__(
        self, wake: Callable[[], None], on_mask: OnMask, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """wake: wakes the engine, from any thread. clock: by which a mask takes its seconds. The default tells the
        time that a thread computes, which other processes do not lengthen."""
        self.wake = wake
        self.on_mask = on_mask
        self.clock = clock
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mask")
        # Only the engine's thread uses these: what was asked for since it waited last, how long the masks of this
        # turn took that it made itself, and until when it makes none because one was slow.
        self._batch: _Batch | None = None
        self._engine_s = self._rests_until_s = 0.0

    def source(self, token_filter: TokenFilter) -> BackgroundMasks:
        """Return the masks of one request."""
        return BackgroundMasks(token_filter, self)

    def wait(self, within_s: float) -> bool:
        """Wait until the masks that were asked for since the last call are there, but no longer than this.

        The engine is woken for each that comes later. Returns whether threads were asked for any. If not, the turn
        ends.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            self._engine_s = 0.0
            return False
        self._start(batch, NUM_AT_ONCE)
        batch.wait(max(0.0, within_s))
        self._start(batch, NUM_THREADS)
        return True

    def batch(self) -> _Batch:
        """Return the masks that the engine will wait for next; another one may join them."""
        if self._batch is None:
            self._batch = _Batch(self.wake)
        return self._batch

    def start(self, work: Callable[[], None]) -> None:
        """Call this in a thread of the pool."""
        self._pool.submit(work)

    @property
    def engine_has_time(self) -> bool:
        """Whether the engine may make a further mask itself in this turn."""
        is_resting = self._rests_until_s > 0 and self.clock() < self._rests_until_s
        return self._engine_s < TURN_S and not is_resting

    def note_engine_made(self, took_s: float) -> None:
        """Note that the engine has made a mask."""
        self._engine_s += took_s
        if took_s > SLOW_S:
            self._rests_until_s = self.clock() + took_s / MOST_LOST

    def _start(self, batch: _Batch, most: int) -> None:
        for _ in range(min(most, len(batch.requests))):
            self.start(batch.work)

    def close(self) -> None:
        """Begin no further mask. The pool's threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class BackgroundMasks:
    """A request's masks: a `MaskSource`. Only the engine's thread asks for them."""

    def __init__(self, token_filter: TokenFilter, threads: MaskThreads) -> None:
        self._token_filter = token_filter
        self._threads = threads
        self._lock = threading.Lock()  # for the two below
        self._wanted: deque[_Wanted] = deque()
        self._is_at_work = False
        # What makes a mask sets the others: the thread at work, or the engine while none is.
        self._made = deque[AskedMask](maxlen=MAX_KEPT)
        self.is_slow = False
        self._num_quick = 0  # in a row
        self._num_proving = NUM_PROVING

    def ask(self, output_ids: tuple[int, ...]) -> AskedMask:
        """See `MaskSource`."""
        # A thread sets _num_quick before it ends, so whether one is at work is looked up first.
        if not self._is_at_work and self._num_quick >= self._num_proving and self._threads.engine_has_time:
            asked = AskedMask(output_ids)
            took_s = self._make(asked)
            self._threads.note_engine_made(took_s)
            if took_s > SLOW_S:
                self._num_proving *= NUM_PROVING
            return asked
        is_slow = self.is_slow
        batch = _Batch(self._threads.wake, is_late=True) if is_slow else self._threads.batch()
        wanted = _Wanted(output_ids, batch=batch)
        batch.add()
        with self._lock:
            self._wanted.append(wanted)
            is_at_work, self._is_at_work = self._is_at_work, True
        if not is_at_work:  # else the thread that is at work comes to it
            if is_slow:
                self._threads.start(self.make_wanted)
            else:
                batch.requests.append(self)
        return wanted

    def make_wanted(self) -> None:
        """Make all masks that are wanted, in this thread. One at least is, and no other thread is at work."""
        while True:
            wanted = self._wanted.popleft()
            self._make(wanted)
            wanted.batch.note_made()
            with self._lock:
                self._is_at_work = bool(self._wanted)
                if not self._is_at_work:
                    return

    def _make(self, asked: AskedMask) -> float:
        """Make a mask, unless one was made lately for the same tokens. Return the seconds that it took."""
        output_ids = asked.output_ids
        for each in self._made:
            if len(each.output_ids) == len(output_ids) and each.output_ids == output_ids:
                asked.made = each.made
                return 0.0
        begun_s = self._threads.clock()
        asked.made = _made(self._token_filter, output_ids)
        took_s = self._threads.clock() - begun_s
        self._made.append(asked)
        self.is_slow = took_s > SLOW_S
        self._num_quick = self._num_quick + 1 if took_s <= QUICK_S else 0
        self._threads.on_mask(took_s)
        return took_s


def _made(token_filter: TokenFilter, output_ids: Sequence[int]) -> Mask | RequestError:
    try:
        return make_mask(token_filter, output_ids)
    except RequestError as error:
        if isinstance(error, RequestFailed):
            log.error("a token filter failed", exc_info=error.__cause__)
        return error
