"""The results of a stage's tensor ranks as one: the ledger, like the scheduler, knows stages.

A stage computes a step from when its first rank begins to when its last has ended. The rest of that time a rank
waits for the others: inside gathers, before it begins or after it has ended. A stage waits as long as its ranks do
on average, so computing and waiting are the whole step.
"""

from __future__ import annotations

from dataclasses import replace

from ppserve.core.plan import RankResult, StepResult


class TensorRanks:
    """Collects the results of ranks until a stage's are complete."""

    def __init__(self, num_stages: int, num_tensor: int) -> None:
        # Of each stage, how long each of its ranks has waited for the others.
        self.gathered_ns = [[0] * num_tensor for _ in range(num_stages)]
        self._num_tensor = num_tensor
        self._ended = [0] * num_stages
        self._owed_ns = [0] * num_stages
        self._came: dict[tuple[int, int], dict[int, RankResult]] = {}

    def add_result(self, result: RankResult) -> StepResult | None:
        """Add a rank's result. Return its stage's result once all of the stage's ranks have reported."""
        stage, tensor = divmod(result.place, self._num_tensor)
        if self._num_tensor == 1:
            return _result_of(stage, result)
        came = self._came.setdefault((result.step_id, stage), {})
        came[tensor] = result
        if len(came) < self._num_tensor:
            return None
        del self._came[result.step_id, stage]
        return self._together(stage, [came[rank] for rank in range(self._num_tensor)])

    def lost(self) -> None:
        """The epoch is lost: no result of it will come."""
        self._came.clear()

    def owing_places(self, step_id: int, stage: int) -> tuple[int, ...]:
        """The places, in the replica, of a stage's ranks that have not reported a step."""
        came = self._came.get((step_id, stage), {})
        return tuple(stage * self._num_tensor + rank for rank in range(self._num_tensor) if rank not in came)

    def _together(self, stage: int, ranks: list[RankResult]) -> StepResult:
        first = min(ranks, key=lambda rank: rank.stamps.begun).stamps
        ended = max(rank.stamps.ended for rank in ranks)
        sent = max(rank.stamps.sent for rank in ranks)
        # A rank may begin before another has ended the step before: that time is that step's.
        begun = max(first.begun, self._ended[stage])
        self._ended[stage] = ended
        waited_ns = [ended - begun - rank.computed_ns for rank in ranks]
        for rank, ns in enumerate(waited_ns):
            self.gathered_ns[stage][rank] += ns
        # Less than 0 where a rank had computed most of it before `begun`; the steps after it make up for that.
        gathered_ns = sum(waited_ns) // len(ranks) + self._owed_ns[stage]
        self._owed_ns[stage] = min(0, gathered_ns)
        return replace(
            _result_of(stage, ranks[0]),
            stamps=replace(first, begun=begun, ended=ended, sent=sent),
            bytes_sent=sum(rank.bytes_sent for rank in ranks),
            gathered_ns=max(0, gathered_ns),
        )


def _result_of(stage: int, rank: RankResult) -> StepResult:
    """A stage's result that is one of its ranks'."""
    return StepResult(
        epoch=rank.epoch,
        step_id=rank.step_id,
        stage=stage,
        stamps=rank.stamps,
        bytes_sent=rank.bytes_sent,
        drawn=rank.drawn,
        scored=rank.scored,
        gathered_ns=rank.gathered_ns,
    )
