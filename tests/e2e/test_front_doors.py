"""What a client meets when a server of two stages has too much to do, loses a stage, or is told to end. The tests
share one server and leave it well; the last one ends it.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from openai import DefaultHttpxClient, OpenAI

from ppserve.answers import completion_of
from ppserve.client import CallFailed, Client, RetryPolicy
from ppserve.vllm import engine_pb2 as pb
from ppserve.vllm.engine_pb2_grpc import VllmEngineStub
from tests.e2e.serving import Server, serving, wait_until
from tests.e2e.test_http import client_of, comparable
from tests.e2e.test_resuming import parts_of
from tests.e2e.test_vllm_grpc import ask_vllm, outputs

ASKED: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "seed": 3, "logprobs": 1}
MORE = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = "--vllm-grpc", "--max-num-seqs", "16", "--max-queue", "1", "--served-model-name", "tiny,org/story"
    with serving(2, *flags) as started:
        yield started


def answer_of(server: Server, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, json.load(answer)
    finally:
        connection.close()


@contextmanager
def everything_taken(server: Server) -> Iterator[None]:
    """Ask for as many long sequences as may run, and for a short one that waits; leave them at the end."""
    long = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "n": 16}
    connections = [http.client.HTTPConnection(server.http, timeout=60) for _ in "ab"]
    try:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = VllmEngineStub(channel)

            def loads() -> pb.SchedulerLoad:
                return stub.GetLoads(pb.GetLoadsRequest()).loads[0]

            connections[0].request("POST", "/v1/completions", json.dumps(long))
            wait_until(lambda: loads().num_running_reqs == 16)
            connections[1].request("POST", "/v1/completions", json.dumps({"prompt": "a"}))
            wait_until(lambda: loads().num_waiting_reqs == 1)
        yield
    finally:
        for connection in connections:
            connection.close()


def health_with(server: Server, status: int) -> tuple[dict[str, str], Any]:
    """Headers and JSON of the first answer that has this status."""

    def matching() -> tuple[dict[str, str], Any] | None:
        found, *rest = answer_of(server, "GET", "/health")
        return tuple(rest) if found == status else None

    return wait_until(matching)


def test_every_door_calls_the_model_alike(server: Server) -> None:
    _, _, listed = answer_of(server, "GET", "/v1/models")
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/story"]
    assert answer_of(server, "GET", "/v1/models/org/story")[2]["id"] == "org/story"
    status, _, answer = answer_of(server, "POST", "/v1/completions", {"model": "org/story", "prompt": "a"})
    assert (status, answer["model"]) == (200, "tiny")
    with Client(server.grpc) as client, grpc.insecure_channel(server.grpc) as channel:
        assert client.model_info().model == "tiny"
        found = VllmEngineStub(channel).GetModelInfo(pb.GetModelInfoRequest())
    assert (found.model_path, found.served_model_name) == ("tiny", "tiny")
    assert server.metric("ppserve_build_info", model="tiny") == 1


def test_a_full_queue_says_when_to_come_back_and_openai_s_client_does(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    told_ms: list[str] = []

    def note(answer: Any) -> None:
        if answer.status_code == 429:
            told_ms.append(answer.headers["retry-after-ms"])

    watched = DefaultHttpxClient(event_hooks={"response": [note]})
    with client_of(server) as client, caplog.at_level(logging.INFO, "openai"), ThreadPoolExecutor(1) as pool:
        alone = client.completions.create(**ASKED, max_tokens=8)
        with everything_taken(server):
            status, headers, said = answer_of(server, "POST", "/v1/completions", {"prompt": "a"})
            assert (status, said["error"]["code"]) == (429, "queue_full")
            assert int(headers["retry-after"]) >= int(headers["retry-after-ms"]) / 1000 > 0
            patient = client.with_options(max_retries=20, http_client=watched)
            asking = pool.submit(patient.completions.create, **ASKED, max_tokens=8)
            wait_until(lambda: "Retrying request" in caplog.text)
        assert asking.result().choices == alone.choices
        watched.close()
    waits_s = [float(found) for found in re.findall(r"Retrying request .*?in ([0-9.]+) seconds", caplog.text)]
    assert waits_s == [int(told) / 1000 for told in told_ms], caplog.text


@pytest.mark.timeout(180)
def test_streams_of_every_door_go_on_when_a_stage_is_killed(server: Server) -> None:
    params = pb.SamplingParams(max_tokens=150, seed=3, ignore_eos=True, logprobs=1)
    by_router = pb.GenerateRequest(text=ASKED["prompt"], sampling_params=params, stream=True)
    asked = {**ASKED, "max_tokens": 150, "extra_body": MORE}
    begun = threading.Barrier(3, timeout=60)

    def by_http(client: OpenAI) -> Any:
        parts = []
        for number, chunk in enumerate(client.completions.create(**asked, stream=True)):
            parts += chunk.choices
            if number == 10:
                begun.wait()
        return comparable(parts)

    def by_vllm(stub: VllmEngineStub) -> Any:
        ids: list[int] = []
        for number, answer in enumerate(stub.Generate(by_router, timeout=100)):
            ids += answer.chunk.token_ids
            if number == 10:
                begun.wait()
        return ids, outputs(answer.complete.output_logprobs)

    with client_of(server) as client, grpc.insecure_channel(server.grpc) as channel, ThreadPoolExecutor(2) as pool:
        stub = VllmEngineStub(channel)
        undisturbed = comparable(client.completions.create(**asked).choices)
        undisturbed_router = ask_vllm(stub, by_router)[0][:2]
        streams = [pool.submit(by_http, client), pool.submit(by_vllm, stub)]
        begun.wait()
        os.kill(server.stage_pid(1), signal.SIGKILL)
        headers, said = health_with(server, 503)
        assert (headers["retry-after"], said["error"]["code"]) == ("5", "draining")
        assert [stream.result() for stream in streams] == [undisturbed, undisturbed_router]
    assert "stage 1 died" in server.log
    health_with(server, 200)


@pytest.mark.timeout(180)
def test_an_answer_of_a_form_goes_on_when_a_stage_is_killed(server: Server) -> None:
    """It has the tokens that it has undisturbed."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "minItems": 60}}}
    asked = {**ASKED, "max_tokens": 150, "extra_body": {"response_format": form, "return_token_ids": True}}
    with client_of(server) as client:
        undisturbed = client.completions.create(**asked).choices[0]
        assert undisturbed.text.lstrip().startswith("[")
        text = ""
        for number, chunk in enumerate(client.completions.create(**asked, stream=True)):
            text += "".join(choice.text for choice in chunk.choices)
            if number == 10:
                os.kill(server.stage_pid(1), signal.SIGKILL)
    assert text == undisturbed.text
    health_with(server, 200)


