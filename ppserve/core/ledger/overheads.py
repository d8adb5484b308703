"""What a step costs beside computing, in seconds: means of the last steps, without the worst fiftieth.

Means, because throughput follows them; without the worst, because one pause of a second says nothing about steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

from ppserve.core.plan import StepPlan, StepResult, StepStamps

_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class OverheadTimes:
    """head_s: the head's work from waking up to sending a plan. control_s: until stage 0 had read it.
    prepare_s: a free stage with a plan, until it is ready for hidden states. sending_s: it is handing them on.
    transfer_s: from there to received by a stage that waited. return_s: from the last stage's end to the head.
    """

    head_s: float = 0.0
    control_s: float = 0.0
    prepare_s: float = 0.0
    sending_s: float = 0.0
    transfer_s: float = 0.0
    return_s: float = 0.0


class Overheads:
    """Fed like the ledger, with stamps on the head's clock; holds only steps that not all stages reported."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._dispatched_ns: dict[int, int] = {}
        self._stamps: dict[int, dict[int, StepStamps]] = {}
        self._last_dispatched_ns: int | None = None
        self._free_ns = [0] * num_stages
        self._head, self._control, self._prepare, self._sending, self._transfer, self._return = (
            deque[int](maxlen=_REMEMBERED) for _ in range(6)
        )

    def dispatched(self, plan: StepPlan, now_ns: int, woken_ns: int) -> None:
        self._head.append(now_ns - max(woken_ns, self._last_dispatched_ns or woken_ns))
        self._last_dispatched_ns = now_ns
        self._dispatched_ns[plan.step_id] = now_ns
        self._stamps[plan.step_id] = {}

    def reported(self, result: StepResult, now_ns: int) -> None:
        reports = self._stamps.get(result.step_id)
        if reports is None:
            return
        stage, stamps = result.stage, result.stamps
        reports[stage] = stamps
        self._prepare.append(max(0, stamps.awaited - max(stamps.planned, self._free_ns[stage])))
        self._free_ns[stage] = stamps.sent
        if stage == 0:
            self._control.append(stamps.planned - self._dispatched_ns[result.step_id])
        if stage == self._num_stages - 1:
            self._return.append(now_ns - stamps.ended)
        else:
            self._sending.append(stamps.sent - stamps.ended)
        for receiver in (stage, stage + 1):
            if receiver in reports and receiver - 1 in reports:
                sent, received = reports[receiver - 1], reports[receiver]
                if received.awaited <= sent.sent:
                    self._transfer.append(received.received - sent.sent)
        if len(reports) == self._num_stages:
            del self._stamps[result.step_id], self._dispatched_ns[result.step_id]

    def lost(self) -> None:
        """What is in flight will not be reported any more."""
        self._stamps.clear()
        self._dispatched_ns.clear()

    @property
    def times(self) -> OverheadTimes:
        """Zero where nothing was seen yet."""
        seen = (self._head, self._control, self._prepare, self._sending, self._transfer, self._return)
        return OverheadTimes(*(_usual_s(times_ns) for times_ns in seen))


def _usual_s(times_ns: Collection[int]) -> float:
    if not times_ns:
        return 0.0
    usual = sorted(times_ns)[: len(times_ns) - len(times_ns) // 50]
    return max(0.0, fmean(usual) / 1e9)
