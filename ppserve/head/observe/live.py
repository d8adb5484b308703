"""The live page on the metrics port: one file, whose script reads `/state.json` every second.

The state holds counters, not rates, so any number of browsers can read at any interval.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from ppserve.core.ledger.account import Settled, StageTimes
from ppserve.core.ledger.causes import IDLE, KINDS
from ppserve.head.descriptions import ModelDescription, describe_topology
from ppserve.head.engine.replica import ReplicaReading, StepObserver
from ppserve.head.observe.pages import MakePage, Page, json_page

MAX_SPANS = 1500
"""Spans kept per stage, which are as many as the picture shows."""
WINDOW_S = 10.0

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class RecentSpans(StepObserver):
    """The latest MAX_SPANS spans of every stage. Written by the engine's thread."""

    def __init__(self, num_stages: int, num_replicas: int) -> None:
        self._num_stages = num_stages
        self._spans = [deque[Settled](maxlen=MAX_SPANS) for _ in range(num_replicas * num_stages)]

    def on_span_settled(self, replica: int, settled: Settled) -> None:
        if settled.span.kind != IDLE:
            self._spans[replica * self._num_stages + settled.stage].append(settled)

    def recent(self) -> list[list[Settled]]:
        """Every stage's spans, oldest first. CPython copies a deque atomically."""
        return [list(spans) for spans in self._spans]


def describe_schedule(spans: Iterable[list[Settled]], now_ns: int) -> list[list[tuple[int, int, int, int]]]:
    """List each stage's spans: kind, start in µs before now, duration in µs, step or -1."""
    oldest_ns = now_ns - int(WINDOW_S * 1e9)
    return [[_drawn(each, now_ns) for each in of_stage if each.span.end > oldest_ns] for of_stage in spans]


def _drawn(settled: Settled, now_ns: int) -> tuple[int, int, int, int]:
    span = settled.span
    step_id = -1 if settled.step_id is None else settled.step_id
    return _KIND_NUMBERS[span.kind], (now_ns - span.start) // 1000, (span.end - span.start) // 1000, step_id


def read_state(
    readings: Sequence[ReplicaReading],
    description: ModelDescription,
    load: dict[str, Any],
    spans: list[list[Settled]],
) -> dict[str, Any]:
    """The state that the page shows. Counters run since the start. load: the result of `Metrics.read_load`."""
    topology, now_ns = describe_topology(readings), readings[0].now_ns
    times = {(reading.replica, stage): of for reading in readings for stage, of in enumerate(reading.times)}
    drawn = dict(zip(times, describe_schedule(spans, now_ns), strict=True))
    places = [(stage.replica, stage.stage) for stage in topology.stages]
    return {
        "now_s": now_ns / 1e9,
        "model": {
            "params": description.num_parameters,
            **{name: getattr(description, name) for name in ("name", "dtype", "deterministic", "version")},
        },
        **load,
        **{name: getattr(topology, name) for name in ("transport", "epoch", "microbatches", "advice")},
        "replicas": [{"replica": reading.replica, "serves": reading.serves} for reading in readings],
        "kinds": KINDS,
        "stages": [
            {**asdict(stage), "time_s": _seconds(times[place]), "spans": drawn[place]}
            for stage, place in zip(topology.stages, places, strict=True)
        ],
    }


def live_pages(ask_state: Callable[[], dict[str, Any]]) -> dict[str, MakePage]:
    html = resources.files("ppserve").joinpath("head/observe/web/index.html").read_text("utf-8")
    # The rest of its policy is in the page, with the digests of its script and style.
    page = Page("text/html; charset=utf-8", html.encode(), {"Content-Security-Policy": "frame-ancestors 'none'"})
    return {"/": lambda: page, "/state.json": json_page(ask_state)}


def describe_costs(readings: tuple[ReplicaReading, ...]) -> dict[str, Any]:
    """The cost of steps on every stage of the replica that has computed most. It includes the time in which
    tensor ranks wait for each other. Zeros before the first step."""
    reading = max(readings, key=lambda each: sum(each.steps_in_shape))
    scheduling, layouts = reading.decision.scheduling, reading.decision.layouts
    stages = [
        {
            "layers": layout.num_sublayers / 2,
            "steps": steps,
            **{f"{term}_s": seconds for term, seconds in asdict(cost).items()},
        }
        for layout, steps, cost in zip(layouts, reading.steps_in_shape, reading.costs, strict=True)
    ]
    max_chunk = scheduling.prefill_chunk or scheduling.max_auto_chunk
    overheads, tensor = asdict(reading.overheads), len(reading.ranks[0])
    return {"stages": stages, "tensor": tensor, "max_chunk": max_chunk, "overheads": overheads}


def _seconds(times: StageTimes) -> dict[str, float]:
    spent_ns = {**times.busy_ns, **times.bubble_ns, IDLE: times.idle_ns}
    return {kind: spent_ns[kind] / 1e9 for kind in KINDS}
