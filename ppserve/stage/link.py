"""A stage's end of the control plane, and its socket."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from ppserve import wire
from ppserve.core.plan import StepMasks, StepPlan
from ppserve.errors import TransportError, WireError
from ppserve.process.lifetime import EXIT_HEAD_GONE

# Longer than the head's patience with a silent stage: the head decides.
_SILENCE_S = 15.0
# A stage that was told to exit and is still there is stuck in a step.
_END_WITHIN_S = 10.0

_NUM_CANCELLED = 256  # more than can be in flight
_NUM_MASKED = 4  # also more than can be in flight

Stamped = tuple[int, Any]
"""When a message arrived (monotonic ns), and the message."""


class HeadLink:
    """A stage's end of the control plane, and what all do with the head's messages.

    A Ping is answered at once, so that the head can tell busy from frozen.
    A Cancel takes effect at once, before the plans in the inbox. Masks may be for the step that is computed.
    An Abandon first sets `abandoned` and calls `on_abandon`, as the stage may be waiting for a neighbour.
    """

    def __init__(self, send: Callable[[wire.FromStage], None]) -> None:
        """send: safe in any thread."""
        self.send = send
        self.inbox: queue.SimpleQueue[Stamped] = queue.SimpleQueue()
        """All other messages, in order."""
        self.abandoned = 0
        """The newest epoch that the head has given up."""
        self.cancelled: deque[int] = deque(maxlen=_NUM_CANCELLED)
        """The latest steps sent ahead that need no computing."""
        self.masks: deque[StepMasks] = deque(maxlen=_NUM_MASKED)
        """The masks of the latest steps that were sent ahead without them."""
        self._has_ended = False
        self._changed = threading.Condition()  # of the four before
        self._on_abandon: Callable[[int], None] = lambda _epoch: None

    def start(self, on_abandon: Callable[[int], None]) -> None:
        """on_abandon: called with an epoch, in the thread that hears of its end."""
        self._on_abandon = on_abandon

    def handle_message(self, now_ns: int, message: Any) -> None:
        match message:
            case wire.Ping(sent_ns):
                self.send(wire.Heartbeat(sent_ns, now_ns))
                return
            case wire.Cancel(step_ids):
                with self._changed:
                    self.cancelled.extend(step_ids)
                    self._changed.notify_all()
                return
            case wire.Masks(masks):
                with self._changed:
                    self.masks.append(masks)
                    self._changed.notify_all()
                return
            case wire.Abandon(epoch):
                with self._changed:
                    self.abandoned = epoch
                    self._changed.notify_all()
                self._on_abandon(epoch)
            case wire.Shutdown():
                with self._changed:
                    self._has_ended = True
                    self._changed.notify_all()
        self.inbox.put((now_ns, message))

    def with_masks(self, plan: StepPlan) -> StepPlan:
        """Wait for the masks of a plan that was sent without them; of a cancelled one, whose draws are not used,
        any will do. Raises TransportError once the head has given up its epoch, or has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost(plan) or self.masks_of(plan) is not None)
        if (masks := self.masks_of(plan)) is None:
            raise TransportError("the epoch was lost while a step waited for its masks")
        return plan.with_masks(masks)

    def masks_of(self, plan: StepPlan) -> Iterable[bytes | None] | None:
        """Return the masks of a plan that was sent without them; None while they are not there."""
        if plan.step_id in self.cancelled:
            return repeat(None)
        return next((of.masks for of in self.masks if (of.epoch, of.step_id) == (plan.epoch, plan.step_id)), None)

    def _is_lost(self, plan: StepPlan) -> bool:
        return self._has_ended or self.abandoned >= plan.epoch


class SocketHeadLink(HeadLink):
    """A socket to the head, read from its start on by a thread that stamps each message.

    end: called with EXIT_HEAD_GONE, perhaps by both threads, when the head is gone, is silent for `silence_s` (it
    pings twice a second), or breaks the schema; and with a Shutdown's code if the process has not ended
    `end_within_s` later.
    """

    def __init__(
        self,
        connection: socket.socket,
        end: Callable[[int], object],
        silence_s: float = _SILENCE_S,
        end_within_s: float = _END_WITHIN_S,
    ) -> None:
        super().__init__(self._send)
        connection.settimeout(silence_s)
        self._connection = connection
        self._end = end
        self._end_within_s = end_within_s
        self._sending = threading.Lock()  # the loop sends results, the reader answers pings

    def start(self, on_abandon: Callable[[int], None]) -> None:
        super().start(on_abandon)
        threading.Thread(target=self._read, name="head-link", daemon=True).start()

    def _send(self, message: wire.FromStage) -> None:
        frame = wire.encode(message)
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError:
            self._end(EXIT_HEAD_GONE)

    def _read(self) -> None:
        try:
            code = self._handle_until_shutdown()
            time.sleep(self._end_within_s)
        except (OSError, WireError):
            code = EXIT_HEAD_GONE
        self._end(code)

    def _handle_until_shutdown(self) -> int:
        """Return the code of the Shutdown, the last message. Raises OSError, WireError."""
        reader = wire.FrameReader(wire.FromHead)
        while received := self._connection.recv(1 << 16):
            now_ns = time.monotonic_ns()
            for message in reader.feed(received):
                self.handle_message(now_ns, message)
                if isinstance(message, wire.Shutdown):
                    return message.code
        raise ConnectionError("the head ended the connection")
