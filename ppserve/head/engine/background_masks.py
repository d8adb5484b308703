"""Masks of token filters, made in threads beside the engine's, since one may take long: a grammar's took 78 ms.

One thread at a time asks a request's filter, so a slow filter delays its own request alone. If as many slow ones
run as the pool has threads, they delay other requests with filters too, and nobody else.

Most masks take 50 us. The engine waits a moment for those that it asked for, so that their sequences are in its
next steps, and is woken for the others. For a request whose last mask took longer than SLOW_S it does not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ppserve.core.scheduling.token_filter import Mask, TokenFilter, make_mask
from ppserve.errors import RequestError, RequestFailed

log = logging.getLogger("ppserve.engine")

NUM_THREADS = 32
"""The pool has so many threads, and starts each when it is needed for the first time."""
NUM_AT_ONCE = 2
"""So many threads share the masks that the engine waits for. Once a slow one has held these up, more do."""
SLOW_S = 0.001
"""The engine waits for no mask of a request whose last one took longer."""
MAX_KEPT = 256
"""So many masks of a request are kept until they are fetched. If one more is asked for, the oldest is forgotten,
and made again when it is asked for."""
MAX_FETCHED = 4
"""So many of a request's fetched masks are kept: its other sequences may have the same tokens."""

OnMask = Callable[[float], object]
"""Is called in any thread with the seconds that a mask took."""


@dataclass(slots=True)
class _Wanted:
    """A mask that was asked for."""

    output_ids: tuple[int, ...]
    batch: _Batch | None
    """The masks that the engine waits for together; None if it is woken for this one instead."""
    made: Mask | RequestError | None = None


class _Batch:
    """Masks that the engine waits for together."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.requests: deque[BackgroundMasks] = deque()
        """The requests whose masks no thread makes yet."""
        self._wake = wake
        self._num_left = 0
        self._is_late = False
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
        """Wait for all of them, but no longer than this; the engine is woken for each that comes later."""
        with self._changed:
            self._is_late = not self._changed.wait_for(lambda: not self._num_left, within_s)


class MaskThreads:
    """Makes the masks of all requests of an engine. Its threads start with the first mask."""

    def __init__(self, wake: Callable[[], None], on_mask: OnMask) -> None:
        """wake: wakes the engine, from any thread."""
        self.wake = wake
        self.on_mask = on_mask
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mask")
        # Holds what was asked for since the engine waited last. Only the engine's thread uses it.
        self._batch: _Batch | None = None

    def source(self, token_filter: TokenFilter) -> BackgroundMasks:
        """Return the masks of one request."""
        return BackgroundMasks(token_filter, self)

    def wait(self, within_s: float) -> bool:
        """Wait until the masks that were asked for since the last call are there, but no longer than this.

        The engine is woken for each that comes later. Returns whether any was asked for.
        """
        batch, self._batch = self._batch, None
        if batch is None:
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

    def _start(self, batch: _Batch, most: int) -> None:
        for _ in range(min(most, len(batch.requests))):
            self.start(batch.work)

    def close(self) -> None:
        """Begin no further mask. The pool's threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class BackgroundMasks:
    """A request's masks: a `MaskSource`. The engine's thread does all but the making."""

    def __init__(self, token_filter: TokenFilter, threads: MaskThreads) -> None:
        self._token_filter = token_filter
        self._threads = threads
        self._asked: dict[tuple[int, ...], _Wanted] = {}
        self._fetched: dict[tuple[int, ...], Mask] = {}
        self._lock = threading.Lock()  # for the two below
        self._wanted: deque[_Wanted] = deque()
        self._is_at_work = False
        self.is_slow = False  # set by the thread at work

    def find(self, output_ids: tuple[int, ...]) -> Mask | None:
        """See `MaskSource`."""
        if (fetched := self._fetched.get(output_ids)) is not None:
            return fetched
        wanted = self._asked.get(output_ids)
        if wanted is None:
            self._want(output_ids)
            return None
        made = wanted.made
        if made is None:
            return None
        del self._asked[output_ids]
        if not isinstance(made, Mask):
            raise made
        self._fetched[output_ids] = made
        if len(self._fetched) > MAX_FETCHED:
            del self._fetched[next(iter(self._fetched))]
        return made

    def _want(self, output_ids: tuple[int, ...]) -> None:
        if len(self._asked) == MAX_KEPT:
            del self._asked[next(iter(self._asked))]
        batch = None if self.is_slow else self._threads.batch()
        wanted = self._asked[output_ids] = _Wanted(output_ids, batch)
        if batch is not None:
            batch.add()
        with self._lock:
            self._wanted.append(wanted)
            is_at_work, self._is_at_work = self._is_at_work, True
        if is_at_work:
            return  # the thread that is at work comes to it
        if batch is not None:
            batch.requests.append(self)
        else:
            self._threads.start(self.make_wanted)

    def make_wanted(self) -> None:
        """Make all masks that are wanted, one after the other, in one thread."""
        while (wanted := self._next()) is not None:
            begun_s = time.monotonic()
            wanted.made = self._make(wanted.output_ids)
            took_s = time.monotonic() - begun_s
            self.is_slow = took_s > SLOW_S
            self._threads.on_mask(took_s)
            if wanted.batch is None:
                self._threads.wake()
            else:
                wanted.batch.note_made()

    def _make(self, output_ids: tuple[int, ...]) -> Mask | RequestError:
        try:
            return make_mask(self._token_filter, output_ids)
        except RequestError as error:
            if isinstance(error, RequestFailed):
                log.error("a token filter failed", exc_info=error.__cause__)
            return error

    def _next(self) -> _Wanted | None:
        with self._lock:
            self._is_at_work = bool(self._wanted)
            return self._wanted.popleft() if self._wanted else None
