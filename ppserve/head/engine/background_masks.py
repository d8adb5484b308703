"""Masks of token filters, made in threads beside the engine's, as one may take long: a grammar's took 78 ms.

Each request's filter is asked by one thread at a time, so a slow one delays its own request alone. If as many slow
ones run as the pool has threads, they delay other requests with filters too, and nobody else.

Most masks take 50 us. The engine waits a moment for those that it asked for, so that their sequences are in its
next steps, and is woken for the others. For a request whose last mask took longer than SLOW_S it does not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ppserve.core.scheduling.token_filter import Mask, TokenFilter, make_mask
from ppserve.errors import RequestError, RequestFailed

log = logging.getLogger("ppserve.engine")

NUM_THREADS = 32
"""The pool starts each when it is needed for the first time."""
SLOW_S = 0.001
"""The engine waits for no mask of a request whose last one took longer."""
MAX_KEPT = 256
"""Masks of a request that were asked for and not fetched yet. The oldest one beyond these is forgotten, and made
again if it is asked for."""

OnMask = Callable[[float], object]
"""Called in any thread with the seconds that a mask took."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    output_ids: tuple[int, ...]
    mask: Future[Mask]


class MaskThreads:
    """Makes the masks of all requests of an engine. Its threads start with the first mask."""

    def __init__(self, wake: Callable[[], None], on_mask: OnMask) -> None:
        """wake: wakes the engine, from any thread."""
        self._wake = wake
        self.on_mask = on_mask
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mask")
        self._asked: list[Future[Mask]] = []  # since the engine waited last; its thread's alone

    def source(self, token_filter: TokenFilter) -> BackgroundMasks:
        """The masks of one request."""
        return BackgroundMasks(token_filter, self)

    def wait(self, within_s: float) -> bool:
        """Wait until the masks that were asked for since the last call are there, but no longer than this. The
        engine is woken for each that comes later. Returns whether any was asked for."""
        if not self._asked:
            return False
        asked, self._asked = self._asked, []
        for late in wait(asked, max(0.0, within_s)).not_done:
            late.add_done_callback(self.wake_for)
        return True

    def wake_for(self, _mask: Future[Mask]) -> None:
        """Wake the engine for a mask that it did not wait for."""
        self._wake()

    def note_asked(self, mask: Future[Mask]) -> None:
        """The engine has asked for this mask."""
        self._asked.append(mask)

    def start(self, work: Callable[[], None]) -> None:
        """Call this in a thread of the pool."""
        self._pool.submit(work)

    def close(self) -> None:
        """Begins no further mask. The pool's threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class BackgroundMasks:
    """A request's masks: a `MaskSource`. All but the making is the engine thread's."""

    def __init__(self, token_filter: TokenFilter, threads: MaskThreads) -> None:
        self._token_filter = token_filter
        self._threads = threads
        self._made: dict[tuple[int, ...], Future[Mask]] = {}
        self._lock = threading.Lock()  # for the two below
        self._wanted: deque[_Wanted] = deque()
        self._is_at_work = False
        self._is_slow = False  # set by the thread at work

    def find(self, output_ids: tuple[int, ...]) -> Mask | None:
        """See `MaskSource`."""
        mask = self._made.get(output_ids)
        if mask is None:
            self._want(output_ids)
            return None
        if not mask.done():
            return None
        del self._made[output_ids]  # the sequence keeps it
        return mask.result()

    def _want(self, output_ids: tuple[int, ...]) -> None:
        if len(self._made) == MAX_KEPT:
            del self._made[next(iter(self._made))]
        wanted = _Wanted(output_ids, Future())
        self._made[output_ids] = wanted.mask
        if self._is_slow:
            wanted.mask.add_done_callback(self._threads.wake_for)
        else:
            self._threads.note_asked(wanted.mask)
        with self._lock:
            self._wanted.append(wanted)
            is_at_work, self._is_at_work = self._is_at_work, True
        if not is_at_work:
            self._threads.start(self._work)

    def _work(self) -> None:
        """Makes all masks that are wanted, one after the other, in one thread."""
        while (wanted := self._next()) is not None:
            begun_s = time.monotonic()
            made = self._make(wanted.output_ids)
            took_s = time.monotonic() - begun_s
            self._is_slow = took_s > SLOW_S
            self._threads.on_mask(took_s)
            if isinstance(made, Mask):
                wanted.mask.set_result(made)
            else:
                wanted.mask.set_exception(made)

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
