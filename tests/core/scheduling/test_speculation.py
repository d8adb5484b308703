"""Draft tokens: which are made, that they change no answer, and the drafter that looks into the sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import pytest
from msgspec import structs

from ppserve.core.cost_model import Coefficients
from ppserve.core.request import StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence
from ppserve.core.scheduling.speculation import (
    MAX_DRAFT_TOKENS,
    MAX_LEARNED,
    MAX_MATCH,
    MIN_PROBABILITY,
    DraftToken,
    PromptLookup,
)
from tests.core.scheduling.rig import Oracle, SchedulerRig, a_request, fill
from tests.simulated_stage import EOS_ID, VOCAB_SIZE, expected_answer

SURE = 0.9


WRONG = partial(Oracle, rate=0.0, probability=SURE)


def a_rig(speculate: int | None, row: float | None = None, num_stages: int = 1, **config: int) -> SchedulerRig:
    """A step takes 10 ms on every stage, and each further row this share of that; None: no costs are known."""
    settings = SchedulerConfig(num_stages, block_size=4, eos_ids=(EOS_ID,), speculate=speculate, **config)
    costs = [] if row is None else [Coefficients(step=0.01 * (1 - row), row=0.01 * row)] * num_stages
    return SchedulerRig(settings, 400, costs, WRONG)


def num_drafted(rig: SchedulerRig) -> int:
    """Count the draft tokens in the second step of a lone sequence; the first computes its prompt."""
    rig.submit(a_request("lone", max_tokens=90))
    rig.turn()
    (plan,) = fill(rig)
    return sum(slice_.num_draft_tokens for slice_ in plan.slices)


def test_as_many_draft_tokens_as_bring_more_tokens_per_second() -> None:
    cheap = num_drafted(a_rig(None, row=0.0))
    assert SURE ** (cheap + 1) < MIN_PROBABILITY <= SURE**cheap
    assert num_drafted(a_rig(None, row=1.0)) == 0
    assert num_drafted(a_rig(None)) == 0, "no costs are known yet"
    row, count = 0.3, num_drafted(a_rig(None, row=0.3))
    assert 0 < count < cheap < MAX_DRAFT_TOKENS
    for last, pays in ((count, True), (count + 1, False)):
        num_expected = sum(SURE**place for place in range(last))
        assert (SURE**last * (1 + (last - 1) * row) > num_expected * row) == pays


@pytest.mark.parametrize(("num_stages", "most"), [(1, 1), (2, 1), (4, 3)])
def test_only_while_one_sequence_runs_or_fewer_than_stages(num_stages: int, most: int) -> None:
    rig = a_rig(None, 0.0, num_stages)
    for number in range(most + 1):
        before = rig.num_draft_tokens
        rig.submit(a_request(f"r{number}", max_tokens=200))
        for _ in range(8):
            rig.turn()
        assert (rig.num_draft_tokens - before > 50) == (number < most)


def test_none_beside_tokens_of_prompts() -> None:
    """A slice of one token may still be a part of a prompt, which draws nothing."""
    rig = a_rig(3, prefill_chunk=1)
    rig.submit(a_request("r", num_prompt=3))
    widths = []
    while rig.has_work:
        (plan,) = fill(rig)
        widths.append(plan.num_tokens)
        rig.commit_one()
    assert widths[:3] == [1, 1, 4]


def test_a_block_is_found_by_others_when_all_its_tokens_are_known() -> None:
    """The first step has draft tokens up to the end of the block, all of them wrong."""
    rig = a_rig(7)
    request = a_request("first", num_prompt=1, max_tokens=20)
    rig.submit(request)
    (plan,) = fill(rig)
    assert plan.num_tokens == 8
    rig.drain()
    answer = expected_answer(request).token_ids
    again = replace(a_request("again"), prompt_ids=(*request.prompt_ids, *answer), stop=StopConditions(2))
    rig.submit(again)
    rig.drain()
    assert rig.events["again", 0][0].cached_tokens == 20
    rig.check_answers()


def test_rejected_draft_tokens_are_no_throughput_and_a_step_that_drafts_decodes() -> None:
    rig = a_rig(3)
    rig.submit(a_request("r", num_prompt=6, max_tokens=20))
    phases = []
    while rig.has_work:
        phases += [plan.phase for plan in fill(rig)]
        rig.commit_one()
    assert phases == ["prefill"] + ["decode"] * 19
    assert rig.num_draft_tokens > 40
    assert rig.scheduler.num_draft_tokens == {"accepted": 0, "rejected": rig.num_draft_tokens}
    assert rig.request_queue._throughput._tokens == 6 + 20 - 1


def test_draft_tokens_stay_within_the_blocks_that_were_reserved() -> None:
    """The pipeline has as many as the request needs, without draft tokens."""
    config = SchedulerConfig(2, block_size=4, eos_ids=(EOS_ID,), speculate=16)
    rig = SchedulerRig(config, num_blocks=4, new_drafter=WRONG)
    rig.submit(a_request("r", num_prompt=5, max_tokens=12))  # 16 positions: the last token has none
    ends = []
    while rig.has_work:
        for plan in fill(rig):
            (slice_,) = plan.slices
            assert len(slice_.block_table) * 4 >= slice_.end
            ends.append(slice_.end)
        rig.commit_one()
    assert max(ends) == 16
    rig.check_answers()


class RightAt(Oracle):
    """Right in the rows of a step that are named, the first draft token's being 0, and wrong in the others."""

    def __init__(self, rows: set[int], sequence: Sequence) -> None:
        super().__init__(sequence, rate=1.0)
        self._rows = rows

    def draft(self, token_ids: Seq[int], draft_ids: Seq[int]) -> DraftToken | None:
        found = super().draft(token_ids, draft_ids)
        if found is None or len(draft_ids) in self._rows:
            return found
        return found._replace(token_id=(found.token_id + 1) % VOCAB_SIZE)


