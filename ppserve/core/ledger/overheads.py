"""The time that a step takes beside computing, in seconds: means over the last 256 steps without the longest 2%.

Means, because throughput depends on them. The longest are left out because one pause of a second, which has
nothing to do with steps, would outweigh hundreds of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, fields
from statistics import fmean

from ppserve.core.ledger.steps import Step, Steps

_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class OverheadTimes:
    """head_s: from the head's waking up to the plan being sent; what it does then (text, accounts) is in none of
    these. control_s: from there to stage 0 having read it.
    prepare_s: from a stage being free and having the plan to its being ready for hidden states. sending_s: the
    sender is occupied with handing them on. transfer_s: from sent to received, where the receiver was waiting.
    return_s: from the end of the last stage's computation to the head having the result.
    """

    head_s: float = 0.0
    control_s: float = 0.0
    prepare_s: float = 0.0
    sending_s: float = 0.0
    transfer_s: float = 0.0
    return_s: float = 0.0


class Overheads:
    """Measures overheads from the stamps in the book of steps. The replica says when a step has new ones."""

    def __init__(self, steps: Steps) -> None:
        self._last_stage = steps.num_stages - 1
        self._last_sent_ns: int | None = None
        self._free_ns = [0] * steps.num_stages
        self._ns = {field.name: deque[int](maxlen=_REMEMBERED) for field in fields(OverheadTimes)}

    def dispatched(self, step: Step) -> None:
        self._ns["head_s"].append(step.sent_ns - max(step.woken_ns, self._last_sent_ns or step.woken_ns))
        self._last_sent_ns = step.sent_ns

    def reported(self, step: Step, stage: int) -> None:
        stamps = step.stamps(stage)
        assert stamps is not None
        self._ns["prepare_s"].append(max(0, stamps.awaited - max(stamps.planned, self._free_ns[stage])))
        self._free_ns[stage] = stamps.sent
        if stage == 0:
            self._ns["control_s"].append(stamps.planned - step.sent_ns)
        if stage == self._last_stage and step.returned_ns is not None:
            self._ns["return_s"].append(step.returned_ns - stamps.ended)
        for transfer in step.transfers(stage):
            self._ns["sending_s"].append(transfer.sending_ns)
            if transfer.latency_ns is not None:
                self._ns["transfer_s"].append(transfer.latency_ns)

    @property
    def times(self) -> OverheadTimes:
        """Zero where nothing has been measured."""
        return OverheadTimes(**{name: _trimmed_mean_s(times_ns) for name, times_ns in self._ns.items()})


def _trimmed_mean_s(times_ns: Collection[int]) -> float:
    if not times_ns:
        return 0.0
    shortest = sorted(times_ns)[: len(times_ns) - len(times_ns) // 50]
    return max(0.0, fmean(shortest) / 1e9)
