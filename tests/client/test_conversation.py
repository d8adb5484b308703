"""A broken stream continued: the text is that of an undisturbed one, wherever it broke."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ppserve.client.conversation import Conversation, Retries, RetryPolicy
from ppserve.client.messages import CallFailed
from ppserve.tokenizer import Detokenizer
from ppserve.v1 import generation_pb2 as pb

GONE = CallFailed("UNAVAILABLE", "gone")
DRAINING = CallFailed("UNAVAILABLE", "shutting down", "DRAINING")
# Characters of one to four bytes, and beginnings of the stop string that come to nothing.
OUTPUT = "so é 漢 🙂 END of EN ENDI 🙂é END?"


class Bytes:
    """A tokenizer of single bytes, as far as a Detokenizer needs one."""

    def text_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
    """What a server does with a request, here without a model: one byte of OUTPUT a token."""
    ids = list(OUTPUT.encode())
    detokenizer = Detokenizer(Bytes(), tuple(request.stop.stop), request.stop.include_stop)
    begin = len(request.resume.generated_token_ids)
    assert list(request.resume.generated_token_ids) == ids[:begin]
    for token_id in ids[:begin]:
        detokenizer.push(token_id)
    for offset in range(begin, len(ids)):
        piece = detokenizer.push(ids[offset])
        message = pb.GenerateResponse(first_token=offset, text=piece.text, num_tokens=1, seed=1)
        message.tokens.add(id=ids[offset])
        if piece.matched is not None or offset + 1 == len(ids):
            message.text += detokenizer.finish()
            message.finish.reason = pb.Finish.STOP_STRING if piece.matched else pb.Finish.MAX_TOKENS
            message.finish.stop = piece.matched or ""
        yield message
        if message.HasField("finish"):
            return


def converse(request: pb.GenerateRequest, breaks: set[int]) -> str:
    """The text a client puts together when its stream breaks before these messages, counted over all calls."""
    conversation = Conversation(request, RetryPolicy())
    text, count = "", 0
    while (asked := conversation.next_request()) is not None:
        for message in answer(asked):
            if count in breaks:
                breaks.remove(count)
                conversation.pause_after(GONE, now_s=0.0)
                break
            text += conversation.record(message).text
            count += 1
    return text


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("stop", [(), ("END?",), ("ENDI",), ("🙂é", "EN END")])
def test_text_is_that_of_an_undisturbed_stream(stop: tuple[str, ...], include_stop: bool) -> None:
    request = pb.GenerateRequest(stop=pb.StopConditions(stop=stop, include_stop=include_stop))
    whole = converse(request, set())
    assert OUTPUT.startswith(whole)
    length = len(OUTPUT.encode())
    for first in range(length):
        assert converse(request, {first}) == whole
        assert converse(request, {first, first + 3, first + 4}) == whole


def test_what_came_with_the_beginning_is_not_asked_for_again() -> None:
    """One of two answers has begun: the prompt's scores came with it, but the other's echo has not come yet."""
    output = pb.OutputOptions(echo=True, prompt_logprobs=0)
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(n=2), output=output)
    conversation = Conversation(request, RetryPolicy())
    first = pb.GenerateResponse(index=0, text="ab", num_tokens=1, seed=5, request_id="its name")
    first.tokens.add(id=98)
    first.prompt_tokens.add(id=97)
    conversation.record(first)
    rest = conversation.next_request()
    assert rest is not None
    assert rest.resume == pb.ResumeFrom(index=0, generated_token_ids=[98])
    assert (rest.text, rest.sampling.seed, rest.request_id) == ("a", 5, "its name")
    assert (rest.output.echo, rest.output.HasField("prompt_logprobs")) == (False, False)
    conversation.record(pb.GenerateResponse(index=0, finish=pb.Finish(reason=pb.Finish.EOS)))
    other = conversation.next_request()
    assert other is not None
    assert other.resume == pb.ResumeFrom(index=1)
    assert (other.output.echo, other.output.HasField("prompt_logprobs")) == (True, False)


def test_the_caller_s_request_is_not_touched() -> None:
    request = pb.GenerateRequest(text="a")
    before = request.SerializeToString()
    converse(request, {2})
    assert request.SerializeToString() == before


def test_pauses_double_up_to_the_longest_and_obey_the_server() -> None:
    unanswered = Conversation(pb.GenerateRequest(), RetryPolicy())
    assert max(unanswered.pause_after(GONE, now_s=0.0) for _ in range(20)) == 1.0, "it may be back only shortly"
    policy = RetryPolicy(max_attempts=6, first_pause_s=1.0, max_pause_s=3.0)
    conversation = Conversation(pb.GenerateRequest(), policy)
    assert [conversation.pause_after(DRAINING, now_s=0.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    full = CallFailed("RESOURCE_EXHAUSTED", "full", retry_after_s=9.0)
    assert conversation.pause_after(full, now_s=0.0) == 9.0
    soon = CallFailed("RESOURCE_EXHAUSTED", "full", "QUEUE_FULL", retry_after_s=0.5)
    patient = Conversation(pb.GenerateRequest(), policy)
    assert [patient.pause_after(soon, now_s=0.0) for _ in range(2)] == [1.0, 2.0], "or longer than it asks for"
    assert conversation.pause_after(DRAINING, now_s=0.0) == 3.0
    with pytest.raises(CallFailed):
        conversation.pause_after(DRAINING, now_s=0.0)


def test_a_stream_that_has_begun_is_tried_for_a_time_and_not_a_number_of_times() -> None:
    policy = RetryPolicy(max_attempts=2, resume_timeout_s=120.0, max_pause_s=1.0)
    begun, unbegun = Conversation(pb.GenerateRequest(), policy), Conversation(pb.GenerateRequest(), RetryPolicy())
    news = answer(pb.GenerateRequest())
    for begin_s in (0.0, 1000.0):
        begun.record(next(news))
        for second in range(120):
            assert begun.pause_after(GONE, begin_s + second) <= 1.0
    for second in range(120):  # without a limit on attempts, a call without a token is tried as long
        unbegun.pause_after(GONE, 1000.0 + second)
    for conversation in (begun, unbegun):
        with pytest.raises(CallFailed):
            conversation.pause_after(GONE, 1120.0)


def test_who_gives_up_says_what_it_began_with() -> None:
    heard: list[CallFailed] = []
    retries = Retries(RetryPolicy(max_attempts=4, on_retry=heard.append))
    refused = CallFailed("UNAVAILABLE", "connection refused")
    for failure in (GONE, DRAINING, refused):
        retries.pause_after(failure, now_s=0.0)
    with pytest.raises(CallFailed) as end:
        retries.pause_after(refused, now_s=0.0)
    assert heard == [GONE, DRAINING, refused]
    assert str(end.value) == "UNAVAILABLE: connection refused (at first: UNAVAILABLE: shutting down)"
    assert (end.value.code, end.value.__cause__) == ("UNAVAILABLE", DRAINING)


def test_who_is_not_told_of_failures_finds_the_first_of_a_row_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    retries = Retries(RetryPolicy())
    for _ in range(3):
        retries.pause_after(GONE, now_s=0.0)
    (warning,) = caplog.records
    assert warning.getMessage() == "trying again for up to 120 s after: UNAVAILABLE: gone"
    assert (warning.name, warning.levelname) == ("ppserve.client", "WARNING")
    retries.progress()
    retries.pause_after(GONE, now_s=0.0)
    assert len(caplog.records) == 2
    Retries(RetryPolicy(on_retry=lambda failure: None)).pause_after(GONE, now_s=0.0)
    assert len(caplog.records) == 2


def test_what_does_not_change_is_said_once() -> None:
    retries = Retries(RetryPolicy(max_attempts=2))
    retries.pause_after(GONE, now_s=0.0)
    retries.progress()
    retries.pause_after(CallFailed("UNAVAILABLE", "socket closed"), now_s=0.0)
    with pytest.raises(CallFailed) as end:
        retries.pause_after(CallFailed("UNAVAILABLE", "socket closed"), now_s=0.0)
    assert (str(end.value), end.value.__cause__) == ("UNAVAILABLE: socket closed", None)


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED"])
def test_what_time_does_not_heal_is_final(code: str) -> None:
    with pytest.raises(CallFailed, match=code):
        Conversation(pb.GenerateRequest(), RetryPolicy()).pause_after(CallFailed(code, "no"), now_s=0.0)


def test_a_stream_closed_before_its_end_is_an_error() -> None:
    conversation = Conversation(pb.GenerateRequest(), RetryPolicy())
    request = conversation.next_request()
    assert request is not None
    conversation.record(next(answer(request)))
    with pytest.raises(CallFailed, match="before its end"):
        conversation.check_end(request)
