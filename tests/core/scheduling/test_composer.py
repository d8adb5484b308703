"""What a step contains: its share of the decodes, and prompts bounded by tokens and by predicted time."""

from __future__ import annotations

import pytest

from ppserve.core.cost_model import Coefficients
from ppserve.core.request import OutputOptions, Request, StopConditions
from ppserve.core.scheduling.composer import (
    MAX_CHUNK_BESIDE_DECODES,
    MAX_STEP_TOP_LOGPROBS,
    MIN_CHUNK,
    MIN_CHUNK_BESIDE_DECODES,
    SPREAD_ROUNDS,
    Composer,
    Pick,
    ordered_by_rounds,
)
from ppserve.core.scheduling.config import MAX_PROMPT_TOKENS_PER_STEP, SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence


def sequence_of(num_tokens: int, scheduled: int = 0, scored: bool = False, caller: str = "") -> Sequence:
    output = OutputOptions(prompt_logprobs=0 if scored else None)
    request = Request("r", tuple(range(num_tokens)), StopConditions(5), output=output, caller=caller)
    sequence = Sequence(num_tokens, request, 0, SchedulerConfig(1))
    sequence.scheduled = scheduled
    return sequence


def decodes(count: int, context: int = 10) -> list[Sequence]:
    return [sequence_of(context, context - 1) for _ in range(count)]


def sizes(picks: list[Pick]) -> list[int]:
    return [pick.num_tokens for pick in picks]


Sequences = list[Sequence]


class Composing(Composer):
    def fill(self, ready: Sequences, num_decoding: int, filling: Sequences, num_slots: int) -> list[Pick]:
        """A step of the decodes that are ready, and of prompts."""
        return self.compose([*ready, *filling], num_decoding + len(filling), num_slots)


def composer(cost: Coefficients | None = None, prefill_chunk: int | None = None) -> Composing:
    return Composing(prefill_chunk, MAX_PROMPT_TOKENS_PER_STEP, [cost] * 4 if cost else ())


@pytest.mark.parametrize(
    ("ready", "decoding", "num_slots", "taken"),
    [(64, 64, 2, 32), (5, 64, 2, 5), (33, 65, 2, 33), (3, 3, 2, 2), (1, 1, 4, 1), (0, 9, 3, 0)],
)
def test_a_step_takes_its_share_of_all_decodes(ready: int, decoding: int, num_slots: int, taken: int) -> None:
    picks = composer().compose(decodes(ready), decoding, num_slots)
    assert sizes(picks) == [1] * taken


