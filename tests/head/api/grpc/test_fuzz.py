"""Strange requests get documented statuses in both gRPC protocols, and harm nobody else."""

from __future__ import annotations

import asyncio
import os

import grpc
from grpc import aio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ppserve.config import ServerSettings
from ppserve.errors import InvalidRequest
from ppserve.head.api.call import Call
from ppserve.head.api.grpc.messages import request_fields
from ppserve.head.api.requests import to_request
from ppserve.v1 import generation_pb2 as pb
from tests.fake_engine import CARD, FakeEngine, code_of, served
from tests.head.api.grpc.strange_requests import damaged, requests, vllm_requests

OURS, VLLM = "/ppserve.v1.GenerationService", "/vllm.grpc.engine.VllmEngine"
EXAMPLES = int(os.environ.get("PPSERVE_FUZZ_EXAMPLES", "200"))
quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
# Each example is a server of its own: shrinking one that fails would take minutes.
served_each = settings(quick, max_examples=max(1, EXAMPLES // 10), phases=[Phase.reuse, Phase.generate])
METHODS = [f"{OURS}/{name}" for name in ("Generate", "Tokenize", "Detokenize", "GetModelInfo", "GetTopology")]
strange = (
    st.tuples(st.just(f"{OURS}/Generate"), requests.map(pb.GenerateRequest.SerializeToString))
    | st.tuples(st.sampled_from(METHODS), damaged())
    | st.tuples(st.just(f"{VLLM}/Generate"), vllm_requests | st.binary(max_size=200))
)


@given(requests)
@quick
def test_a_request_is_refused_or_within_all_limits(message: pb.GenerateRequest) -> None:
    given, _ = request_fields(message)
    try:
        made = to_request(given, message.token_ids.ids or message.text.encode(), CARD, Call("x", 0, 1))
    except InvalidRequest:
        return
    held = len(made.prompt_ids) + len(made.resume_ids)
    assert 0 < len(made.prompt_ids) <= CARD.max_context
    assert held + (made.stop.max_tokens > len(made.resume_ids)) <= CARD.max_context
    assert len(made.prompt_ids) + made.stop.max_tokens <= CARD.max_context
    assert 1 <= made.num_sequences <= CARD.limits.max_n
    assert made.sampling.temperature == 0 or 1e-4 <= made.sampling.temperature * 1.001 <= 101
    assert 0 < made.sampling.top_p <= 1
    assert all(token < CARD.architecture.vocab_size for token, _ in made.sampling.logit_bias)


@given(st.lists(strange, min_size=5, max_size=20))
@served_each
def test_strange_messages_get_documented_statuses(messages: list[tuple[str, bytes]]) -> None:
    async def main() -> None:
        async with served(FakeEngine(), ServerSettings(port=0, vllm_grpc=True)) as (_, target):
            async with aio.insecure_channel(target) as channel:
                generate = channel.unary_stream(f"{OURS}/Generate")
                canary = pb.GenerateRequest(text="canary", sampling=pb.SamplingParams(seed=1), request_id="canary")
                sung = canary.SerializeToString()

                async def song() -> str:
                    messages = [pb.GenerateResponse.FromString(answer) async for answer in generate(sung)]
                    return "".join(message.text for message in messages)

                first = await song()
                codes = {await code_of(channel.unary_stream(method)(raw)) for method, raw in messages}
                assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
                assert await song() == first != ""

    asyncio.run(main())
