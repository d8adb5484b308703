"""P slots, or P + 1 where tokens come sooner with them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from ppserve.core.plan import Draw, Slice, StepPlan, StepResult, StepStamps
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.slot_count import TURN, SlotCount

DRAW = Draw(SamplingParams())
# Long enough for rare trials to weigh little.
LONG = 60 * TURN


class Machine:
    """A step takes seconds_of(number of slots); the slots share 48 tokens. waiting, fixed: shares of that time, in
    which every stage waits, and which does not depend on the step's size. chosen: steps by slots."""

    def __init__(
        self, num_stages: int, seconds_of: Callable[[int], float], waiting: float = 0.5, fixed: float = 0.1
    ) -> None:
        self.count = SlotCount(num_stages, lambda _: fixed * seconds_of(num_stages))
        self.num_stages, self.seconds_of, self.waiting = num_stages, seconds_of, waiting
        self.now_s = 0.0
        self.chosen: Counter[int] = Counter()

    def run(self, num_steps: int = LONG, was_full: bool = True, prompt: int = 0) -> int:
        """The number of slots that most of these steps were sent with. prompt: tokens of one in each step."""
        self.chosen.clear()
        for _ in range(num_steps):
            slots = self.count.choice
            self.chosen[slots] += 1
            took_s = self.seconds_of(slots)
            begun_s, self.now_s = self.now_s + self.waiting * took_s, self.now_s + took_s
            rows = range(48 // slots)
            slices = [Slice(row, 9, (1,), (), DRAW) for row in rows]
            slices += [Slice(99, 0, (1,) * prompt, (), None)] * (prompt > 0)
            before, begun, now = (round(1e9 * s) for s in (self.now_s - took_s, begun_s, self.now_s))
            stamps = StepStamps(before, before, begun, begun, now, now)
            for stage in range(self.num_stages):
                result = StepResult(0, 0, stage, stamps)
                brought = len(rows) if stage == self.num_stages - 1 else 0
                self.count.observe(StepPlan(0, 0, 0, tuple(slices)), result, was_full, brought)
        return self.chosen.most_common(1)[0][0]


def by_lanes(two: float, three: float) -> Callable[[int], float]:
    """Seconds of a step with two and with three slots; with three each has two thirds of the tokens."""
    return lambda slots: two if slots == 2 else three


@pytest.mark.parametrize(
    ("three", "slots"),
    [(0.50, 3), (0.60, 3), (0.66, 2), (0.70, 2), (1.0, 2)],
)
def test_whichever_gives_tokens_sooner_gets_nearly_all_steps(three: float, slots: int) -> None:
    machine = Machine(2, by_lanes(1.0, three))
    assert machine.run() == slots
    assert machine.chosen[slots] > 0.8 * LONG


def test_it_is_not_tried_where_waiting_is_shorter_than_what_it_costs() -> None:
    for waiting, fixed, num_tried in (0.01, 0.0, 0), (0.2, 0.7, 0), (0.2, 0.2, 1):
        machine = Machine(2, by_lanes(1.0, 0.9), waiting, fixed)
        machine.run()
        assert (machine.chosen[3] > 0) == num_tried


def test_also_on_a_machine_that_changes_its_pace() -> None:
    """Each turn up to twice as slow as the one before: only neighbours in time are compared."""
    chance = random.Random(5)
    for three, slots in (0.55, 3), (0.8, 2):
        pace = [1.0]
        usual = by_lanes(1.0, three)

        def seconds(now: int, usual: Callable[[int], float] = usual, pace: list[float] = pace) -> float:
            pace[0] = min(8.0, max(1.0, pace[0] * chance.choice((0.99, 1.01))))
            return pace[0] * usual(now) * chance.uniform(0.9, 1.1)

        assert Machine(2, seconds).run() == slots


def test_the_choice_follows_the_load() -> None:
    machine = Machine(4, lambda slots: 1.0 if slots == 4 else 0.7)
    assert machine.run() == 5
    machine.seconds_of = lambda slots: 1.0 if slots == 4 else 0.9
    assert machine.run() == 4


def test_steps_with_prompts_are_compared_with_each_other_alone() -> None:
    """Three slots are slower in both kinds of steps. But steps without prompts are faster with three slots than
    steps with prompts are with two: whoever compares these two chooses wrongly."""
    machine = Machine(2, by_lanes(1.0, 0.8))
    slow = by_lanes(3.0, 2.4)
    fast = machine.seconds_of
    for turn in range(60):
        machine.seconds_of = slow if turn % 2 else fast
        machine.run(TURN + 1, prompt=64 * (turn % 2))
    machine.seconds_of = fast
    assert machine.run() == 2


def test_prompts_now_and_then_do_not_keep_it_trying() -> None:
    """Callers who come at the same time: a turn with their prompts is followed by others without. What is tried
    for steps with prompts, and cannot be ended, must not be tried anew whenever such steps come."""
    machine = Machine(2, by_lanes(1.0, 0.8))
    chosen: Counter[int] = Counter()
    for _ in range(60):
        for num_steps, prompt in (TURN, 64), (2 * TURN + TURN // 2, 0):
            machine.run(num_steps, prompt=prompt)
            chosen += machine.chosen
    assert chosen[2] > 0.9 * chosen.total()


def test_want_of_work_decides_nothing() -> None:
    assert Machine(2, by_lanes(1.0, 0.1)).run(was_full=False) == 2


def test_the_pause_after_a_loss_does_not_count() -> None:
    machine = Machine(2, by_lanes(1.0, 0.7))
    for _ in range(60):
        machine.run(TURN // 2)
        machine.count.lost()
        machine.now_s += 1000.0 * (machine.count.choice == 3)
    assert machine.chosen[2] > machine.chosen[3]


def test_a_few_steps_decide_nothing() -> None:
    machine = Machine(2, by_lanes(1.0, 0.1))
    machine.run(TURN)
    assert machine.chosen == {2: TURN}


def test_a_single_stage_needs_no_second_lane() -> None:
    assert Machine(1, lambda _: 1.0).run() == 1
