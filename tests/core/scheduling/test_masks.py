"""Where masks come from. Late ones delay their own sequence alone; a rule that allows nothing ends its request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest

from ppserve.core.request import StopConditions
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.token_filter import AskedMask, TokenFilter, make_mask, packed_mask
from ppserve.errors import AnswerImpossible, PpserveError, RequestError, RequestFailed
from tests.core.scheduling.rig import SchedulerRig, a_request, a_rig, fill
from tests.simulated_stage import EOS_ID, VOCAB_SIZE, MadeUpFilter, expected_answer


@dataclass(frozen=True)
class Ends(MadeUpFilter):
    """It does what its subclass says after two tokens of an answer."""

    def allowed(self, output_ids: Seq[int]) -> bytes | None:
        return super().allowed(output_ids) if len(output_ids) < 2 else self.at_end()

    def at_end(self) -> bytes:
        return packed_mask([], VOCAB_SIZE)


class Refuses(Ends):
    def at_end(self) -> bytes:
        raise PpserveError("the form's state is too large")


class IsWrong(Ends):
    def at_end(self) -> bytes:
        raise ZeroDivisionError


class EndsTheAnswer(Ends):
    def at_end(self) -> bytes:
        return packed_mask([EOS_ID], VOCAB_SIZE)


@pytest.mark.parametrize(
    ("token_filter", "error", "text"),
    [
        (Ends(), AnswerImpossible, "no token may follow the 2 tokens of the answer"),
        (Refuses(), AnswerImpossible, "the form's state is too large"),
        (IsWrong(), RequestFailed, "the rule of the answer failed: ZeroDivisionError"),
        (EndsTheAnswer(), AnswerImpossible, "no token may follow the 2 tokens of the answer"),  # min_tokens is 5
    ],
)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_rule_that_allows_nothing_ends_its_request_once_and_nobody_elses(
    token_filter: Ends, error: type[RequestError], text: str, num_stages: int
) -> None:
    rig = a_rig(num_stages, runs_ahead=num_stages == 1)
    rig.submit(a_request("filtered", stop=StopConditions(9, min_tokens=5), num_sequences=3), token_filter)
    rig.submit(a_request("other", max_tokens=12))
    rig.drain()
    for index in range(3):
        *tokens, end = rig.events["filtered", index]
        assert len(tokens) <= 2
        assert not any(event.is_terminal for event in tokens)
        assert type(end.error) is error
        assert str(end.error) == text
    assert max(len(rig.events["filtered", index]) for index in range(3)) == 3
    del rig.requests["filtered"]
    rig.check_answers()


def test_the_status_says_that_the_request_is_at_fault() -> None:
    assert (AnswerImpossible.status, AnswerImpossible.http_status) == ("INVALID_ARGUMENT", 400)


@dataclass
class LateMasks:
    """Masks that are there once `release` was called after they were asked for."""

    token_filter: TokenFilter
    asked: list[AskedMask] = field(default_factory=list)
    is_slow: bool = False

    def ask(self, output_ids: tuple[int, ...]) -> AskedMask:
        self.asked.append(AskedMask(output_ids))
        return self.asked[-1]

    def release(self) -> None:
        for each in self.asked:
            each.made = make_mask(self.token_filter, each.output_ids)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_late_mask_delays_its_own_sequence_alone(num_stages: int) -> None:
    sources: list[LateMasks] = []

    def source_of(token_filter: TokenFilter) -> LateMasks:
        sources.append(LateMasks(token_filter))
        return sources[-1]

    plain = a_rig(num_stages)
    rig = SchedulerRig(plain.config, 400, request_queue=RequestQueue(source_of))
    rig.submit(a_request("late", num_sequences=2), MadeUpFilter(1))
    rig.submit(a_request("other", max_tokens=20))
    while "other" in rig.request_queue.groups:
        assert fill(rig), "the other one goes on without the masks"
        rig.check()
        rig.commit_one()
    assert not rig.events["late", 0]
    while "late" in rig.request_queue.groups:
        sources[0].release()
        fill(rig)
        rig.commit_one()
        rig.check()
    rig.finish()
    assert sources[0].asked


@dataclass(frozen=True)
class FailsAfter(MadeUpFilter):
    """Nothing may follow these tokens."""

    last: tuple[int, ...] = ()

    def allowed(self, output_ids: Seq[int]) -> bytes | None:
        return packed_mask([], VOCAB_SIZE) if tuple(output_ids) == self.last else super().allowed(output_ids)


def test_where_one_answer_of_a_request_cannot_go_on_all_of_them_end() -> None:
    request = a_request("r", max_tokens=9, num_sequences=3)
    held = [expected_answer(request, index, token_filter=MadeUpFilter()).token_ids[:2] for index in range(3)]
    assert len({*held}) == 3
    rig = a_rig(num_stages=1)
    rig.submit(request, FailsAfter(last=held[1]))
    rig.drain()
    assert [type(rig.events["r", index][-1].error) for index in range(3)] == [AnswerImpossible] * 3
    assert all(event.finish is None for events in rig.events.values() for event in events)
