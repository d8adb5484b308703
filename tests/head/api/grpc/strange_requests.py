"""Requests as nobody would write them: for fuzzing."""

from __future__ import annotations

from hypothesis import strategies as st

from ppserve.v1 import generation_pb2 as pb
from ppserve.vllm import engine_pb2 as vllm

floats = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 0.5])
small = st.integers(0, 40)
counts = small | st.integers(0, 2**32 - 1)
ids = st.integers(0, 300) | st.integers(0, 2**32 - 1)
texts = st.text(max_size=80)


def _maybe(**fields: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    """Any of these fields, each with any of its values."""
    return st.fixed_dictionaries({}, optional=fields)


sampling = _maybe(
    temperature=floats,
    top_k=counts,
    top_p=floats,
    min_p=floats,
    repetition_penalty=floats,
    frequency_penalty=floats,
    presence_penalty=floats,
    seed=st.integers(0, 2**64 - 1),
    n=small,
    logit_bias=st.dictionaries(ids, floats),
).map(lambda fields: pb.SamplingParams(**fields))
stop = _maybe(
    max_tokens=counts,
    min_tokens=small,
    stop=st.lists(texts, max_size=6),
    stop_token_ids=st.lists(ids, max_size=70),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
).map(lambda fields: pb.StopConditions(**fields))
output = _maybe(
    echo=st.booleans(),
    logprobs=small,
    prompt_logprobs=small,
    token_ids=st.booleans(),
    timings=st.booleans(),
    stream_interval=counts,
).map(lambda fields: pb.OutputOptions(**fields))
resume = _maybe(index=small, generated_token_ids=st.lists(ids, max_size=70)).map(
    lambda fields: pb.ResumeFrom(**fields)
)
prompt = st.fixed_dictionaries({"text": texts}) | st.fixed_dictionaries(
    {"token_ids": st.lists(ids, max_size=70).map(lambda some: pb.TokenIds(ids=some))}
)
requests = st.tuples(
    prompt,
    _maybe(
        request_id=st.text(max_size=20),
        sampling=sampling,
        stop=stop,
        output=output,
        resume=resume,
        priority=st.integers(-(2**31), 2**31 - 1),
    ),
).map(lambda parts: pb.GenerateRequest(**parts[0], **parts[1]))


signed = st.integers(-3, 30) | st.integers(-(2**31), 2**31 - 1)
vllm_sampling = st.fixed_dictionaries(
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
).map(lambda fields: vllm.SamplingParams(**fields))
vllm_prompts = st.fixed_dictionaries({"text": texts}) | st.fixed_dictionaries(
    {"tokenized": st.lists(ids, max_size=70).map(lambda some: vllm.TokenizedInput(input_ids=some))}
)
vllm_requests = st.tuples(vllm_prompts, vllm_sampling, st.booleans(), texts).map(
    lambda parts: vllm.GenerateRequest(
        **parts[0], sampling_params=parts[1], stream=parts[2], request_id=parts[3]
    ).SerializeToString()
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message with some of its bytes changed, or bytes that were never one."""
    raw = bytearray(draw(requests).SerializeToString())
    for _ in range(draw(st.integers(0, 4))):
        if raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return draw(st.sampled_from([bytes(raw), draw(st.binary(max_size=200))]))