def a_drafting_rig(rows: set[int]) -> SchedulerRig:
    """One stage; every step that decodes has three draft tokens. A sequence whose prompt is computed."""
    config = SchedulerConfig(1, block_size=4, eos_ids=(EOS_ID,), speculate=3)
    rig = SchedulerRig(config, 400, new_drafter=partial(RightAt, rows))
    rig.submit(a_request("r", max_tokens=60))
    rig.turn()
    return rig


@pytest.mark.parametrize(
    ("rows", "accepted"),
    [({0, 1, 2}, 3), ({0, 1}, 2), ({0}, 1), ({0, 2}, 1), ({1, 2}, 0), ({2}, 0), (set(), 0)],
)
def test_every_right_draft_token_before_the_first_wrong_one_saves_a_step(rows: set[int], accepted: int) -> None:
    rig = a_drafting_rig(rows)
    for turn in range(1, 6):
        assert len(rig.turn()) == accepted + 1
        assert rig.scheduler.num_draft_tokens == {"accepted": turn * accepted, "rejected": turn * (3 - accepted)}
    rig.finish()


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize(("rows", "accepted"), [({0, 1, 2}, 3), ({0}, 1), (set(), 0)])
def test_a_row_that_is_not_finite_counts_where_its_draft_token_was_right(
    rows: set[int], accepted: int, row: int
) -> None:
    """What is computed from a wrong token may be anything."""
    rig = a_drafting_rig(rows)
    fill(rig)
    result = rig.pipeline.run_one()
    drawn = [
        structs.replace(one, token_id=None) if place == row else one for place, one in enumerate(result.drawn)
    ]
    events = rig.request_queue.commit(rig.scheduler, structs.replace(result, drawn=drawn), 0.0)
    assert len(events) == min(row, accepted) + 1
    assert [event.error is None for event in events] == [True] * min(row, accepted) + [row > accepted]


def drafted(token_ids: list[int], draft_ids: tuple[int, ...] = ()) -> int | None:
    draft_token = PromptLookup().draft(token_ids, draft_ids)
    return None if draft_token is None else draft_token.token_id


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], None),
        ([5], None),
        ([1, 2, 3], None),
        ([1, 1], 1),
        ([7, 8, 9, 7], 8),
        ([1, 2, 3, 4, 9, 2, 3], 4),
        ([1, 2, 5, 1, 2, 6, 1, 2], 6),
        ([1, 2, 3, 50, 9, 2, 3, 60, 0, 1, 2, 3], 50),
    ],
    ids=["nothing", "one", "new", "twice", "one match", "two match", "latest", "longest before latest"],
)
def test_what_followed_the_longest_and_latest_match(token_ids: list[int], expected: int | None) -> None:
    assert drafted(token_ids) == expected


def test_a_long_prompt_is_learned_in_parts() -> None:
    token_ids = [number % 300 for number in range(3 * MAX_LEARNED)]
    drafter = PromptLookup()
    assert [drafter.draft(token_ids, ()) for _ in range(2)] == [None, None]
    draft_token = drafter.draft(token_ids, ())
    assert draft_token is not None
    assert draft_token.token_id == 3 * MAX_LEARNED % 300
    assert drafter.draft([*token_ids, draft_token.token_id], ()) is not None


def test_draft_tokens_count_as_the_end_of_the_sequence() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    assert [drafted(text, (3, 4)[:n]) for n in range(3)] == [3, 4, 5]
    latest, longest = [8, 4, 60], [2, 3, 4, 50]
    assert drafted([*longest, *latest, 1, 2], (3, 4)) == 50, "the earlier draft token counts too"
    assert drafted([*longest, *latest, 1, 2], (9, 4)) == 60


def test_a_draft_token_leaves_no_trace() -> None:
    drafter = PromptLookup()
    drafter.draft([1, 2, 3, 1], (2, 9, 9, 9))
    assert drafter.draft([1, 2, 3, 1, 2], ()) == PromptLookup().draft([1, 2, 3, 1, 2], ())


def test_experience_raises_and_lowers_the_probability() -> None:
    def probability(token_ids: list[int]) -> float:
        draft_token = PromptLookup().draft(token_ids, ())
        assert isinstance(draft_token, DraftToken)
        return draft_token.probability

    assert probability([1, 2, 3] * 30) > 0.9
    liar = [token for n in range(100, 160) for token in (1, 2, 3, n)]
    assert probability([*liar, 1, 2, 3]) < 0.2


def test_experience_is_gained_while_nothing_is_asked() -> None:
    asked, silent = PromptLookup(), PromptLookup()
    text = [n * n % 7 for n in range(200)]
    for end in range(1, 200):
        asked.draft(text[:end], ())
    assert asked.draft(text, ()) == silent.draft(text, ())


class Counting(list[int]):
    """Counts the tokens that are looked at."""

    num_read = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_time_and_memory_per_token_are_constant() -> None:
    drafter, text = PromptLookup(), Counting(n * 7919 % 50257 for n in range(5_000))
    for _ in range(5_000 // MAX_LEARNED + 1):
        drafter.draft(text, ())
    assert len(drafter._followers) <= MAX_MATCH * len(text)
    text.num_read = 0
    drafter.draft(text, ())
    assert text.num_read <= MAX_MATCH
    text.append(3)
    text.num_read = 0
    drafter.draft(text, ())
    assert text.num_read <= 2 * MAX_MATCH + 1
