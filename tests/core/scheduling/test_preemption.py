"""A caller who has nothing does not wait for a place that others hold. Whoever is preempted loses no token."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import count, pairwise

import pytest

from ppserve.core.request import FinishReason
from ppserve.core.scheduling.preemption import MAX_SAVED, MIN_GAIN
from ppserve.core.scheduling.sequence import SequenceGroup
from ppserve.head.limits import MOST_URGENT
from tests.core.scheduling.invariants import check_scheduler
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill
from tests.core.scheduling.test_scheduler_walk import Oracle
from tests.slow import quick_first


def a_full_rig(callers: str = "gggg", max_tokens: int = 60, **config: object) -> SchedulerRig:
    """All places are taken, and everyone has some tokens."""
    rig = a_rig(num_stages=1, max_num_seqs=len(callers), **config)
    for number, caller in enumerate(callers):
        rig.now += 1.0
        assert rig.submit(a_request(f"{caller}{number}", max_tokens=max_tokens, caller=caller))
    turn(rig, 10)
    return rig


def turn(rig: SchedulerRig, times: int = 1) -> None:
    for _ in range(times):
        fill(rig)
        if rig.pipeline.num_in_flight:
            rig.commit_one()
        check_scheduler(rig.scheduler)


def running(rig: SchedulerRig) -> set[str]:
    return {sequence.request.id for sequence in rig.scheduler._running_set.running}


def waits(rig: SchedulerRig, name: str) -> bool:
    group = rig.scheduler.request_queue.groups[name]
    return group in rig.scheduler.request_queue.queue or name in rig.scheduler.request_queue._returned


def preempted(rig: SchedulerRig) -> list[SequenceGroup]:
    return [group for group in rig.scheduler.request_queue.groups.values() if group.num_preempted]


def test_a_caller_with_nothing_takes_the_place_of_the_latest_of_who_has_most() -> None:
    rig = a_full_rig("ggghh")
    rig.submit(a_request("light", max_tokens=3, caller="light"))
    turn(rig)
    assert running(rig) == {"g0", "g1", "h3", "h4", "light"}
    assert [group.key for group in preempted(rig)] == ["g2"]
    rig.drain()
    rig.check_answers()


def test_the_displaced_one_is_back_as_soon_as_a_place_is_free_and_before_all_who_wait() -> None:
    rig = a_full_rig()
    rig.submit(a_request("g4", caller="g"))
    rig.submit(a_request("light", max_tokens=3, caller="light"))
    turn(rig)
    assert waits(rig, "g3")
    turn(rig, 4)
    assert "light" not in rig.scheduler.request_queue.groups
    assert running(rig) == {"g0", "g1", "g2", "g3"}
    assert waits(rig, "g4")
    rig.drain()
    rig.check_answers()


def test_only_the_last_part_of_a_block_is_computed_again() -> None:
    rig = a_full_rig()
    rig.submit(a_request("light", max_tokens=3, caller="light"))
    turn(rig, 6)
    (group,) = preempted(rig)
    before = len(rig.pipeline.plans)
    turn(rig)
    (sequence,) = group.sequences
    pieces = [piece for plan in rig.pipeline.plans for piece in plan.slices if piece.sequence_id == sequence.id]
    again = sum(len(piece.token_ids) for piece in pieces) - sequence.scheduled
    assert before
    assert 0 < again <= rig.config.block_size
    rig.drain()


def test_a_displaced_request_is_charged_to_nobody() -> None:
    rig = a_full_rig(prefix_cache=False)
    rig.submit(a_request("light", max_tokens=3, caller="light"))
    rig.drain()
    assert not rig.scheduler.request_queue.groups
    queue = rig.scheduler.request_queue.queue
    assert queue.served("g") == 4 * (6 + 60)
    assert queue.served("light") <= queue.served("g")


def test_callers_who_want_the_same_do_not_take_turns() -> None:
    """More callers than places, each with one request at a time and all of the same size: none is preempted."""
    rig = a_full_rig("abcd", max_tokens=20)
    for number in range(60):
        caller = "abcdefgh"[number % 8]
        if all(group.caller != caller for group in rig.scheduler.request_queue.groups.values()):
            rig.submit(a_request(f"{caller}{number}", max_tokens=20, caller=caller))
        turn(rig, 3)
        assert not preempted(rig)
    rig.drain()
    rig.check_answers()


def test_one_who_will_have_been_served_less_goes_before_callers_with_one_request_each() -> None:
    rig = a_full_rig("abcd", max_tokens=60)
    rig.submit(a_request("light", num_prompt=1, max_tokens=3, caller="light"))
    assert "light" in running(rig) or not preempted(rig)
    turn(rig)
    assert "light" in running(rig)
    assert len(preempted(rig)) == 1
    rig.drain()
    rig.check_answers()


def test_a_light_caller_is_not_held_up_by_greedy_ones_who_wait_with_nothing_running() -> None:
    rig = a_full_rig("abcd", max_tokens=60)
    for caller in "efg":
        rig.submit(a_request(f"{caller}0", max_tokens=60, caller=caller))
    rig.submit(a_request("light", num_prompt=1, max_tokens=3, caller="light"))
    turn(rig)
    assert "light" in running(rig)
    assert all(waits(rig, f"{caller}0") for caller in "efg")
    rig.drain()
    rig.check_answers()


def test_a_displaced_caller_displaces_nobody() -> None:
    rig = a_full_rig("abcd", max_tokens=60)
    rig.submit(a_request("light", num_prompt=1, max_tokens=4, caller="light"))
    turn(rig)
    (group,) = preempted(rig)
    rig.submit(a_request("more", num_prompt=1, max_tokens=1, caller=group.caller))
    turn(rig, 3)
    assert preempted(rig) == [group]
    assert waits(rig, "more")
    rig.drain()
    rig.check_answers()


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_guesses_do_not_keep_a_place(rate: float) -> None:
    """A lone answer on draft tokens nearly always has steps in flight; then it could not be preempted."""
    config = replace(a_rig(num_stages=4).config, max_num_seqs=1, speculate=1)
    rig = SchedulerRig(config, 400, None, partial(Oracle, rate=rate))
    rig.submit(a_request("g0", num_prompt=4, max_tokens=200, caller="g"))
    while len(rig.events["g0", 0]) < 60:
        turn(rig)
    rig.submit(a_request("light", num_prompt=4, max_tokens=4, caller="light"))
    while not rig.events["light", 0]:
        turn(rig)
    assert len(rig.events["g0", 0]) < 80
    rig.drain()
    rig.check_answers()


def test_a_lower_priority_displaces_nobody() -> None:
    rig = a_full_rig()
    rig.submit(a_request("light", max_tokens=3, caller="light", priority=-1))
    turn(rig, 3)
    assert not preempted(rig)
    rig.drain()


def test_a_caller_of_the_highest_priority_does_not_starve_others() -> None:
    """It always has eight requests, for four places."""
    rig, numbers = a_rig(num_stages=1, max_num_seqs=4), count()

    def keep_eight() -> None:
        while sum(group.caller == "top" for group in rig.scheduler.request_queue.groups.values()) < 8:
            rig.submit(a_request(f"top{next(numbers)}", max_tokens=10, caller="top", priority=MOST_URGENT))

    keep_eight()
    rig.submit(a_request("light", max_tokens=3, caller="light"))
    began_s = rig.now
    while "light" in rig.scheduler.request_queue.groups:
        rig.now += 1.0
        turn(rig)
        keep_eight()
        assert rig.now - began_s < 200.0


def test_who_was_displaced_gains_tokens_before_it_is_displaced_again() -> None:
    """Two places, both of one caller, and light callers without end: the greedy answers still come to an end."""
    rig = a_full_rig("gg", max_tokens=100)
    marks: dict[str, list[int]] = {"g0": [], "g1": []}
    for number in range(250):
        before = {group.key: group.num_preempted for group in preempted(rig)}
        rig.submit(a_request(f"light{number}", num_prompt=1, max_tokens=2, caller=f"light{number}"))
        turn(rig)
        for group in preempted(rig):
            if group.key in marks and group.num_preempted > before.get(group.key, 0):
                marks[group.key].append(group.sequences[0].loss_mark)
    assert "g0" not in rig.scheduler.request_queue.groups
    assert "g1" not in rig.scheduler.request_queue.groups
    assert all(len(of) > 1 for of in marks.values())
    assert all(b - a >= MIN_GAIN for of in marks.values() for a, b in pairwise(of))
    rig.drain()
    rig.check_answers()


def test_what_is_computed_again_is_bounded() -> None:
    """Without a prefix cache every preempted request is computed again as a whole."""
    rig = a_full_rig("gggggggg", max_tokens=400, prefix_cache=False, num_blocks=900)
    for number in range(300):
        rig.submit(a_request(f"light{number}", num_prompt=1, max_tokens=2, caller=f"light{number}"))
        turn(rig)
    computed = sum(len(piece.token_ids) for plan in rig.pipeline.plans for piece in plan.slices)
    new = sum(len(group.sequences[0].token_ids) for group in rig.scheduler.request_queue.groups.values())
    assert preempted(rig)
    assert computed - new <= MAX_SAVED + computed / 4
    for key in list(rig.requests):
        rig.tell(rig.scheduler.request_queue.abort(key, FinishReason.CANCELLED))


def test_where_blocks_and_not_places_are_short_as_many_are_displaced_as_it_takes() -> None:
    rig = a_rig(num_stages=1, num_blocks=40, max_num_seqs=16)
    for number in range(8):
        rig.now += 1.0
        rig.submit(a_request(f"g{number}", max_tokens=15, caller="g"))  # 5 blocks each
    turn(rig, 2)
    rig.submit(a_request("light", num_prompt=20, max_tokens=8, caller="light"))  # 7 blocks
    turn(rig)
    assert running(rig) == {"light", *(f"g{number}" for number in range(6))}
    rig.drain()
    rig.check_answers()


def test_nobody_is_displaced_in_vain() -> None:
    """A request that would not fit even then."""
    rig = a_rig(num_stages=1, num_blocks=40, max_num_seqs=4)
    rig.submit(a_request("big", num_prompt=60, max_tokens=20, caller="big"))
    rig.submit(a_request("g1", max_tokens=20, caller="g"))
    rig.submit(a_request("g2", max_tokens=20, caller="g"))
    turn(rig, 2)
    rig.submit(a_request("light", num_prompt=110, max_tokens=20, caller="light"))
    turn(rig, 3)
    assert not preempted(rig)
    rig.drain()
    rig.check_answers()


def test_the_displaced_can_be_cancelled_and_can_pass_their_deadlines() -> None:
    rig = a_full_rig("gg", max_tokens=60)
    rig.submit(a_request("light", max_tokens=30, caller="light"))
    turn(rig)
    rig.tell(rig.scheduler.request_queue.abort("g1", FinishReason.CANCELLED))
    check_scheduler(rig.scheduler)
    rig.drain()
    rig.check_answers()


@pytest.mark.parametrize("seed", quick_first(range(10), 2))
def test_a_walk(seed: int) -> None:
    """Greedy and light callers, shared prefixes, several answers, draft tokens, losses: every answer is what it is
    alone."""
    dice = random.Random(seed)
    rig = a_rig(
        dice.choice((1, 2, 3)), dice.choice((40, 120)), max_num_seqs=dice.choice((2, 5)), max_queue=200,
        prefix_cache=bool(seed % 3), speculate=dice.choice((0, 2)),
    )  # fmt: skip
    num_losses = num_preempted = 0
    for number in range(80):
        caller = dice.choice(("greedy", "greedy", "other", f"light{number}"))
        num_new = dice.randint(1, 3) if "light" in caller else dice.randint(10, 40)
        fields: dict[str, object] = {"max_tokens": num_new}
        fields |= {"num_prompt": dice.choice((1, 5, 14, 30)), "num_sequences": dice.choice((1, 1, 1, 2))}
        fields |= {"caller": caller, "salt": number % 2, "priority": dice.choice((0, 0, 1))}
        rig.submit(a_request(f"r{number}", **fields))
        for _ in range(dice.randrange(4)):
            if dice.random() < 0.6:
                rig.schedule_one()
            elif rig.pipeline.num_in_flight:
                rig.commit_one()
            check_scheduler(rig.scheduler)
        num_preempted = max(num_preempted, len(preempted(rig)))
        if dice.random() < 0.01 and num_losses < 2:
            rig.lose_stage()
            num_losses += 1
        if dice.random() < 0.03:
            rig.tell(rig.scheduler.request_queue.abort(f"r{dice.randrange(number + 1)}", FinishReason.CANCELLED))
    rig.drain()
    rig.check_answers()
    assert rig.scheduler.kv_usage == 0
    assert num_preempted > 1
