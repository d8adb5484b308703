"""What a step costs beside computing, in seconds: means of the last steps, without the worst fiftieth.

Means, because throughput follows them; without the worst, because one pause of a second says nothing about steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean

from ppserve.core.ledger.steps import Step, Steps

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
    """Told by the engine which steps were sent and reported; reads the book."""

    def __init__(self, steps: Steps) -> None:
        self._last_stage = steps.num_stages - 1
        self._last_sent_ns: int | None = None
        self._free_ns = [0] * steps.num_stages
        self._head, self._control, self._prepare, self._sending, self._transfer, self._return = (
            deque[int](maxlen=_REMEMBERED) for _ in range(6)
        )

    def dispatched(self, step: Step) -> None:
        """A step was sent."""
        self._head.append(step.sent_ns - max(step.woken_ns, self._last_sent_ns or step.woken_ns))
        self._last_sent_ns = step.sent_ns

    def reported(self, step: Step, stage: int) -> None:
        """A stage's result of a step is in the book."""
        stamps = step.stamps(stage)
        assert stamps is not None
        self._prepare.append(max(0, stamps.awaited - max(stamps.planned, self._free_ns[stage])))
        self._free_ns[stage] = stamps.sent
        if stage == 0:
            self._control.append(stamps.planned - step.sent_ns)
        if stage == self._last_stage and step.returned_ns is not None:
            self._return.append(step.returned_ns - stamps.ended)
        for transfer in step.transfers(stage):
            self._sending.append(transfer.sending_ns)
            if transfer.latency_ns is not None:
                self._transfer.append(transfer.latency_ns)

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
