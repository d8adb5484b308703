"""The books of a replica's steps while its layers stay divided in one way."""

from __future__ import annotations

from ppserve.core.cost_model import StageCost
from ppserve.core.ledger.steps import Step, Steps
from ppserve.core.ledger.tensor_ranks import TensorRanks
from ppserve.core.plan import RankResult, StepPlan, StepResult
from ppserve.core.scheduling.slot_count import SlotCount


class StepBooks:
    """The steps in flight, what each stage's step costs, and how many slots pay.

    All of it belongs to one shape: how many stages there are, and which layers each of them has.
    """

    def __init__(self, num_stages: int, num_tensor: int) -> None:
        self.steps = Steps(num_stages)
        self.costs = tuple(StageCost() for _ in range(num_stages))
        self._slot_count = SlotCount(self.costs)
        self._ranks = TensorRanks(num_stages, num_tensor)

    def send(self, plan: StepPlan, woken_ns: int, sent_ns: int, num_slots: int) -> Step:
        """Note that a plan was sent to all ranks. num_slots: how many steps may be in flight now."""
        return self.steps.sent(plan, woken_ns, sent_ns, num_slots)

    def report(self, of_rank: RankResult, now_ns: int) -> tuple[StepResult, Step] | None:
        """Note a rank's result. Return its stage's result once all of the stage's ranks have reported the step;
        None before that, and for a step that is not in flight."""
        result = self._ranks.add_result(of_rank)
        step = None if result is None else self.steps.reported(result, now_ns)
        return None if result is None or step is None else (result, step)

    def choose_slots(self, result: StepResult, step: Step) -> int:
        """Return how many steps may be in flight, by what is known with this result."""
        return self._slot_count.observe(result, step.fills_slots)

    def measure(self, result: StepResult, step: Step) -> None:
        """Learn from a stage's result what steps cost."""
        seconds = (result.stamps.ended - result.stamps.begun) / 1e9
        self.costs[result.stage].observe(step.size, seconds)

    def lose(self) -> None:
        """Forget the steps in flight: the epoch is lost, and none of them will be reported."""
        self.steps.lost()
        self._ranks.lost()

    def stuck(self, now_ns: int) -> tuple[int, ...]:
        """Return the places of the ranks that have not finished the oldest step in time."""
        found = self.steps.stuck(now_ns)
        return () if found is None else self._ranks.owing_places(*found)

    # ---- figures ----

    @property
    def num_computed(self) -> tuple[int, ...]:
        """How many steps each stage has computed."""
        return tuple(cost.num_observed for cost in self.costs)

    @property
    def gathered_ns(self) -> tuple[tuple[int, ...], ...]:
        """How long each rank of each stage has waited for the stage's other ranks."""
        return tuple(map(tuple, self._ranks.gathered_ns))
