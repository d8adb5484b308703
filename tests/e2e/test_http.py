"""HTTP of real servers: token for token and log-probability for log-probability what gRPC says, also when streamed
and when a stage is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import CompletionChoice

from ppserve.v1 import generation_pb2 as pb
from tests.e2e.asking import Answer, Logprob, ask_all, requests_with_everything
from tests.e2e.serving import Server, serving

ENDS = {"EOS": "stop", "STOP_TOKEN": "stop", "STOP_STRING": "stop", "MAX_TOKENS": "length"}
SAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "n", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "stream_interval"),
)
OPENAI_S = {"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "n", "max_tokens"}


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=100)


def both_ways(count: int, seed: int) -> list[pb.GenerateRequest]:
    """Requests that can be asked by both protocols: by HTTP a prompt is scored when it is echoed."""
    requests = requests_with_everything(count, seed)
    for request in requests:
        output = request.output
        output.ClearField("prompt_logprobs")
        if output.echo and output.HasField("logprobs"):
            output.prompt_logprobs = output.logprobs
    return requests


def as_http(request: pb.GenerateRequest) -> dict[str, Any]:
    """The same request, as openai-python takes it."""
    given = {f.name: v for part in (request.sampling, request.stop, request.output) for f, v in part.ListFields()}
    more: dict[str, Any] = {name: given[name] for name in SAME if name in given and name not in OPENAI_S}
    asked: dict[str, Any] = {name: given[name] for name in SAME if name in given and name in OPENAI_S}
    more["stop_token_ids"] = list(request.stop.stop_token_ids)
    more |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    more["include_stop_str_in_output"] = request.stop.include_stop
    asked["stop"] = list(request.stop.stop) or None
    asked["logit_bias"] = {str(token_id): bias for token_id, bias in request.sampling.logit_bias.items()}
    asked["echo"] = request.output.echo
    asked["logprobs"] = request.output.logprobs if request.output.HasField("logprobs") else None
    return {"model": "tiny", "prompt": request.text, **asked, "extra_body": more}


def ask_whole(client: OpenAI, request: pb.GenerateRequest) -> list[Any]:
    return [comparable([choice]) for choice in client.completions.create(**as_http(request)).choices]


def ask_streamed(client: OpenAI, request: pb.GenerateRequest) -> list[Any]:
    parts: dict[int, list[CompletionChoice]] = {}
    for chunk in client.completions.create(**as_http(request), stream=True):
        for choice in chunk.choices:
            parts.setdefault(choice.index, []).append(choice)
    return [comparable(parts[index]) for index in sorted(parts)]


async def ask_asynchronously(server: Server, requests: list[pb.GenerateRequest]) -> tuple[list[Any], list[Any]]:
    """Whole and streamed, by the asynchronous client."""
    async with AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:

        async def whole(request: pb.GenerateRequest) -> list[Any]:
            answer = await client.completions.create(**as_http(request))
            return [comparable([choice]) for choice in answer.choices]

        async def streamed(request: pb.GenerateRequest) -> list[Any]:
            parts: dict[int, list[CompletionChoice]] = {}
            async for chunk in await client.completions.create(**as_http(request), stream=True):
                for choice in chunk.choices:
                    parts.setdefault(choice.index, []).append(choice)
            return [comparable(parts[index]) for index in sorted(parts)]

        return (
            list(await asyncio.gather(*map(whole, requests))),
            list(await asyncio.gather(*map(streamed, requests))),
        )


def comparable(parts: list[CompletionChoice]) -> Any:
    """All that the parts of one choice say."""
    ids, logprobs, tops = [], [], []
    for part in parts:
        ids += (part.model_extra or {})["token_ids"]
        if part.logprobs is not None:
            logprobs += part.logprobs.token_logprobs or []
            tops += part.logprobs.top_logprobs or []
    last = parts[-1]
    text = "".join(part.text for part in parts)
    return ids, text, logprobs, tops, last.finish_reason, (last.model_extra or {})["stop_reason"]


def expected(request: pb.GenerateRequest, answers: Sequence[Answer]) -> list[Any]:
    """What gRPC said, as HTTP says it: every choice has the prompt's log-probabilities, not only the first."""
    first = answers[0]
    prompt = [(None, None), *map(shown, first.prompt_logprobs[1:], first.prompt_ids[1:])]
    sequences = []
    for answer in answers:
        scored = [*(prompt if first.prompt_logprobs else []), *map(shown, answer.logprobs, answer.token_ids)]
        if not request.output.HasField("logprobs"):
            scored = []
        logprobs, tops = [logprob for logprob, _ in scored], [top for _, top in scored]
        matched = None if answer.end == "EOS" else answer.matched
        sequences.append((list(answer.token_ids), answer.text, logprobs, tops, ENDS[answer.end], matched))
    return sequences


