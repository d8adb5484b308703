"""Strange requests get documented statuses."""

from __future__ import annotations

import asyncio
import os

import grpc
from grpc import aio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ppserve.config import ServerSettings
from ppserve.vllm import engine_pb2 as pb
from tests.fake_engine import FakeEngine, code_of, served
from tests.head.api.grpc.strange_requests import counts, floats, ids, small, texts

EXAMPLES = int(os.environ.get("PPSERVE_FUZZ_EXAMPLES", "200"))
served_each = settings(
    max_examples=max(1, EXAMPLES // 10), deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate],
)  # fmt: skip
signed = st.integers(-3, 30) | st.integers(-(2**31), 2**31 - 1)
sampling = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"), floats),
        **dict.fromkeys(("top_k", "max_tokens", "min_tokens"), counts),
        **dict.fromkeys(("seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"), signed),
        "n": small,
        "stop": st.lists(texts, max_size=6),
        "stop_token_ids": st.lists(ids, max_size=70),
        "logit_bias": st.dictionaries(signed, floats),
        "regex": texts,
    },
).map(lambda fields: pb.SamplingParams(**fields))
prompts = st.fixed_dictionaries({"text": texts}) | st.fixed_dictionaries(
    {"tokenized": st.lists(ids, max_size=70).map(lambda some: pb.TokenizedInput(input_ids=some))}
)
messages = st.tuples(prompts, sampling, st.booleans(), texts).map(
    lambda parts: pb.GenerateRequest(
        **parts[0], sampling_params=parts[1], stream=parts[2], request_id=parts[3]
    ).SerializeToString()
)


@given(st.lists(messages | st.binary(max_size=200), min_size=5, max_size=20))
@served_each
def test_strange_requests_get_documented_statuses(raws: list[bytes]) -> None:
    async def main() -> None:
        async with served(FakeEngine(), ServerSettings(port=0, vllm_grpc=True)) as (_, target):
            async with aio.insecure_channel(target) as channel:
                generate = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
                params = pb.SamplingParams(seed=1)
                sung = pb.GenerateRequest(text="canary", sampling_params=params).SerializeToString()
                first = [answer async for answer in generate(sung)]
                codes = {await code_of(generate(raw)) for raw in raws}
                assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
                assert [answer async for answer in generate(sung)] == first

    asyncio.run(main())
