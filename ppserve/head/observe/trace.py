"""The pipeline's schedule as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each stage has a row of steps, named like `2F7` (stage 2, step 7), and a row of waits, named by cause. Arrows are
hidden states sent to the next stage. Sequences and KV use are counters. All times are on the head's clock.

Whole events are appended to a JSON array, at the latest after a second. So the file can be opened while it is
written, and a kill loses one second of it at most.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppserve.core.grid import RankGrid
from ppserve.core.ledger.account import Settled
from ppserve.core.ledger.causes import BUSY, IDLE
from ppserve.core.ledger.steps import Step
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.errors import ConfigError
from ppserve.head.engine.replica import StepObserver

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
_CHUNK_BYTES = 64 << 10
_FLUSH_EVERY_S = 1.0
_STEPS, _WAITS = 0, 1  # ids of two threads in a stage's process, as the viewers call the two rows

Event = dict[str, object]


class Trace(StepObserver):
    """Writes the schedule to a file while it is on. Any thread may use it.

    With a `path` it is on from the beginning. Without one it is off until `toggle`, and then writes to
    ppserve-trace-PID.json in the working directory. Later starts write to new, numbered files. A trace ends with a
    warning at `max_bytes` or when writing fails. Raises ConfigError if `path` cannot be written.
    """

    def __init__(self, grid: RankGrid, path: Path | None, max_bytes: int = MAX_BYTES) -> None:
        self._grid = grid
        self._num_stages = grid.pipeline
        self._num_replicas = grid.data
        self._path = path or Path(f"ppserve-trace-{os.getpid()}.json")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._file: _EventFile | None = None
        self._num_started = 0
        if path is not None:
            try:
                self.start()
            except OSError as error:
                raise ConfigError("--trace", f"cannot write {path}: {error.strerror}") from None

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def start(self) -> Path:
        """Begin a new file, if none is being written. Raises OSError."""
        with self._lock:
            if self._file is None:
                self._file = _EventFile(self._next_path(), self._max_bytes)
                self._num_started += 1
                log.info("tracing to %s", self._file.path)
                self._name_rows(self._file)
            return self._file.path

    def stop(self) -> None:
        with self._writing() as file:
            if file is not None:
                self._complete(file)

    def toggle(self) -> None:
        """Start the trace, or stop it if it is on. If it cannot start, the reason is logged."""
        if self.is_on:
            self.stop()
            return
        try:
            self.start()
        except OSError as error:
            log.error("cannot trace to %s: %s", self._path, error.strerror)

    # ---- events ----

    def on_step_reported(self, replica: int, step: Step, stage: int) -> None:
        plan, stamps = step.plan, step.stamps(stage)
        if self._file is None or stamps is None:
            return
        row: Event = {"pid": self._process(replica, stage), "tid": _STEPS}
        duration_ns = max(stamps.ended - stamps.begun, 0)
        args = {"phase": plan.phase, "tokens": plan.num_tokens, "slices": len(plan.slices), "slot": plan.slot}
        what: Event = {"ph": "X", "name": f"{stage}F{plan.step_id}", "cat": plan.phase, "args": args}
        drawn: Event = {**what, **row, **_at(stamps.begun), "dur": duration_ns / 1e3}
        arrow: Event = {"name": "hidden states", "cat": "activation", **row}
        ended_ns = stamps.begun + duration_ns
        self._write([drawn, *self._arrows(arrow, stage, f"{replica}.{plan.step_id}", stamps.begun, ended_ns)])

    def _arrows(self, arrow: Event, stage: int, step_id: str, begun_ns: int, ended_ns: int) -> Iterator[Event]:
        if stage < self._num_stages - 1:
            yield {"ph": "s", **arrow, "id": f"{step_id}.{stage}", **_at(ended_ns)}
        if stage > 0:
            yield {"ph": "f", "bp": "e", **arrow, "id": f"{step_id}.{stage - 1}", **_at(begun_ns)}

    def on_span_settled(self, replica: int, settled: Settled) -> None:
        span = settled.span
        if self._file is None or span.kind in BUSY or span.kind == IDLE:
            return
        row: Event = {"pid": self._process(replica, settled.stage), "tid": _WAITS}
        duration = {"dur": (span.end - span.start) / 1e3}
        event: Event = {"ph": "X", "name": span.kind, "cat": "bubble", **row, **_at(span.start), **duration}
        if settled.step_id is not None:
            event["args"] = {"for": f"{settled.stage}F{settled.step_id}"}
        self._write([event])

    def on_load(self, replica: int, scheduler: Scheduler, in_flight: int, num_waiting: int) -> None:
        if self._file is None:
            return
        now = {"pid": self._num_replicas * self._num_stages, **_at(time.monotonic_ns())}
        counted = {"running": scheduler.num_running, "waiting": num_waiting}
        which = f" of replica {replica}" if self._num_replicas > 1 else ""
        usage = {"ratio": round(scheduler.kv_usage, 4)}
        sequences: Event = {"ph": "C", "name": f"sequences{which}", **now, "args": counted}
        kv_use: Event = {"ph": "C", "name": f"KV use{which}", **now, "args": usage}
        self._write([sequences, kv_use])

    def _process(self, replica: int, stage: int) -> int:
        return replica * self._num_stages + stage

    # ---- files ----

    def _next_path(self) -> Path:
        """Return the given path for the first trace, then the next free numbered one."""
        if self._num_started == 0:
            return self._path
        numbers = itertools.count(self._num_started + 1)
        numbered = (self._path.with_stem(f"{self._path.stem}-{n}") for n in numbers)
        return next(path for path in numbered if not path.exists())

    def _name_rows(self, file: _EventFile) -> None:
        ranks = f" ({self._grid.tensor} tensor ranks)" if self._grid.tensor > 1 else ""
        titles = [
            f"replica {replica} stage {stage}{ranks}" if self._num_replicas > 1 else f"stage {stage}{ranks}"
            for replica, stage in itertools.product(range(self._num_replicas), range(self._num_stages))
        ]
        for process, title in enumerate([*titles, "head"]):
            of_stage: Event = {"ph": "M", "pid": process}
            file.write({**of_stage, "name": "process_name", "args": {"name": title}})
            file.write({**of_stage, "name": "process_sort_index", "args": {"sort_index": process}})
            for tid, row in ((_STEPS, "steps"), (_WAITS, "waits")) if process < len(titles) else ():
                file.write({**of_stage, "tid": tid, "name": "thread_name", "args": {"name": row}})

    def _write(self, events: list[Event]) -> None:
        with self._writing() as file:
            if file is not None:
                for event in events:
                    file.write(event)
                if file.is_full:
                    self._complete(file)

    @contextmanager
    def _writing(self) -> Iterator[_EventFile | None]:
        """Yield the file, if one is being written. If a write to it fails, it is closed as it is."""
        with self._lock:
            file = self._file
            try:
                yield file
            except OSError as error:
                assert file is not None
                self._file = None
                file.close()
                log.warning("the trace ends: %s: %s", file.path, error.strerror)

    def _complete(self, file: _EventFile) -> None:
        file.complete()
        file.close()
        self._file = None
        log.info("trace written to %s", file.path)


class _EventFile:
    """A JSON array to which whole events are appended. Raises OSError."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._file = path.open("wb", buffering=0)
        self._pending = bytearray(b"[")
        self._separator = b"\n"
        self._num_bytes = 0
        self._flushed_s = time.monotonic()
        self.close = self._file.close

    @property
    def is_full(self) -> bool:
        return self._num_bytes + len(self._pending) >= self._max_bytes

    def write(self, event: Event) -> None:
        self._pending += self._separator + json.dumps(event, separators=(",", ":")).encode()
        self._separator = b",\n"
        if len(self._pending) >= _CHUNK_BYTES or time.monotonic() - self._flushed_s >= _FLUSH_EVERY_S:
            self._flush()

    def complete(self) -> None:
        self._pending += b"\n]\n"
        self._flush()

    def _flush(self) -> None:
        pending = memoryview(bytes(self._pending))
        self._pending.clear()
        self._num_bytes += len(pending)
        self._flushed_s = time.monotonic()
        while pending:
            pending = pending[self._file.write(pending) :]


def _at(ns: int) -> Event:
    return {"ts": ns / 1e3}