def likely(num_tokens: int, scheduled: int, logprobs: int, prompt_logprobs: int | None = None) -> Sequence:
    output = OutputOptions(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    request = Request("r", tuple(range(num_tokens)), StopConditions(5), output=output)
    sequence = Sequence(num_tokens, request, 0, SchedulerConfig(1))
    sequence.scheduled = scheduled
    return sequence


def test_a_step_returns_no_more_likely_tokens_than_fit_a_result() -> None:
    some = MAX_STEP_TOP_LOGPROBS // 4
    drawing = [likely(10, 9, some) for _ in range(9)]
    assert sizes(composer().compose([*drawing, *decodes(2)], 11, 1)) == [1] * 6, "the plain ones fit beside four"
    assert sizes(composer().compose([likely(10, 9, 3 * MAX_STEP_TOP_LOGPROBS), *drawing], 10, 1)) == [1], (
        "one always"
    )
    scored = [likely(10, 0, 0, prompt_logprobs=some) for _ in range(2)]
    assert sizes(composer().compose(scored, 2, 1)) == [4]
    assert sizes(composer().compose([likely(10, 0, 0, prompt_logprobs=3 * MAX_STEP_TOP_LOGPROBS)], 1, 1)) == [1]
    assert sizes(composer().compose([*drawing[:1], *scored], 3, 1)) == [1, 3]
    assert sizes(composer().compose([likely(10, 0, 20, prompt_logprobs=20) for _ in range(9)], 9, 1)) == [10] * 9


def test_a_configured_chunk_is_exact() -> None:
    exact = composer(Coefficients(row=99.0), prefill_chunk=7)
    assert sizes(exact.fill([], 0, [sequence_of(20)], 4)) == [7]
    assert sizes(exact.fill([], 0, [sequence_of(3), sequence_of(20)], 4)) == [3, 4]
    assert sizes(exact.fill(decodes(2), 2, [sequence_of(20)], 1)) == [1, 1, 7]


def test_chunks_shrink_so_that_every_slot_gets_some_but_not_below_the_minimum() -> None:
    sequence = sequence_of(1000)
    chunks = []
    while sequence.num_pending:
        (pick,) = composer().fill([], 0, [sequence], 2)
        chunks.append(pick.num_tokens)
        sequence.scheduled += pick.num_tokens
    assert chunks[0] == -(-1000 // (SPREAD_ROUNDS * 2))
    assert chunks == sorted(chunks, reverse=True)
    assert min(chunks[:-1]) >= MIN_CHUNK
    assert sum(chunks) == 1000


def test_prompts_beside_decodes_are_held_shorter() -> None:
    assert sizes(composer().fill([], 0, [sequence_of(5000)], 2)) == [MAX_PROMPT_TOKENS_PER_STEP]
    assert sizes(composer().fill([], 8, [sequence_of(5000)], 2)) == [MAX_CHUNK_BESIDE_DECODES]
    assert sizes(composer().fill([], 8, [sequence_of(120)], 2)) == [120 // (SPREAD_ROUNDS * 2)]
    assert sizes(composer().fill([], 8, [sequence_of(20)], 2)) == [MIN_CHUNK_BESIDE_DECODES]
    assert sizes(composer().fill([], 8, [sequence_of(120)], 1)) == [120], "one slot: no spreading"


@pytest.mark.parametrize("num_decodes", [64, 0])
def test_no_step_is_larger_than_announced(num_decodes: int) -> None:
    prompts = [sequence_of(900) for _ in range(9)]
    picks = composer().fill(decodes(num_decodes), num_decodes, prompts, 1)
    assert sum(sizes(picks)) <= SchedulerConfig(1, max_num_seqs=64).max_step_tokens


def test_time_bounds_a_prompt() -> None:
    cost = Coefficients(row=0.001)
    picks = composer(cost).fill(decodes(10), 20, [sequence_of(900)], 2)
    assert sum(sizes(picks)) == 80
    assert sizes(composer(cost).fill([], 0, [sequence_of(900)], 1)) == [160]
    picks = composer(cost).fill([], 0, [sequence_of(50) for _ in range(9)], 1)
    assert sizes(picks) == [50, 50, 50, 10]


def test_longer_contexts_mean_shorter_chunks() -> None:
    cost = Coefficients(row=0.001, key=1e-6)
    early = sizes(composer(cost).fill([], 0, [sequence_of(900)], 1))[0]
    late = sizes(composer(cost).fill([], 0, [sequence_of(900, scheduled=500)], 1))[0]
    assert late < early < 160


def test_a_scored_prompt_pays_the_head_for_every_row() -> None:
    cost = Coefficients(row=0.001, sample=0.001)
    assert sizes(composer(cost).fill([], 0, [sequence_of(900)], 1)) == [160]
    assert sizes(composer(cost).fill([], 0, [sequence_of(900, scored=True)], 1)) == [80]


def test_slow_decodes_stretch_the_limit_instead_of_crowding_prompts_out() -> None:
    picks = composer(Coefficients(row=0.01)).fill(decodes(32), 64, [sequence_of(900)], 2)
    assert sizes(picks)[32:] == [32]


def test_however_slow_a_stage_prompts_make_progress() -> None:
    prompts = [sequence_of(900), sequence_of(900)]
    assert sizes(composer(Coefficients(row=100.0)).fill([], 3, prompts, 2)) == [MIN_CHUNK_BESIDE_DECODES]


@pytest.mark.parametrize("greedy", [["g"] * 20, [f"g{number}" for number in range(20)]])
def test_a_light_caller_s_prompt_does_not_wait_for_all_prompts_of_greedy_ones(greedy: list[str]) -> None:
    """There is one greedy caller with many prompts, or there are many callers with one each."""
    prompts = [sequence_of(900, caller=caller) for caller in greedy]
    light = sequence_of(3, caller="light")
    picks = composer().fill([], 0, [*prompts, light], 2)
    assert picks[0] == Pick(light, 3)
    assert [pick.sequence for pick in picks[1:]] == prompts[: len(picks) - 1]


def test_callers_take_turns_and_each_one_s_prompts_keep_their_order() -> None:
    all_of = ((90, "a"), (5, "a"), (80, "b"), (7, "c"), (6, "b"))
    a1, a2, b1, c1, b2 = (sequence_of(num_tokens, caller=caller) for num_tokens, caller in all_of)
    assert ordered_by_rounds([a1, a2, b1, c1, b2]) == [c1, a1, b1, a2, b2]
    alone = [sequence_of(n) for n in (90, 5, 80, 7)]
    assert ordered_by_rounds(alone) == alone
