"""The state of the pipelines as the page shows it: its script reads `/state.json` every second.

The state holds counters, not rates, so any number of browsers can read at any interval.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ppserve.core.ledger.account import Settled, StageTimes
from ppserve.core.ledger.causes import IDLE, KINDS, MEANINGS
from ppserve.core.ledger.steps import Step
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.head.descriptions import ModelDescription, describe_topology
from ppserve.head.engine.replica import ReplicaReading, StepObserver
from ppserve.head.listener import Ports
from ppserve.head.observe.history import Point
from ppserve.head.observe.page import page_of
from ppserve.head.observe.pages import MakePage, json_page

MAX_SPANS = 1500
"""So many spans are kept for each stage: as many as the picture shows."""
MAX_SEQUENCES = 16_384
"""The callers of so many sequences are remembered: more than run at once, and more than a picture shows."""
WINDOW_S = 10.0

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class RecentSpans(StepObserver):
    """The latest MAX_SPANS spans of every stage. The engine's thread writes them."""

    def __init__(self, num_stages: int, num_replicas: int) -> None:
        self._num_stages = num_stages
        self._spans = [deque[Settled](maxlen=MAX_SPANS) for _ in range(num_replicas * num_stages)]

    def on_span_settled(self, replica: int, settled: Settled) -> None:
        if settled.span.kind != IDLE:
            self._spans[replica * self._num_stages + settled.stage].append(settled)

    def recent(self) -> list[list[Settled]]:
        """Return every stage's spans, oldest first. CPython copies a deque atomically."""
        return [list(spans) for spans in self._spans]


class RecentRequests(StepObserver):
    """Remembers which requests the latest MAX_SPANS steps of every replica computed.

    The engine's thread writes it. A step costs that thread no more than a list of its sequences' ids: who called
    for a sequence is noted once for each.
    """

    def __init__(self, num_replicas: int) -> None:
        self._steps = [deque[tuple[int, list[int]]](maxlen=MAX_SPANS) for _ in range(num_replicas)]
        self._owners: dict[int, tuple[str, str]] = {}  # the caller and its call's name, of the latest sequences

    def on_step_sent(self, replica: int, step: Step, scheduler: Scheduler) -> None:
        sequences = [s.sequence_id for s in step.plan.slices if s.sequence_id is not None]
        for sequence_id in sequences:
            if sequence_id not in self._owners and (request := scheduler.request_of(sequence_id)) is not None:
                self._owners[sequence_id] = request.caller, request.id.rpartition("/")[0]
        while len(self._owners) > MAX_SEQUENCES:
            del self._owners[next(iter(self._owners))]
        self._steps[replica].append((step.plan.step_id, sequences))

    def steps_of(self, caller: str, name: str) -> list[list[int]]:
        """Return the steps of each replica that computed `caller`'s call of this name.

        Other callers' calls may have the same name; their steps are not among these.
        """
        own = {sequence_id for sequence_id, owner in self._owners.copy().items() if owner == (caller, name)}
        return [[step_id for step_id, of in list(steps) if not own.isdisjoint(of)] for steps in self._steps]


def describe_schedule(spans: Iterable[list[Settled]], now_ns: int) -> list[list[tuple[int, int, int, int]]]:
    """List each stage's spans. A span is its kind's number, how many µs before now it began, how many µs it took,
    and the step that it belongs to, or -1."""
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
    links: Mapping[str, str],
    history: Sequence[Point] = (),
) -> dict[str, Any]:
    """Return the state that the page shows. Its counters run since the start of the server.

    load: the result of `Metrics.read_load`. links: those of `links_of`.
    """
    topology, now_ns = describe_topology(readings), readings[0].now_ns
    times = {(reading.replica, stage): of for reading in readings for stage, of in enumerate(reading.times)}
    drawn = dict(zip(times, describe_schedule(spans, now_ns), strict=True))
    places = [(stage.replica, stage.stage) for stage in topology.stages]
    return {
        "now_s": now_ns / 1e9,
        "model": {
            "params": description.num_parameters,
            **{name: getattr(description, name) for name in ("name", "numbers", "deterministic", "version")},
        },
        **load,
        **{name: getattr(topology, name) for name in ("transport", "epoch", "microbatches", "advice", "status")},
        "replicas": [{"replica": reading.replica, "serves": reading.serves} for reading in readings],
        "links": links,
        "history": history,
        "kinds": KINDS,
        "meanings": {kind: asdict(MEANINGS[kind]) for kind in KINDS},
        "stages": [
            {**asdict(stage), "time_s": _seconds(times[place]), "spans": drawn[place]}
            for stage, place in zip(topology.stages, places, strict=True)
        ],
    }


def links_of(ports: Ports, has_page: bool, has_tls: bool) -> dict[str, str]:
    """Return where the page's two views are, for whoever knows the host: the scheme and the port of each."""
    scheme = "https" if has_tls else "http"
    return {"metrics": f"http:{ports.metrics}", **({"ask": f"{scheme}:{ports.http}"} if has_page else {})}


def live_pages(ask_state: Callable[[], dict[str, Any]]) -> dict[str, MakePage]:
    """Return the page of the metrics port and the state that its script reads, by path."""
    page = page_of(asks="", wants_key=False)
    return {"/": lambda: page, "/state.json": json_page(ask_state)}


def _seconds(times: StageTimes) -> dict[str, float]:
    spent_ns = {**times.busy_ns, **times.bubble_ns, IDLE: times.idle_ns}
    return {kind: spent_ns[kind] / 1e9 for kind in KINDS}
