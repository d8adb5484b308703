"""A stage's end of the control plane, and its socket."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ppserve import wire
from ppserve.core.plan import StepMasks, StepPlan
from ppserve.errors import TransportError, WireError
from ppserve.process.lifetime import EXIT_HEAD_GONE

# This is longer than the head waits for a silent stage, because the head decides.
_SILENCE_S = 15.0
# A stage that was told to exit and is still there after so long is stuck in a step.
_END_WITHIN_S = 10.0

_NUM_CANCELLED = 256  # more steps than can be in flight
_NUM_MASKED = 4  # more steps that await masks than can be in flight

Stamped = tuple[int, Any]
"""A message, and when it arrived: on the monotonic clock, in nanoseconds."""


class HeadLink:
    """A stage's end of the control plane. It handles some messages of the head at once, and queues the others.

    A Ping is answered at once, so that the head can tell a busy stage from a frozen one. A Cancel takes effect
    before the plans in the inbox. Masks may be for the step that is being computed. An Abandon first sets
    `abandoned` and calls `on_abandon`, because the stage may be waiting for a neighbour.
    """

    def __init__(self, send: Callable[[wire.FromStage], None]) -> None:
        """send: may be called by any thread."""
        self.send = send
        self.inbox: queue.SimpleQueue[Stamped] = queue.SimpleQueue()
        """The messages that the stage handles, in order."""
        self.abandoned = 0
        """The newest epoch that the head has given up."""
        self.cancelled: deque[int] = deque(maxlen=_NUM_CANCELLED)
        """The ids of the latest steps that were sent ahead and need not be computed."""
        self.masks: deque[StepMasks] = deque(maxlen=_NUM_MASKED)
        """The masks of the latest steps that were sent ahead without them."""
        self._has_ended = False
        self._changed = threading.Condition()  # for the four above
        self._on_abandon: Callable[[int], None] = lambda _epoch: None

    def start(self, on_abandon: Callable[[int], None]) -> None:
        """Begin to receive messages. on_abandon: is called with an epoch that the head has given up, in the thread
        that receives."""
        self._on_abandon = on_abandon

    def handle_message(self, now_ns: int, message: Any) -> None:
        """Handle a message, or put it into the inbox. now_ns: when it arrived."""
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
        """Wait for the masks of a plan that was sent without them, and return the plan with them. For a cancelled
        plan it does not wait, because its draws are not used. Raises TransportError if the head gives up the
        epoch, or ends."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_given_up(plan.epoch) or self.masks_of(plan) is not None)
        if (masks := self.masks_of(plan)) is None:
            raise TransportError("the epoch was lost while a step waited for its masks")
        return plan.with_masks(masks)

    def masks_of(self, plan: StepPlan) -> tuple[bytes | None, ...] | None:
        """Return the masks of a plan that was sent without them; None while they are not there. For a cancelled
        plan, there are masks that allow all ids."""
        if plan.step_id in self.cancelled:
            return (None,) * len(plan.slices)
        return next((of.masks for of in self.masks if (of.epoch, of.step_id) == (plan.epoch, plan.step_id)), None)

    def has_given_up(self, epoch: int) -> bool:
        """Return whether the head has given up an epoch, or ends with all of them."""
        return self._has_ended or self.abandoned >= epoch


class SocketHeadLink(HeadLink):
    """A `HeadLink` over a socket. From `start` on, a thread reads it and stamps each message.

    end: is called with EXIT_HEAD_GONE if the head is gone, is silent for `silence_s` (it pings twice a second), or
    breaks the schema; two threads may do so. It is called with the code of a Shutdown if the process still lives
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
        """Handle messages until the Shutdown, which is the last one, and return its code. Raises OSError,
        WireError."""
        reader = wire.FrameReader(wire.FromHead)
        while received := self._connection.recv(1 << 16):
            now_ns = time.monotonic_ns()
            for message in reader.feed(received):
                self.handle_message(now_ns, message)
                if isinstance(message, wire.Shutdown):
                    return message.code
        raise ConnectionError("the head ended the connection")
