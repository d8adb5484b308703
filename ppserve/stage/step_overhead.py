"""What a rank computes around a step, beside layers and head, measured where it serves.

Two of its threads take part: the link's, which decodes a plan that comes from another process, and the loop's,
which makes inputs and sends the result. What others help the loop's thread with is not counted.

A lone stage waits for its plan. One in the middle has it, and waits for hidden states with its inputs made: so it
makes them right behind the step before, while what that needs is still in the caches.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from ppserve import wire
from ppserve.core.plan import StepPlan
from ppserve.errors import UsageError
from ppserve.stage.link import HeadLink
from ppserve.stage.step import Stage

# Hears a plan, and sends it again and again; there is always one more than was asked for. When it has a result it
# computes, as the head and callers do.
_HEAD = """
import socket
ours = socket.socket(fileno=0)
plan = ours.recv(int(ours.recv(16, socket.MSG_WAITALL)), socket.MSG_WAITALL)
ours.sendall(plan)
while not ours.sendall(plan) and ours.recv(1 << 16):
    {str(number): number for number in range(20_000)}
"""
_STEPS = 2
_HEARD_WITHIN_S, _DAY_S = 30.0, 86400.0

Measure = Callable[[], float]
Hear = Callable[[], wire.Plan]
Send = Callable[[wire.Result], None]


@contextlib.contextmanager
def process(code: str, stdin: int = subprocess.DEVNULL) -> Iterator[None]:
    """Another, until the end of the block."""
    started = subprocess.Popen([sys.executable, "-ISc", code], stdin=stdin)
    try:
        yield
    finally:
        started.kill()
        started.wait()


@contextlib.contextmanager
def on_lone_stage(bare: Stage, plan: StepPlan, drawing_s: Measure) -> Iterator[Measure]:
    """bare: without layers. drawing_s: measures what the head takes of it. Raises UsageError where it measures."""
    with _served(plan) as (hear, send, computed_s):

        def step() -> float:
            send(wire.Result(bare.step(hear().plan, 0).result))
            return computed_s()

        yield lambda: max(0.0, _per_step(step) - drawing_s())


@contextlib.contextmanager
def on_middle_stage(bare: Stage, plan: StepPlan) -> Iterator[Measure]:
    """bare: without layers, neither the first nor the last. Raises UsageError where it measures."""
    with _served(plan) as (hear, send, computed_s):
        heard: list[wire.Plan] = []
        model, on = bare.model, bare.model.backend
        hidden_TD = torch.zeros(plan.num_tokens, model.arch.width, dtype=on.precision.hidden, device=on.device)
        bare.transport = _Neighbours(lambda: heard.append(hear()), hidden_TD)

        def step() -> float:
            message = heard.pop() if heard else hear()
            send(wire.Result(bare.step(message.plan, 0).result))
            return computed_s()

        yield lambda: _per_step(step)


class _Neighbours:
    """Their hidden states are there when `wait` has returned; what is sent to them they have at once."""

    name = "none"

    def __init__(self, wait: Callable[[], object], hidden_TD: torch.Tensor) -> None:
        self._wait = wait
        self._hidden_TD = hidden_TD

    def post_receive(self, plan: StepPlan) -> None:
        pass

    def receive(self, plan: StepPlan) -> torch.Tensor:
        self._wait()
        return self._hidden_TD

    def send(self, plan: StepPlan, hidden_TD: torch.Tensor) -> int:
        return hidden_TD.nbytes

    def warm_up(self) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def _per_step(step: Measure) -> float:
    """Seconds of one, from what `step` says that all so far have taken."""
    begun_s = step()
    for _ in range(_STEPS):
        ended_s = step()
    return (ended_s - begun_s) / _STEPS


@contextlib.contextmanager
def _served(plan: StepPlan) -> Iterator[tuple[Hear, Send, Measure]]:
    """Waits for the next plan, which is always this one; sends its result; says how long two threads have computed
    so far, the one that asks and the link's."""
    ours, heads = socket.socketpair()
    frame = wire.encode(wire.Plan(plan))
    with ours, process(_HEAD, stdin=heads.fileno()):
        heads.close()
        with contextlib.suppress(OSError):  # the reader hears of it
            ours.sendall(b"%16d" % len(frame) + frame)
        lost = 0, None
        ended = threading.Event()
        readers: list[threading.Thread] = []

        def start(read: Callable[[], None]) -> None:
            def stay() -> None:
                read()
                ended.wait()  # the clock of a thread that is gone cannot be read

            readers.append(threading.Thread(target=stay, name="head-link", daemon=True))
            readers[0].start()

        # It may be silent for as long as other quantities are measured.
        link = HeadLink(ours, lambda epoch: None, lambda: link.inbox.put(lost), _DAY_S, start)

        def hear() -> wire.Plan:
            with contextlib.suppress(queue.Empty):
                _, message = link.inbox.get(timeout=_HEARD_WITHIN_S)
                if isinstance(message, wire.Plan):
                    return message
            problem = f"has ended, or sent none in {_HEARD_WITHIN_S:.0f} s"
            raise UsageError(f"--parallel auto: the process that sends plans to be measured {problem}")

        (reader,) = readers
        assert reader.ident is not None
        reading = time.pthread_getcpuclockid(reader.ident)
        try:
            yield hear, link.send, lambda: time.thread_time() + time.clock_gettime(reading)
        finally:
            ended.set()
    reader.join()
