"""A server of two real stages over gloo: what it answers, and that a caller who hangs up costs nothing more."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.asking import answers_alone, ask_all, requests_with_everything
from tests.e2e.serving import Server, wait_until


@pytest.fixture(scope="module")
def stub(shared_server: Server) -> Iterator[GenerationServiceStub]:
    with grpc.insecure_channel(shared_server.grpc) as channel:
        yield GenerationServiceStub(channel)


@pytest.mark.timeout(300)
def test_all_parameters_mixed_equal_each_request_alone(shared_server: Server) -> None:
    requests = requests_with_everything(64, seed=2)
    together = ask_all(shared_server.grpc, requests, at_once=64)
    alone = answers_alone(requests)
    for request, one, other in zip(requests, together, alone, strict=True):
        assert one == other, request
    first = {answers[0].token_ids for answers in together}
    assert len(first) > 32, "the answers hardly differ: proves nothing"
    ends = {answer.end for answers in together for answer in answers}
    assert {"MAX_TOKENS", "EOS", "STOP_TOKEN", "STOP_STRING"} <= ends, ends
    assert not ends & {"INTERNAL", "UNKNOWN", "INVALID_ARGUMENT"}, ends
    scored = [a for answers in together for a in answers if any(logprob for logprob, _ in a.logprobs)]
    assert len(scored) > 10, "too few log-probabilities to prove anything"
    several = [answers for answers in together if len(answers) > 1 and len(answers[0].token_ids) > 5]
    assert any(len({a.token_ids for a in answers}) > 1 for answers in several), "n sequences never differ"


@pytest.mark.parametrize("door", ["grpc", "http", "http stream"])
def test_a_caller_who_hangs_up_cancels_its_request_which_frees_its_blocks(
    shared_server: Server, stub: GenerationServiceStub, door: str
) -> None:
    """It has so many tokens before it that it would not end by itself before the server hears of it."""

    def wait_for(**gauges: float) -> None:
        def are_so() -> bool:
            return all(shared_server.metric(f"ppserve_{name}") == value for name, value in gauges.items())

        wait_until(are_so, lambda: str(gauges))

    def count_cancelled() -> float:
        return shared_server.metric("ppserve_requests_total", reason="CANCELLED")

    wait_for(requests_running=0)
    before = count_cancelled()
    asked: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
    connection = http.client.HTTPConnection(shared_server.http, timeout=20)
    if door == "grpc":
        request = pb.GenerateRequest(text="Once", sampling=pb.SamplingParams(n=8), stop=pb.StopConditions(**asked))
        hang_up = stub.Generate(request).cancel
    else:
        asked |= {"prompt": "Once", "n": 8, "stream": door == "http stream"}
        connection.request("POST", "/v1/completions", json.dumps(asked))
        hang_up = connection.close
    wait_for(requests_running=8)
    assert shared_server.metric("ppserve_kv_usage_ratio") > 0
    hang_up()
    wait_for(requests_running=0, kv_usage_ratio=0, microbatches_in_flight=0)
    assert count_cancelled() == before + 1
