"""A server of two real stages over gloo: what it answers, what it counts, what it refuses."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.asking import ask, ask_one, mixed_requests
from tests.e2e.serving import Server

CONTRACT_METRICS = {
    *("stage_busy_seconds", "stage_bubble_seconds", "stage_idle_seconds", "stage_step_seconds"),
    *("transfer_seconds", "transfer_bytes", "microbatches_in_flight", "microbatch_tokens"),
    *("time_to_first_token_seconds",),
    *("inter_token_latency_seconds", "time_per_output_token_seconds", "request_duration_seconds"),
    *("request_queue_seconds", "requests", "prompt_tokens", "generated_tokens", "requests_running"),
    *("requests_waiting", "kv_usage_ratio", "stage_restarts", "stage_info", "build_info"),
}


@pytest.fixture(scope="module")
def stub(shared_server: Server) -> Iterator[GenerationServiceStub]:
    with grpc.insecure_channel(shared_server.grpc) as channel:
        yield GenerationServiceStub(channel)


def scrape(server: Server) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as response:
        text = response.read().decode()
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"waited in vain: {what}"
        time.sleep(0.02)


def gauge(server: Server, name: str) -> float:
    (value,) = scrape(server)[f"ppserve_{name}"].values()
    return value


def test_streams_sentences(stub: GenerationServiceStub) -> None:
    request = pb.GenerateRequest(text="Once upon a time")
    request.sampling.temperature = 0.0
    request.stop.max_tokens = 40
    answer = ask_one(stub, request)
    words = answer.text.split()
    assert len(words) > 15
    assert sum(word.strip('.,"!?').isalpha() for word in words) / len(words) > 0.9, answer.text


def test_metrics_have_all_names_of_the_contract(shared_server: Server) -> None:
    with urllib.request.urlopen(f"http://{shared_server.metrics}/metrics", timeout=10) as response:
        families = {family.name for family in text_string_to_metric_families(response.read().decode())}
    assert {f"ppserve_{name}" for name in CONTRACT_METRICS} <= families


def test_busy_bubbles_and_idle_sum_to_the_wall(shared_server: Server, stub: GenerationServiceStub) -> None:
    def totals() -> tuple[float, float, list[float]]:
        """Taken at some time between the first two."""
        before_s = time.monotonic()
        samples = scrape(shared_server)
        after_s = time.monotonic()
        per_stage = [0.0, 0.0]
        for kind in ("busy", "bubble", "idle"):
            for labels, value in samples[f"ppserve_stage_{kind}_seconds_total"].items():
                per_stage[int(dict(labels)["stage"])] += value
        return before_s, after_s, per_stage

    for at_once in (1, 8):
        first_s, second_s, began = totals()
        ask(shared_server.grpc, mixed_requests(24, seed=at_once), at_once)
        third_s, fourth_s, ended = totals()
        for stage in range(2):
            # A clock's rounding: a millisecond is much more than that.
            assert third_s - second_s - 0.001 <= ended[stage] - began[stage] <= fourth_s - first_s + 0.001


def test_a_cancelled_call_frees_its_blocks(shared_server: Server, stub: GenerationServiceStub) -> None:
    request = pb.GenerateRequest(text="Once upon a time")
    request.stop.max_tokens = 900
    request.stop.ignore_eos = True
    call = stub.Generate(request)
    next(iter(call))
    wait_for(lambda: gauge(shared_server, "kv_usage_ratio") > 0, "blocks in use")
    call.cancel()
    wait_for(lambda: gauge(shared_server, "kv_usage_ratio") == 0, "blocks free again")
    assert gauge(shared_server, "requests_running") == 0
    assert gauge(shared_server, "microbatches_in_flight") == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: setattr(r.sampling, "temperature", -1.0), "sampling.temperature"),
        (lambda r: setattr(r.sampling, "temperature", float("nan")), "sampling.temperature"),
        (lambda r: setattr(r.sampling, "top_p", 2.0), "sampling.top_p"),
        (lambda r: setattr(r.stop, "max_tokens", 4_000_000_000), None),  # ends at the context instead
        (lambda r: r.token_ids.ids.extend([5] * 2000), "prompt"),
        (lambda r: r.token_ids.ids.extend([4_000_000_000]), "token_ids.ids"),
        (lambda r: r.stop.stop.extend(["x"] * 100), "stop.stop"),
    ],
)
def test_bad_fields_are_named_and_others_go_on(
    stub: GenerationServiceStub, change: Callable[[pb.GenerateRequest], object], field: str | None
) -> None:
    good = pb.GenerateRequest(text="The lamp")
    good.stop.max_tokens = 30
    good.sampling.seed = 3
    good.output.token_ids = True
    undisturbed = ask_one(stub, good)
    bad = pb.GenerateRequest(text="The lamp")
    change(bad)
    running = stub.Generate(good)
    if field is None:
        assert ask_one(stub, bad).end in ("EOS", "CONTEXT_LENGTH")
    else:
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Generate(bad))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in error.value.details()
    assert tuple(t.id for m in running for t in m.tokens) == undisturbed.token_ids


def test_invalid_utf8_is_refused(shared_server: Server) -> None:
    raw = b"\x12\x04\xff\xfe\xfd\xfc"  # field 2, text
    with grpc.insecure_channel(shared_server.grpc) as channel:
        call = channel.unary_stream("/ppserve.v1.GenerationService/Generate")
        with pytest.raises(grpc.RpcError) as error:
            list(call(raw))
    assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)


def test_tokenize_and_back(stub: GenerationServiceStub) -> None:
    text = "A lamp in the harbour: naïve café 🦔"
    tokens = stub.Tokenize(pb.TokenizeRequest(text=text)).tokens
    assert b"".join(token.bytes for token in tokens) == text.encode()
    ids = pb.TokenIds(ids=[token.id for token in tokens])
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == text


def test_model_and_topology(stub: GenerationServiceStub) -> None:
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.architecture.num_layers, info.dtype) == (8, "float32")
    assert info.deterministic, info
    topology = stub.GetTopology(pb.GetTopologyRequest())
    assert [stage.num_layers for stage in topology.stages] == [4, 4]
    assert topology.transport == "gloo"
    assert all(stage.live for stage in topology.stages)


def test_health_and_reflection(shared_server: Server) -> None:
    with grpc.insecure_channel(shared_server.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "ppserve.v1.GenerationService"):
            status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
