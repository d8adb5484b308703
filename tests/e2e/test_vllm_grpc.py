"""`vllm.grpc.engine` of a real server: token for token, and score for score, what our own gRPC says."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from ppserve.v1 import generation_pb2 as v1
from ppserve.vllm import engine_pb2 as pb
from ppserve.vllm.engine_pb2_grpc import VllmEngineStub
from tests.e2e.asking import Answer, Logprob, ask_all, options_of, requests_with_everything
from tests.e2e.serving import Server
from tests.e2e.test_http import ENDS

# All numbers of a sequence: its tokens, scores of them and of the prompt, its end.
Said = tuple[list[int], list[Logprob], list[Logprob], str, int | str | None]


def as_vllm(request: v1.GenerateRequest, stream: bool) -> pb.GenerateRequest:
    """Return the request as vLLM's interface has it; what it lacks (echo) changes no number."""
    names = {"include_stop": "include_stop_str_in_output"}
    message = pb.GenerateRequest(text=request.text, stream=stream)
    known = message.sampling_params.DESCRIPTOR.fields_by_name
    for name, value in options_of(request).items():
        field = names.get(name, name)
        if field in known:
            message.sampling_params.MergeFrom(pb.SamplingParams(**{field: value}))
    return message


def ask_vllm(stub: VllmEngineStub, request: pb.GenerateRequest) -> list[Said]:
    """Return what every sequence says, from the chunks where it streams; these must say what its end says."""
    heard: dict[int, list[pb.GenerateStreamChunk]] = {}
    said: dict[int, Said] = {}
    for answer in stub.Generate(request, timeout=100):
        if answer.HasField("chunk"):
            heard.setdefault(answer.chunk.index, []).append(answer.chunk)
            continue
        end = answer.complete
        which = end.WhichOneof("matched_stop")
        matched = getattr(end, which) if which else None
        scores, prompt = outputs(end.output_logprobs), inputs(end.input_logprobs)
        said[end.index] = (list(end.output_ids), scores, prompt, end.finish_reason, matched)
        if request.stream:
            chunks = heard[end.index]
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == list(end.output_ids)
            assert [score for chunk in chunks for score in outputs(chunk.output_logprobs)] == scores
            assert inputs(chunks[0].input_logprobs) == prompt
    return [said[index] for index in sorted(said)]


def outputs(lists: pb.OutputLogProbs) -> list[Logprob]:
    return scored(list(lists.token_logprobs), lists.top_logprobs)


def inputs(lists: pb.InputLogProbs) -> list[Logprob]:
    return scored([score.value for score in lists.token_logprobs], lists.top_logprobs)


def scored(logprobs: list[float], tops: Sequence[pb.TopLogProbs]) -> list[Logprob]:
    pairs = [tuple(zip(top.token_ids, top.values, strict=True)) for top in tops] or [()] * len(logprobs)
    return list(zip(logprobs, pairs, strict=True))


def expected(request: v1.GenerateRequest, answers: Sequence[Answer]) -> list[Said]:
    """What our own protocol said. There, only the first sequence has the prompt's scores."""
    prompt = list(answers[0].prompt_logprobs)
    return [
        (
            list(answer.token_ids),
            list(answer.logprobs) if request.output.HasField("logprobs") else [],
            prompt,
            ENDS[answer.end],
            None if answer.end == "EOS" else answer.matched,
        )
        for answer in answers
    ]


def test_it_says_what_our_own_protocol_says(shared_server: Server) -> None:
    requests = requests_with_everything(48, seed=15)
    for request in requests:  # what it has no field for
        for name in ("allowed_token_ids", "bad_words"):
            request.sampling.ClearField(name)
    by_ours = ask_all(shared_server.grpc, requests, at_once=8)
    spoken = list(map(expected, requests, by_ours))
    with grpc.insecure_channel(shared_server.grpc) as channel, ThreadPoolExecutor(8) as pool:
        stub = VllmEngineStub(channel)
        for stream in (True, False):
            asked = [as_vllm(request, stream) for request in requests]
            assert list(pool.map(lambda request: ask_vllm(stub, request), asked)) == spoken