def test_a_server_that_ends_lets_streams_finish_says_when_to_come_back_and_leaves_nothing(server: Server) -> None:
    # Long enough to be under way when the server has heard of the signal, and said so.
    asked = {**ASKED, "max_tokens": 400, "extra_body": MORE}
    options = {"max_tokens": 400, "ignore_eos": True, "seed": 1, "n": 2, "token_ids": True}
    once = RetryPolicy(max_attempts=1, resume=False)
    with client_of(server) as client, Client(server.grpc, retry=once) as grpc_client:
        undisturbed = grpc_client.complete(ASKED["prompt"], **options)
        stream = client.completions.create(**asked, stream=True)
        parts = list(next(stream).choices)
        grpc_stream = grpc_client.stream(ASKED["prompt"], **options)
        chunks = [next(grpc_stream)]
        server.processes()
        server.process.send_signal(signal.SIGTERM)
        health_with(server, 503)
        wait_until(lambda: not grpc_client.is_serving())
        status, headers, said = answer_of(server, "POST", "/v1/completions", {"prompt": "a"})
        assert (status, headers["retry-after"], said["error"]["code"]) == (503, "5", "draining")
        with pytest.raises(CallFailed) as refusal:
            grpc_client.complete(ASKED["prompt"], max_tokens=1)
        assert (refusal.value.code, refusal.value.reason) == ("UNAVAILABLE", "DRAINING")
        parts += [choice for chunk in stream for choice in chunk.choices]
        assert len(comparable(parts)[0]) == 400
        chunks += grpc_stream
        assert parts_of(completion_of(chunks)) == parts_of(undisturbed)
    assert server.wait_exit() in (0, 1)
    server.wait_gone()
