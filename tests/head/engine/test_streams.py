"""A resumed answer: its text continues where it was, and an answer that was complete ends at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppserve.answers import Timings
from ppserve.core.request import FinishReason, OutputOptions, Request, StopConditions
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.sequence import Sequence, SequenceEvent
from ppserve.errors import InvalidRequest
from ppserve.head.engine.streams import OpenRequest, TokenOutput
from tests.fake_engine import EOS

# What the model draws, one byte a token: characters of one to four bytes, beginnings of stop strings that come to
# nothing, an end-of-text.
CONFIG = SchedulerConfig(1, eos_ids=(EOS,))
DRAWN = [*"so é 漢 EN 🙂 END of it".encode(), EOS]


class Bytes:
    """A tokenizer of single bytes, with what an open request needs."""

    def text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else bytes([token_id])


def open_request(request: Request) -> OpenRequest:
    return OpenRequest(request, None, Bytes(), (EOS,))


def undisturbed(request: Request) -> list[TokenOutput]:
    """All outputs of the answer."""
    opened = open_request(request)
    sequence = Sequence(0, request, 0, CONFIG, text_rule=opened.text_rule)
    outputs = []
    for offset, token_id in enumerate(DRAWN):
        finish = sequence.commit_token(token_id)
        outputs.append(opened.output(SequenceEvent("r", 0, 0, offset, token_id, finish=finish), 11.0))
        if outputs[-1].finish is not None:
            return outputs
    raise AssertionError("it never ended")


LONG = len(DRAWN) + 5
ENDS = [
    (StopConditions(LONG), FinishReason.EOS),
    (StopConditions(LONG, stop=("it",), include_stop=True), FinishReason.STOP_STRING),
    (StopConditions(LONG, stop=("END", "of")), FinishReason.STOP_STRING),
    (StopConditions(LONG, stop=("EN",)), FinishReason.STOP_STRING),
    (StopConditions(LONG, stop=("EN",), min_tokens=15), FinishReason.STOP_STRING),
    (StopConditions(LONG, stop_token_ids=(ord("f"),)), FinishReason.STOP_TOKEN),
    (StopConditions(LONG, stop_token_ids=(ord("D"),), stop=("END",)), FinishReason.STOP_TOKEN),
    (StopConditions(LONG, stop_token_ids=(ord("D"),), stop=("END",), include_stop=True), FinishReason.STOP_STRING),
    (StopConditions(LONG, stop_token_ids=(ord("s"),), min_tokens=len(DRAWN)), FinishReason.EOS),
    (StopConditions(13, stop=("END",)), FinishReason.MAX_TOKENS),
    (StopConditions(len(DRAWN), ignore_eos=True), FinishReason.MAX_TOKENS),
    (StopConditions(12), FinishReason.CONTEXT_LENGTH),
]


@pytest.mark.parametrize(("stop", "reason"), ENDS)
def test_a_resumed_answer_that_had_ended_ends_the_same_at_once(stop: StopConditions, reason: FinishReason) -> None:
    length_end = reason if reason is FinishReason.CONTEXT_LENGTH else FinishReason.MAX_TOKENS
    request = Request("r", (1, 2), stop, resume_index=0, length_end=length_end)
    heard = undisturbed(request)
    last = heard[-1]
    assert last.finish is reason
    ids = tuple(output.token_id for output in heard)
    resumed = replace(request, resume_ids=ids)
    end = open_request(resumed).begin(11.0, tuple)
    assert end is not None
    assert (end.finish, end.matched) == (last.finish, last.matched)
    assert (end.offset, end.token_id, end.text) == (len(ids), None, "")
    assert end.timings is not None
    with pytest.raises(InvalidRequest, match=f"token {len(ids) - 1} of these ends the answer"):
        open_request(replace(request, resume_ids=(*ids, 65)))


@pytest.mark.parametrize("stop", [stop for stop, _ in ENDS])
def test_a_resumed_answer_goes_on_as_if_undisturbed(stop: StopConditions) -> None:
    request = Request("r", (1, 2), stop, resume_index=0)
    heard = undisturbed(request)
    for cut in range(1, len(heard)):
        resumed = replace(request, resume_ids=tuple(DRAWN[:cut]))
        opened = open_request(resumed)
        assert opened.begin(11.0, tuple) is None
        sequence = Sequence(0, resumed, 0, CONFIG, text_rule=opened.text_rule)
        for was in heard[cut:]:
            assert was.token_id is not None
            finish = sequence.commit_token(was.token_id)
            now = opened.output(SequenceEvent("r", 0, 0, was.offset, was.token_id, finish=finish), 11.0)
            assert (now.text, now.finish, now.matched) == (was.text, was.finish, was.matched)
        assert opened.is_complete


def test_an_answers_times_are_those_of_its_own_tokens_and_of_its_request() -> None:
    """Arrived at 10 s, admitted at 10.5 s. The second answer has a token more, and later."""
    request = Request("r", (1, 2), StopConditions(4), num_sequences=2, output=OutputOptions(timings=True))
    opened, busy_s = open_request(request), [(1.0, 2.0)]
    assert opened.begin(10.0, lambda: busy_s[-1]) is None
    ends = []
    for index, times in enumerate([(11.0, 13.0), (11.5, 12.0, 16.0)]):
        busy_s.append((busy_s[-1][0] + 0.5, busy_s[-1][1] + 0.25))
        for offset, now_s in enumerate(times):
            finish = FinishReason.MAX_TOKENS if offset == len(times) - 1 else None
            event = SequenceEvent("r", index, index, offset, 65, finish=finish, admitted_s=10.5)
            output = opened.output(event, now_s)
        gap_s = opened.progress(index).gap_s
        ends.append((output.timings, gap_s, opened.progress(index).num_tokens))
    assert ends == [
        (Timings(0.5, 0.5, 1.0, 2.0, (0.5, 0.25)), 2.0, 2),
        (Timings(0.5, 1.0, 1.5, 4.5, (1.0, 0.5)), 4.0, 3),
    ]
    assert (opened.num_outputs, opened.num_tokens, opened.is_complete) == (5, 5, True)


def test_an_answer_that_is_cancelled_has_the_times_of_the_tokens_that_it_has() -> None:
    opened = open_request(Request("r", (1, 2), StopConditions(9), output=OutputOptions(timings=True)))
    assert opened.begin(10.0, tuple) is None
    for offset, now_s in enumerate((11.0, 13.0)):
        opened.output(SequenceEvent("r", 0, 0, offset, 65, admitted_s=10.5), now_s)
    end = opened.output(SequenceEvent("r", 0, 0, 2, finish=FinishReason.CANCELLED), 20.0)
    assert end.timings == Timings(0.5, 0.5, 1.0, 2.0, ())
