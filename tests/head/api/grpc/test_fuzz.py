"""Strange requests get documented statuses, and harm nobody else."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest
from grpc import aio
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from ppserve.errors import InvalidRequest
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.messages import request_fields
from ppserve.head.api.requests import to_request
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import FakeEngine, served
from tests.head.api.grpc.strange_requests import damaged, requests

GENERATE = "/ppserve.v1.GenerationService/Generate"
EXAMPLES = int(os.environ.get("PPSERVE_FUZZ_EXAMPLES", "200"))
OTHERS = ("Tokenize", "Detokenize", "GetModelInfo", "GetTopology")
quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
# Each example is a server of its own: shrinking one that fails would take minutes.
served_each = settings(quick, max_examples=max(1, EXAMPLES // 10), phases=[Phase.reuse, Phase.generate])


@given(requests)
@quick
def test_a_request_is_refused_or_within_all_limits(message: pb.GenerateRequest) -> None:
    description = FakeEngine().description
    given, _ = request_fields(message)
    try:
        made = to_request(given, message.token_ids.ids or message.text.encode(), description, Call("x", 0, 1))
    except InvalidRequest:
        return
    held = len(made.prompt_ids) + len(made.resume_ids)
    assert 0 < len(made.prompt_ids) <= description.max_context
    assert held + (made.stop.max_tokens > len(made.resume_ids)) <= description.max_context
    assert len(made.prompt_ids) + made.stop.max_tokens <= description.max_context
    assert 1 <= made.num_sequences <= description.limits.max_n
    assert made.sampling.temperature == 0 or 1e-4 <= made.sampling.temperature * 1.001 <= 101
    assert 0 < made.sampling.top_p <= 1
    assert all(token < description.architecture.vocab_size for token, _ in made.sampling.logit_bias)


async def _send_all(messages: list[tuple[str, bytes]]) -> list[grpc.StatusCode]:
    """Send each message to its method, a canary after every tenth; the statuses of all."""
    codes = []
    async with served(FakeEngine()) as (_, target), aio.insecure_channel(target) as channel:
        generate = channel.unary_stream(GENERATE)
        sung = pb.GenerateRequest(text="canary", sampling=pb.SamplingParams(seed=1), request_id="canary")
        first = None
        for number, (method, raw) in enumerate(messages):
            codes.append(await _status(channel.unary_stream(f"/ppserve.v1.GenerationService/{method}")(raw)))
            if number % 10 == 0:
                answers = [answer async for answer in generate(sung.SerializeToString())]
                song = "".join(pb.GenerateResponse.FromString(answer).text for answer in answers)
                first = first or song
                assert song == first
    return codes


async def _status(call: aio.UnaryStreamCall[bytes, bytes]) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


structured = requests.map(pb.GenerateRequest.SerializeToString)


@given(st.lists(st.tuples(st.just("Generate"), structured), min_size=5, max_size=20))
@served_each
def test_strange_requests_get_documented_statuses(messages: list[tuple[str, bytes]]) -> None:
    codes = asyncio.run(_send_all(messages))
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


@given(st.lists(st.tuples(st.sampled_from(["Generate", *OTHERS]), damaged()), min_size=5, max_size=20))
@served_each
def test_bytes_that_may_be_no_message_get_documented_statuses(messages: list[tuple[str, bytes]]) -> None:
    codes = asyncio.run(_send_all(messages))
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.parametrize("accepted", [True, False])
def test_the_fuzz_sees_both_outcomes(accepted: bool) -> None:
    """The control: strange requests are neither all refused nor all accepted."""

    def is_such(message: pb.GenerateRequest) -> bool:
        try:
            to_request(request_fields(message)[0], [1], FakeEngine().description, Call("x", 0, 1))
        except InvalidRequest:
            return not accepted
        return accepted

    find(requests, is_such, settings=settings(database=None, phases=[Phase.generate]))
