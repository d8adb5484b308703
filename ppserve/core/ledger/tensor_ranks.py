"""The results of a stage's tensor ranks, put together into one: the ledger and the scheduler know only stages.

A stage computes a step from when its first rank begins to when its last rank has ended. During the rest of that
time, a rank waits for the others: in gathers, before it begins, or after it has ended. The stage's wait is the
average of its ranks', so that computing and waiting make up the whole step.
"""

from __future__ import annotations

from msgspec.structs import replace

from ppserve.core.plan import RankResult, StepResult


class TensorRanks:
    """Collects the results of ranks until those of a stage are complete."""

    def __init__(self, num_stages: int, num_tensor: int) -> None:
        # How long each rank of each stage has waited for the others. It is counted only where a stage has several.
        self.gathered_ns = [[0] * num_tensor for _ in range(num_stages)]
        self._num_tensor = num_tensor
        self._ended = [0] * num_stages
        self._owed_ns = [0] * num_stages
        self._results: dict[tuple[int, int], dict[int, RankResult]] = {}  # of incomplete steps, by step and stage

    def add_result(self, result: RankResult) -> StepResult | None:
        """Add a rank's result. Return the stage's result if all of its ranks have reported; else None."""
        stage, tensor = divmod(result.place, self._num_tensor)
        if self._num_tensor == 1:
            return _result_of(stage, result)
        results = self._results.setdefault((result.step_id, stage), {})
        results[tensor] = result
        if len(results) < self._num_tensor:
            return None
        del self._results[result.step_id, stage]
        return self._together(stage, [results[rank] for rank in range(self._num_tensor)])

    def lost(self) -> None:
        """Forget incomplete results, because the epoch is lost."""
        self._results.clear()

    def owing_places(self, step_id: int, stage: int) -> tuple[int, ...]:
        """Return the places, in the replica, of a stage's ranks that have not reported a step."""
        results = self._results.get((step_id, stage), {})
        return tuple(stage * self._num_tensor + rank for rank in range(self._num_tensor) if rank not in results)

    def _together(self, stage: int, ranks: list[RankResult]) -> StepResult:
        first = min(ranks, key=lambda rank: rank.stamps.begun).stamps
        ended = max(rank.stamps.ended for rank in ranks)
        sent = max(rank.stamps.sent for rank in ranks)
        # A rank may begin before another has ended the previous step. That time belongs to the previous step.
        begun = max(first.begun, self._ended[stage])
        self._ended[stage] = ended
        waited_ns = [ended - begun - rank.computed_ns for rank in ranks]
        for rank, ns in enumerate(waited_ns):
            self.gathered_ns[stage][rank] += ns
        # This is below 0 if a rank had computed most of the step before `begun`; later steps make up for that.
        gathered_ns = sum(waited_ns) // len(ranks) + self._owed_ns[stage]
        self._owed_ns[stage] = min(0, gathered_ns)
        return replace(
            _result_of(stage, ranks[0]),
            stamps=replace(first, begun=begun, ended=ended, sent=sent),
            bytes_sent=sum(rank.bytes_sent for rank in ranks),
            gathered_ns=max(0, gathered_ns),
        )


def _result_of(stage: int, rank: RankResult) -> StepResult:
    """Return a rank's result as that of its stage."""
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
