"""HTTP of a real server: token for token, and log-probability for log-probability, what gRPC says; whole and
streamed, by openai-python."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI
from openai.types import CompletionChoice

from ppserve.v1 import generation_pb2 as pb
from tests.e2e.asking import Answer, Logprob, ask_all, options_of, requests_with_everything
from tests.e2e.serving import Server

ENDS = {"EOS": "stop", "STOP_TOKEN": "stop", "STOP_STRING": "stop", "MAX_TOKENS": "length"}
SAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "n", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "stream_interval"),
)
OPENAI_S = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "n", "max_tokens")
"""The options that openai-python knows."""


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
    """Return the request as openai-python takes it."""
    given = options_of(request)
    more: dict[str, Any] = {name: given[name] for name in SAME if name in given and name not in OPENAI_S}
    asked: dict[str, Any] = {name: given[name] for name in SAME if name in given and name in OPENAI_S}
    more["stop_token_ids"] = list(request.stop.stop_token_ids)
    more["allowed_token_ids"] = list(request.sampling.allowed_token_ids)
    more["bad_words"] = list(request.sampling.bad_words)
    more["skip_special_tokens"] = request.output.skip_special_tokens
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