def shown(score: Logprob, token_id: int) -> tuple[float, dict[str, float]]:
    logprob, top = score
    named = {f"token_id:{top_id}": top_logprob for top_id, top_logprob in top}
    return logprob, {**named, f"token_id:{token_id}": logprob}


def test_http_says_what_grpc_says_whole_and_streamed(shared_server: Server) -> None:
    requests = both_ways(24, seed=15)
    by_grpc = ask_all(shared_server.grpc, requests, at_once=8)
    spoken = list(map(expected, requests, by_grpc))
    with client_of(shared_server) as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda request: ask_whole(client, request), requests)) == spoken
        assert list(pool.map(lambda request: ask_streamed(client, request), requests)) == spoken
    whole, streamed = asyncio.run(ask_asynchronously(shared_server, requests))
    assert whole == streamed == spoken


def test_a_stream_is_resumed_with_the_rest_of_it(shared_server: Server) -> None:
    """By what docs/http.md says, with any client; the first stream is left in the middle of an answer."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 60, "logprobs": 1}
    asked["n"] = 2
    more = {"ignore_eos": True, "return_token_ids": True}
    with client_of(shared_server) as client:
        stream = client.completions.create(**asked, extra_body=more, stream=True)
        held: list[CompletionChoice] = []
        for chunk in stream:
            held += [choice for choice in chunk.choices if choice.index == 1]
            if len(held) == 20:
                break
        stream.close()
        seed = (chunk.model_extra or {})["seed"]
        ids = [token_id for part in held for token_id in (part.model_extra or {})["token_ids"]]
        resume = {**more, "resume": {"index": 1, "token_ids": ids}}
        rest = client.completions.create(**asked, seed=seed, extra_body=resume).choices
        undisturbed = client.completions.create(**asked, seed=seed, extra_body=more).choices
    assert [choice.index for choice in rest] == [1]
    assert comparable([*held, *rest]) == comparable([undisturbed[1]])


def test_many_prompts_in_one_body_answer_as_if_alone(shared_server: Server) -> None:
    prompts = ["Once upon a time", "The quiet stage", "A lamp", "Two small boats"] * 4
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "seed": 4, "logprobs": 2, "echo": True}
    with client_of(shared_server) as client:
        together = client.completions.create(prompt=prompts, **asked).choices
        alone = [client.completions.create(prompt=prompt, **asked).choices[0] for prompt in prompts[:4]]
    assert [choice.index for choice in together] == list(range(16))
    for place, choice in enumerate(together):
        assert (choice.text, choice.logprobs) == (alone[place % 4].text, alone[place % 4].logprobs)


@pytest.mark.timeout(180)
def test_a_stream_goes_on_when_a_stage_is_killed() -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 150, "seed": 3}
    asked["logprobs"] = 1
    asked["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    with serving(2) as server, client_of(server) as client:
        undisturbed = comparable(client.completions.create(**asked).choices)
        parts = []
        for number, chunk in enumerate(client.completions.create(**asked, stream=True)):
            parts += chunk.choices
            if number == 20:
                os.kill(server.stage_pid(1), signal.SIGKILL)
        assert "stage 1 died" in server.log
        assert comparable(parts) == undisturbed
        assert server.terminate() in (0, 1)
