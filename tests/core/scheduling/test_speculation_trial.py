"""Which draft tokens pay, found by turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

import pytest

from ppserve.core.scheduling.speculation_trial import SpeculationTrial, Way


def live(
    trial: SpeculationTrial,
    num_tokens: int,
    pace: Callable[[Way], float],
    num_sequences: int = 1,
    now: float = 0.0,
) -> tuple[float, float]:
    """(share of tokens that came while draft tokens were made, seconds per token and sequence)."""
    drafted, began = 0, now
    last = [now] * num_sequences
    for number in range(num_tokens):
        if trial.way is not Way.PLAIN:
            trial.drafted()
            drafted += 1
        now += pace(trial.way) / num_sequences
        mine = number % num_sequences
        trial.observe(num_sequences, last[mine], now, 1)
        last[mine] = now
    return drafted / num_tokens, (now - began) * num_sequences / num_tokens


@pytest.mark.parametrize("num_sequences", [1, 2, 7])
def test_where_guesses_pay_they_are_made(num_sequences: int) -> None:
    trial = SpeculationTrial()
    share, pace = live(trial, 4000, lambda draft_tokens: 0.5 if draft_tokens else 1.0, num_sequences)
    assert share > 0.9
    assert pace < 0.55


@pytest.mark.parametrize("worse", [1.0, 1.05, 1.5, 4.0])
def test_where_they_do_not_nobody_is_slower_for_it(worse: float) -> None:
    """Within 3%, the turns of trying included."""
    share, pace = live(SpeculationTrial(), 20_000, lambda draft_tokens: worse if draft_tokens else 1.0)
    assert share < 0.05
    assert pace <= 1.03


def test_nothing_is_guessed_before_the_time_without_is_known() -> None:
    share, _ = live(SpeculationTrial(), 16, lambda _guesses: 1.0)
    assert share == 0


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_decide(seed: int) -> None:
    chance = random.Random(seed)
    share, _ = live(
        SpeculationTrial(), 6000, lambda draft_tokens: chance.expovariate(1.0) * (0.6 if draft_tokens else 1.0)
    )
    assert share > 0.75


def test_a_change_is_noticed_in_both_directions() -> None:
    trial = SpeculationTrial()
    assert live(trial, 3000, lambda draft_tokens: 0.5 if draft_tokens else 1.0)[0] > 0.9
    live(trial, 500, lambda draft_tokens: 2.0 if draft_tokens else 1.0, now=1e4)
    assert live(trial, 3000, lambda draft_tokens: 2.0 if draft_tokens else 1.0, now=2e4)[0] < 0.1
    live(trial, 8000, lambda draft_tokens: 0.5 if draft_tokens else 1.0, now=3e4)
    assert live(trial, 3000, lambda draft_tokens: 0.5 if draft_tokens else 1.0, now=4e4)[0] > 0.9


def restless(seed: int, costs: dict[Way, float], easy: float = 0.0) -> float:
    """How many times as fast 4,000 tokens came as without draft tokens, on a machine that is up to four times as
    slow for a while, some 150 tokens. easy: by how much less draft tokens cost, at most, in passages of some 60
    tokens."""
    chance, trial = random.Random(seed), SpeculationTrial()
    slowness, ease, plain, now = 1.0, 0.0, 0.0, 0.0
    for _ in range(4000):
        if chance.random() < 1 / 150:
            slowness = chance.choice((1.0, 1.0, 1.0, 1.5, 4.0))
        if chance.random() < 1 / 60:
            ease = easy * chance.random()
        seconds = slowness * chance.lognormvariate(0.0, 0.15)
        plain += seconds
        trial.drafted()
        began, now = now, now + seconds * costs[trial.way] * (1 - ease if trial.way else 1.0)
        trial.observe(1, began, now, 1)
    return plain / now


@pytest.mark.parametrize(
    ("wide", "deep", "easy", "least"),
    [
        (1.0, 1.1, 0.0, 0.99),
        (1.02, 1.5, 0.0, 0.98),
        (0.7, 0.8, 0.0, 0.96 / 0.7),
        (0.9, 0.6, 0.0, 0.9 / 0.6),
        (1.02, 1.3, 0.8, 1.47),
        # Nearly all draft tokens are right: a whole turn without them would cost as much as seven with them.
        (0.15, 0.14, 0.0, 6.0),
    ],
)
def test_on_a_restless_machine_the_fastest_way_is_found_all_the_same(
    wide: float, deep: float, easy: float, least: float
) -> None:
    costs = {Way.PLAIN: 1.0, Way.WIDE: wide, Way.DEEP: deep}
    assert fmean(restless(seed, costs, easy) for seed in range(8)) > least


def test_a_trial_without_guesses_is_repeated_soon() -> None:
    """The drafter had none: its model was still loading, or the text has become easy to draft token only now."""
    trial, now = SpeculationTrial(), 0.0
    for number in range(6000):
        makes_guesses = number > 5000 and trial.way is not Way.PLAIN
        if makes_guesses:
            trial.drafted()
        began, now = now, now + (0.5 if makes_guesses else 1.0)
        trial.observe(1, began, now, 1)
    assert now < 5000 + 600
    assert trial.way is not Way.PLAIN


def test_other_numbers_of_sequences_are_other_trials() -> None:
    trial = SpeculationTrial()
    live(trial, 3000, lambda draft_tokens: 0.5 if draft_tokens else 1.0)
    share, _ = live(trial, 12_000, lambda draft_tokens: 2.0 if draft_tokens else 1.0, num_sequences=16, now=1e4)
    assert share < 0.15


def changing(seed: int, numbers: tuple[int, ...], every: int, costs: Callable[[Way, int], float]) -> float:
    """How many times as fast 12,000 tokens came as without draft tokens, where the number of sequences changes
    after some `every` tokens. costs: of a step, by the way and the number of sequences."""
    chance, trial = random.Random(seed), SpeculationTrial()
    count, now, plain, last = numbers[0], 0.0, 0.0, [0.0] * max(numbers)
    for number in range(12_000):
        if chance.random() < 1 / every:
            count, last = chance.choice(numbers), [now] * max(numbers)
        trial.drafted()
        seconds = chance.lognormvariate(0.0, 0.15) / count
        plain += seconds
        now += seconds * costs(trial.way, count)
        trial.observe(count, last[number % count], now, 1)
        last[number % count] = now
    return plain / now


@pytest.mark.parametrize("every", [10, 50, 300])
@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 16), (4, 16)])
def test_a_load_that_changes_within_a_turn_loses_nothing_by_it(numbers: tuple[int, ...], every: int) -> None:
    def costs(way: Way, count: int) -> float:
        return {Way.PLAIN: 1.0, Way.WIDE: 1.02, Way.DEEP: 1.5 if count < 4 else 1.02}[way]

    assert fmean(changing(seed, numbers, every, costs) for seed in range(3)) > 0.98


@pytest.mark.parametrize("every", [10, 50, 300])
def test_a_lone_caller_gains_though_others_come_and_go(every: int) -> None:
    def costs(way: Way, count: int) -> float:
        lone = {Way.PLAIN: 1.0, Way.WIDE: 0.8, Way.DEEP: 0.5}
        return lone[way] if count == 1 else 1.0 + 0.02 * way

    assert fmean(changing(seed, (1, 16), every, costs) for seed in range(3)) > 1.6


def test_the_last_token_of_the_last_answer_is_of_a_lone_caller() -> None:
    trial, now = SpeculationTrial(), 0.0
    for number in range(4000):
        trial.drafted()
        began, now = now, now + (0.5 if trial.way else 1.0)
        trial.observe(number % 10 > 0, began, now, 1)
    assert trial.way is not Way.PLAIN


def test_one_stall_decides_nothing() -> None:
    """The first turn with draft tokens loads kernels."""
    trial, stalls = SpeculationTrial(), [50.0]

    def pace(draft_tokens: Way) -> float:
        return stalls.pop() if draft_tokens and stalls else 0.5 if draft_tokens else 1.0

    live(trial, 400, pace)
    assert live(trial, 1000, pace, now=1e4)[0] > 0.8


@pytest.mark.parametrize("pause", [5, 8, 100])
def test_a_pause_in_each_first_trial_costs_some_turns_and_not_all(pause: int) -> None:
    """pause: in turns. A turn that was ended for it has few tokens, so their times say too much."""
    trial, pauses = SpeculationTrial(), {Way.WIDE: 16.0 * pause, Way.DEEP: 16.0 * pause}
    live(trial, 900, lambda way: (0.8 if way else 1.0) + pauses.pop(way, 0.0))
    assert not pauses
    assert live(trial, 500, lambda way: 0.8 if way else 1.0, now=1e5)[0] > 0.8


@pytest.mark.parametrize("best", Way)
def test_steps_of_guesses_alone_are_judged_by_themselves(best: Way) -> None:
    """Where stages share cores or memory, further rows may pay although steps of their own do not."""
    trial, taken = SpeculationTrial(), dict.fromkeys(Way, 0)

    def pace(way: Way) -> float:
        taken[way] += 1
        return 0.8 if way is best else 1.0

    live(trial, 8000, pace)
    assert taken[best] > 0.9 * 8000
    assert min(taken.values()) > 32, "each way is tried again now and then"


def test_a_turn_of_trying_width_is_told_when_it_begins() -> None:
    """What rows cost is then learnt anew."""
    ways: list[Way] = []
    trial = SpeculationTrial(lambda: ways.append(trial.way))
    live(trial, 4000, lambda way: 1.0 if way else 0.9)
    assert len(ways) > 2
    assert set(ways) == {Way.WIDE}
    trial = SpeculationTrial(lambda: ways.append(trial.way))
    ways.clear()
    live(trial, 4000, lambda way: 0.5 if way is Way.WIDE else 1.0)
    assert len(ways) == 1, "once it is the fastest way, all is known"


def test_where_nothing_is_guessed_few_turns_ask_the_drafters() -> None:
    """With many sequences no draft token pays, but in turns of trying each sequence's drafter is asked all the
    same."""
    trial, tried = SpeculationTrial(), 0
    for number in range(40 * 64):
        tried += trial.way is not Way.PLAIN
        trial.observe(64, float(number), number + 1.0, 16)
    assert 0 < tried < 0.3 * 40 * 64


@pytest.mark.parametrize("silent", [Way.WIDE, Way.DEEP])
def test_a_way_that_guesses_nothing_keeps_no_other_from_being_tried(silent: Way) -> None:
    trial, now, others = SpeculationTrial(), 0.0, 0
    for _ in range(4000):
        if trial.way is not Way.PLAIN and trial.way is not silent:
            trial.drafted()
            others += 1
        began, now = now, now + 1.0
        trial.observe(1, began, now, 1)
    assert others > 60, "tokens of several turns"
