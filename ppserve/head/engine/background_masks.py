"""Masks of token filters, made in threads beside the engine's, since one may take long: a grammar's took 78 ms.

One thread at a time asks a request's filter, so a slow filter delays its own request. If as many slow ones run as
the pool has threads, they delay other requests with filters too, and nobody else.

Most masks take 5 to 50 us, less than it takes to hand one over to a thread. So a thread makes those of several
requests together; a slow one among them delays these, which are then made alone for a while. The engine waits a
moment for the masks that it asked for, so that their sequences are in its next steps, and is woken for the others.
For a request whose last mask took longer than SLOW_S it does not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ppserve.core.scheduling.token_filter import AskedMask, JointFilter, Mask, TokenFilter, make_mask, make_masks
from ppserve.errors import RequestError, RequestFailed

log = logging.getLogger("ppserve.engine")

NUM_THREADS = 32
"""The pool has so many threads, and starts each when it is needed for the first time."""
NUM_AT_ONCE = 2
"""So many threads share the masks that the engine waits for. Once a slow one has held these up, more do."""
MAX_TOGETHER = 32
"""So many masks are made together at most. A slow one delays the others of them."""
SLOW_S = 0.001
"""The engine waits for no mask of a request whose last one took longer."""
ALONE = 16
"""So many masks of each request are made alone after those that were made together were slow, and so many times
more after the next time: for which of them was slow is not known."""
MAX_KEPT = 4
"""So many of a request's last masks are kept: its other sequences may have the same tokens."""

OnMask = Callable[[float], object]
"""Is called in any thread with the seconds that a mask took."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Wanted(AskedMask):
    """A mask that was asked for."""

    batch: _Batch
    """The masks that the engine waits for together."""


class _Batch:
    """Masks that the engine waits for together."""

    def __init__(self, wake: Callable[[], None], is_late: bool = False) -> None:
        """is_late: whether the engine does not wait for them, but is woken for each."""
        self.requests: list[BackgroundMasks] = []
        """The requests for whose masks a thread has to be found."""
        self._chunks: deque[list[BackgroundMasks]] = deque()  # of these, those that no thread has begun
        self._wake = wake
        self._num_left = 0
        self._is_late = is_late
        self._changed = threading.Condition(threading.Lock())  # for the two above

    def add(self) -> None:
        """Note that a further mask is wanted."""
        with self._changed:
            self._num_left += 1

    def divide(self) -> None:
        """Divide the requests into those whose masks a thread makes together."""
        kinds = defaultdict[object, list[BackgroundMasks]](list)
        for each in self.requests:
            kinds[each.kind].append(each)
        for kind, of_kind in kinds.items():
            size = 1 if kind is None else MAX_TOGETHER
            self._chunks.extend(of_kind[i : i + size] for i in range(0, len(of_kind), size))
        self.requests.clear()  # a mask that is kept keeps its batch, which must not keep other requests' forms

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def work(self) -> None:
        """Make masks until each request has a thread. Several threads may do so."""
        with suppress(IndexError):
            while True:
                make_wanted(self._chunks.popleft())

    def note_made(self, num_masks: int) -> None:
        """Note that so many of the masks are there."""
        with self._changed:
            self._num_left -= num_masks
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
        batch.divide()
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
        for _ in range(min(most, batch.num_chunks)):
            self.start(batch.work)

    def close(self) -> None:
        """Begin no further mask. The pool's threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class BackgroundMasks:
    """A request's masks: a `MaskSource`. The engine's thread does all but the making."""

    def __init__(self, token_filter: TokenFilter, threads: MaskThreads) -> None:
        self.token_filter = token_filter
        self._is_joint = isinstance(token_filter, JointFilter)
        self._threads = threads
        self._lock = threading.Lock()  # for the two below
        self._wanted: deque[_Wanted] = deque()
        self._is_at_work = False
        # The thread at work sets the others.
        self._made = deque[AskedMask](maxlen=MAX_KEPT)
        self.is_slow = False
        self._num_alone = 0
        self._num_alone_next = ALONE

    @property
    def kind(self) -> object:
        """The kind of filters whose masks may be made together with the next one; None: it is made alone."""
        return None if self._num_alone or not self._is_joint else type(self.token_filter)

    def ask(self, output_ids: tuple[int, ...]) -> AskedMask:
        """See `MaskSource`."""
        is_slow = self.is_slow
        batch = _Batch(self._threads.wake, is_late=True) if is_slow else self._threads.batch()
        wanted = _Wanted(output_ids, batch=batch)
        batch.add()
        with self._lock:
            self._wanted.append(wanted)
            is_at_work, self._is_at_work = self._is_at_work, True
        if not is_at_work:  # else the thread that is at work comes to it
            if is_slow:
                self._threads.start(partial(make_wanted, [self]))
            else:
                batch.requests.append(self)
        return wanted

    def next(self) -> _Wanted:
        """Return the mask that is to be made next. Only the thread that is at work may call this."""
        return self._wanted.popleft()

    def has_next(self) -> bool:
        """Return whether there is a further one. If not, the thread that asks is not at work any more."""
        with self._lock:
            self._is_at_work = bool(self._wanted)
            return self._is_at_work

    def has_made(self, wanted: _Wanted) -> bool:
        """Return whether a mask was made lately for the same tokens, which is then the one that is wanted."""
        for each in self._made:
            if len(each.output_ids) == len(wanted.output_ids) and each.output_ids == wanted.output_ids:
                wanted.made = each.made
        return wanted.made is not None

    def note_made(self, wanted: _Wanted, mask: Mask | RequestError, took_s: float, num_together: int) -> None:
        """Note that a mask was made. took_s: the mean of those that were made together."""
        wanted.made = mask
        self._made.append(wanted)
        self.is_slow = took_s > SLOW_S
        if self._num_alone:
            self._num_alone -= 1
        elif self.is_slow and num_together > 1:
            self._num_alone, self._num_alone_next = self._num_alone_next, self._num_alone_next * ALONE
        self._threads.on_mask(took_s)


def make_wanted(requests: Sequence[BackgroundMasks]) -> None:
    """Make all masks that are wanted of these requests, in this thread: one of each together, then the next ones.

    Each of them wants one at least.
    """
    while requests:
        asked = [(each, each.next()) for each in requests]
        missing = [(each, wanted) for each, wanted in asked if not each.has_made(wanted)]
        begun_s = time.monotonic()
        made = _made(missing)
        took_s = (time.monotonic() - begun_s) / max(1, len(missing))
        for (each, wanted), mask in zip(missing, made, strict=True):
            each.note_made(wanted, mask, took_s, len(missing))
        for batch, num_masks in Counter(wanted.batch for _, wanted in asked).items():
            batch.note_made(num_masks)
        requests = [each for each, _ in asked if each.has_next()]


def _made(asked: Sequence[tuple[BackgroundMasks, _Wanted]]) -> Sequence[Mask | RequestError]:
    filters = [(request.token_filter, wanted.output_ids) for request, wanted in asked]
    if len(filters) > 1:
        with suppress(Exception):  # one of them is at fault, which the others must not suffer for
            return make_masks(filters)
    return [_made_alone(*each) for each in filters]


def _made_alone(token_filter: TokenFilter, output_ids: Sequence[int]) -> Mask | RequestError:
    try:
        return make_mask(token_filter, output_ids)
    except RequestError as error:
        if isinstance(error, RequestFailed):
            log.error("a token filter failed", exc_info=error.__cause__)
        return error
