"""The time account of the ledger: where every nanosecond of every stage went.

Each stage's time since the start is cut, without gaps or overlaps, into spans of one kind: busy (by phase),
bubble (by cause, see `causes`) or idle. So busy + bubbles + idle = wall.

A span is *settled* (its kind is final) once all results that decide its kind have been reported. At each stage,
spans are settled in order of time; results of stages may arrive in any order. When a stage is lost, the time from
its last report to the next epoch is `host` if the server has work, else idle. The next epoch may have fewer
stages, or more again (`reshape`): a stage that is not used is idle.

All times are nanoseconds on the head's monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import astuple

from ppserve.core.ledger.causes import (
    BUSY,
    CAUSES,
    FILL_DRAIN,
    GATHER,
    HOST,
    IDLE,
    IMBALANCE,
    KINDS,
    TOKEN_RETURN,
    TRANSFER,
    RecentDelays,
    Span,
    StageVisit,
    cut,
    upstream_wait,
)
from ppserve.core.ledger.steps import Step, Steps
from ppserve.core.plan import StepStamps


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A stage's wall time so far, in nanoseconds: busy time by phase, bubbles by cause, and idle time."""

    busy_ns: dict[str, int]
    bubble_ns: dict[str, int]
    idle_ns: int

    @property
    def computed_ns(self) -> int:
        return sum(self.busy_ns.values())

    @property
    def demand_ns(self) -> int:
        """The time during which the server had work."""
        return self.computed_ns + sum(self.bubble_ns.values())

    @property
    def wall_ns(self) -> int:
        return self.demand_ns + self.idle_ns

    @property
    def busy_share(self) -> float:
        """The share of the time with work in which the stage computed; 0 if there was no work."""
        return self.computed_ns / (self.demand_ns or 1)

    @property
    def idle_share(self) -> float:
        """The share of all time in which the server had no work."""
        return self.idle_ns / (self.wall_ns or 1)

    def bubble_share(self, cause: str | None = None) -> float:
        """Return the share of the time with work that the bubbles of one cause took, or those of all causes
        (None)."""
        lost_ns = sum(self.bubble_ns.values()) if cause is None else self.bubble_ns[cause]
        return lost_ns / (self.demand_ns or 1)

    def since(self, earlier: StageTimes) -> StageTimes:
        """Return the time that was added since `earlier`, a reading of the same stage."""
        return StageTimes(
            {k: v - earlier.busy_ns[k] for k, v in self.busy_ns.items()},
            {k: v - earlier.bubble_ns[k] for k, v in self.bubble_ns.items()},
            self.idle_ns - earlier.idle_ns,
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """A span whose kind is final."""

    stage: int
    span: Span
    step_id: int | None
    """The step that was computed or waited for; None for a wait that ended without one."""


def in_head_clock(stamps: StepStamps, offset_ns: int) -> StepStamps:
    """Convert a stage's stamps to the head's clock, where the stage's clock is `offset_ns` ahead."""
    return StepStamps(*(at - offset_ns for at in astuple(stamps)))


class _Unsettled:
    """A step that is not settled at every stage yet."""

    def __init__(self, step: Step, trigger: _Unsettled | None, num_stages: int) -> None:
        self.step = step
        self.trigger = trigger  # the step that had returned last when this one was sent
        # By stage; None until the step is settled there.
        self.visits: list[StageVisit | None] = [None] * num_stages


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of the server's state, at the time `at`."""

    at: int
    demand: bool
    """Whether, from then on, the server has work and the stage is used."""
    live: bool
    """Whether, from then on, all stages are there."""
    last: _Unsettled | None
    """The step that had returned last before the change."""


class _Timeline:
    """One stage's time. It is settled up to `cursor`; the steps and changes in `queue` come next."""

    def __init__(self, started: int) -> None:
        self.cursor = started
        self.sent = started  # when the stage had sent its latest step
        self.demand = False
        self.live = True
        self.queue: deque[_Unsettled | _Change] = deque()
        self.settled = dict.fromkeys(KINDS, 0)
        self.exported = dict.fromkeys(KINDS, 0)


class TimeAccount:
    """Busy, bubble and idle time of every stage, computed from the book of steps."""

    def __init__(self, steps: Steps, started_ns: int, observer: Callable[[Settled], None] | None = None) -> None:
        """steps: the book of the first shape, which has the most stages. observer: is called with every settled
        span, in order of time for each stage."""
        self.steps = steps
        self.num_stages = steps.num_stages
        self._observer = observer
        self._started = started_ns
        self._demand = False
        self._live = True
        self._last_returned: _Unsettled | None = None
        self._unsettled: dict[int, _Unsettled] = {}
        self._recent = RecentDelays(8 * self.num_stages)
        self._timelines = [_Timeline(started_ns) for _ in range(self.num_stages)]

    # ---- events ----

    def demand_began(self, now_ns: int) -> None:
        """Note that the server has work. It may be called again."""
        self._change(now_ns, True, self._live)

    def demand_ended(self, now_ns: int) -> None:
        """Note that the server has no unfinished request and no step in flight. It may be called again."""
        self._change(now_ns, False, self._live)

    def dispatched(self, step: Step) -> None:
        """Note that a step was sent to all stages."""
        self.demand_began(step.woken_ns)
        unsettled = _Unsettled(step, self._last_returned, self.num_stages)
        self._unsettled[step.plan.step_id] = unsettled
        for timeline in self._timelines[: self.num_stages]:
            timeline.queue.append(unsettled)

    def reported(self, step: Step, stage: int) -> None:
        """Note that a stage's result of a dispatched step is in the book."""
        unsettled = self._unsettled[step.plan.step_id]
        if stage == self.num_stages - 1:
            self._last_returned = unsettled
        if step.is_complete:
            del self._unsettled[step.plan.step_id]
        self._settle_from(stage)

    def stage_lost(self, now_ns: int) -> None:
        """Note that the epoch is lost: results of steps in flight will not arrive. It may be called again."""
        if not self._live:
            return
        for stage, timeline in enumerate(self._timelines):
            while timeline.queue:
                item = timeline.queue.popleft()
                if isinstance(item, _Change):
                    self._settle_change(stage, item)
                elif (stamps := item.step.stamps(stage)) is not None:
                    self._settle_step(stage, item, stamps)
        self._unsettled.clear()
        self._last_returned = None
        self._change(now_ns, self._demand, False)

    def formed(self, now_ns: int) -> None:
        """Note that all stages are ready again. It may be called again."""
        self._change(now_ns, self._demand, True)

    def reshape(self, steps: Steps, now_ns: int) -> None:
        """Note that the next epoch has other layers per stage, and as many stages as this book of steps. No step
        may be in flight."""
        assert not self._unsettled, "steps of the old shape are lost or complete"
        assert steps.num_stages <= len(self._timelines), "the first shape has the most stages"
        self.steps = steps
        self.num_stages = steps.num_stages
        self._last_returned = None
        self._recent = RecentDelays(8 * steps.num_stages)
        self._note_change(now_ns)

    # ---- figures ----

    def settled(self) -> tuple[StageTimes, ...]:
        """Return the settled time of every stage, also of unused ones. Stages may be settled up to different
        times."""
        return tuple(_times(timeline.settled) for timeline in self._timelines)

    def snapshot(self, now_ns: int) -> tuple[StageTimes, ...]:
        """Return the time of every stage up to now, also of unused ones. It sums to the wall time exactly, and no
        figure is less than in an earlier snapshot.

        The kind of unsettled time is estimated. If an estimate turns out to be wrong, the figure that was returned
        is kept, and later time is counted as other kinds until the two agree. So a figure is wrong by at most the
        time that was not settled at earlier snapshots, which is usually one step.
        """
        return tuple(_times(self._export(stage, now_ns)) for stage in range(len(self._timelines)))

    def _export(self, stage: int, now_ns: int) -> dict[str, int]:
        timeline = self._timelines[stage]
        exported = timeline.exported
        new_ns = now_ns - self._started - sum(exported.values())
        if new_ns <= 0:
            return exported
        owed = {kind: ns - exported[kind] for kind, ns in timeline.settled.items()}
        for span in self._estimate(stage, now_ns):
            owed[span.kind] += span.end - span.start
        owed = {kind: ns for kind, ns in owed.items() if ns > 0}
        total = sum(owed.values())
        left = new_ns
        for kind, ns in owed.items():
            share = ns * new_ns // total
            exported[kind] += share
            left -= share
        # Rounding down leaves less than a nanosecond of each kind.
        for kind, ns in owed.items():
            if left and ns * new_ns % total:
                exported[kind] += 1
                left -= 1
        return exported

    def _estimate(self, stage: int, now_ns: int) -> list[Span]:
        """Return the probable kinds of the time since the last settled span."""
        timeline = self._timelines[stage]
        start = timeline.cursor
        waiting = IMBALANCE if self.steps.fills_pipeline else FILL_DRAIN
        head = timeline.queue[0] if timeline.queue else None
        if not isinstance(head, _Unsettled):
            kind = waiting if timeline.live else HOST
            return list(cut(start, now_ns, [(now_ns, kind if timeline.demand else IDLE)]))
        before = head.step.stamps(stage - 1) if stage else None
        here = before.ended if before else head.step.sent_ns if stage == 0 else now_ns
        return list(cut(start, now_ns, [(here, waiting), (now_ns, head.step.phase)]))

    # ---- settling ----

    def _change(self, at: int, demand: bool, live: bool) -> None:
        if (demand, live) == (self._demand, self._live):
            return
        self._demand = demand
        self._live = live
        self._note_change(at)

    def _note_change(self, at: int) -> None:
        for stage, timeline in enumerate(self._timelines):
            has_work = self._demand and stage < self.num_stages
            timeline.queue.append(_Change(at, has_work, self._live, self._last_returned))
        for stage in range(len(self._timelines)):
            self._settle_from(stage)

    def _settle_from(self, stage: int) -> None:
        """Settle what can be settled at a stage, then at the stages that depend on it."""
        while self._settle_stage(stage):
            stage = (stage + 1) % self.num_stages

    def _settle_stage(self, stage: int) -> bool:
        """Settle what can be settled at one stage. Return whether anything was."""
        queue = self._timelines[stage].queue
        progressed = False
        while queue:
            item = queue[0]
            if isinstance(item, _Change):
                self._settle_change(stage, item)
            else:
                stamps = item.step.stamps(stage)
                source = item if stage else item.trigger
                if stamps is None or (source is not None and source.visits[stage - 1] is None):
                    break
                self._settle_step(stage, item, stamps)
            queue.popleft()
            progressed = True
        return progressed

    def _settle_step(self, stage: int, unsettled: _Unsettled, stamps: StepStamps) -> None:
        timeline = self._timelines[stage]
        begun = max(stamps.begun, timeline.cursor)
        ended = max(stamps.ended, begun)
        wait = tuple(self._wait(stage, unsettled, stamps, begun))
        unsettled.visits[stage] = StageVisit(wait, begun, ended)
        if stage == 0:
            unsettled.trigger = None  # otherwise each step would keep all earlier ones in memory
        step = unsettled.step
        result = unsettled.step.result(stage)
        computed = ended - (result.gathered_ns if result else 0)
        for span in (*wait, *cut(begun, ended, [(computed, step.phase), (ended, GATHER)])):
            self._settle(stage, span, step.plan.step_id)
        timeline.cursor = ended
        timeline.sent = stamps.sent

    def _wait(self, stage: int, unsettled: _Unsettled, stamps: StepStamps, end: int) -> list[Span]:
        """Return the spans of a stage's wait for a step, from the stage's cursor to `end`."""
        timeline = self._timelines[stage]
        step = unsettled.step
        at = timeline.cursor
        spans = list(cut(at, end, [(timeline.sent, TRANSFER)]))
        arisen_here = list(spans)
        trigger = unsettled.trigger
        source = unsettled if stage else trigger
        if source and (before := source.visits[stage - 1]):
            wait = upstream_wait(_end(spans, at), end, before, step.fills_pipeline)
            inherited = wait.inherited if stage else self._recent.attribute(wait.inherited)
            spans += [*wait.shared, *inherited, *wait.excess]
            arisen_here += wait.excess
        if stage:
            link = [(stamps.awaited, HOST), (stamps.received, TRANSFER), (end, HOST)]
        else:
            link = [(step.woken_ns, FILL_DRAIN), (end, HOST)]
            if trigger and trigger.step.returned_ns:
                link.insert(0, (trigger.step.returned_ns, TOKEN_RETURN))
        linked = list(cut(_end(spans, at), end, link))
        if step.fills_pipeline:
            self._recent.add(arisen_here + linked)
            if stage == 0:
                self._recent.fade()
        return spans + linked

    def _settle_change(self, stage: int, change: _Change) -> None:
        timeline = self._timelines[stage]
        if not timeline.demand:
            tail = [(change.at, IDLE)]
        elif not (timeline.live and change.live):
            tail = [(change.at, HOST)]
        else:
            tail = [(timeline.sent, TRANSFER)]
            last = change.last
            if last and (stamps := last.step.stamps(self.num_stages - 1)) and last.step.returned_ns:
                tail += [(stamps.ended, FILL_DRAIN), (last.step.returned_ns, TOKEN_RETURN)]
            tail += [(change.at, HOST)]
        for span in cut(timeline.cursor, change.at, tail):
            self._settle(stage, span, None)
        timeline.cursor = max(timeline.cursor, change.at)
        timeline.demand = change.demand
        timeline.live = change.live

    def _settle(self, stage: int, span: Span, step_id: int | None) -> None:
        self._timelines[stage].settled[span.kind] += span.end - span.start
        if self._observer:
            self._observer(Settled(stage, span, step_id))


def _end(spans: list[Span], start: int) -> int:
    return spans[-1].end if spans else start


def _times(ns: dict[str, int]) -> StageTimes:
    return StageTimes({k: ns[k] for k in BUSY}, {k: ns[k] for k in CAUSES}, ns[IDLE])
