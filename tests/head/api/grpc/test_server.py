"""The front door: health, reflection, binding, keys, TLS, shutting down."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ppserve.client.connection import CHANNEL_OPTIONS
from ppserve.config import ServerSettings
from ppserve.errors import ConfigError
from ppserve.head.api import tls
from ppserve.head.api.auth import ApiKeys
from ppserve.head.api.grpc.calls import LOCAL_PEERS
from ppserve.head.api.grpc.server import GrpcServer, server_options
from ppserve.head.api.tls import read_certificates
from ppserve.head.limits import Limits
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.certificates import make_certificates, needs_openssl
from tests.fake_engine import KEYS, FakeEngine, channel_to, code_of, generation, handler_of, served, stub_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "ppserve.v1.GenerationService")


async def health_of(channel: aio.Channel, name: str = "", **call: object) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), **call)
    return answer.status


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_health_by_name() -> None:
    async with served(FakeEngine()) as (door, target), channel_to(target) as channel:
        assert [await health_of(channel, name) for name in NAMES] == [SERVING, SERVING]
        door.request_handler.set_serving(False)
        assert [await health_of(channel, name) for name in NAMES] == [NOT_SERVING, NOT_SERVING]
        with pytest.raises(aio.AioRpcError) as failure:
            await health_of(channel, "somebody.else")
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def watched(channel: aio.Channel) -> tuple[aio.UnaryStreamCall, int]:
    """A watcher, and what it was told first."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    return call, (await call.read()).status


async def test_when_a_watcher_leaves_the_others_still_hear() -> None:
    async with served(FakeEngine()) as (door, target), channel_to(target) as channel:
        (leaves, _), (stays, told) = await watched(channel), await watched(channel)
        assert told == SERVING
        leaves.cancel()
        await code_of(leaves.code())
        for state in (NOT_SERVING, SERVING):
            # A call that comes after the cancellation has been answered: the server knows of both.
            await health_of(channel)
            door.request_handler.set_serving(state == SERVING)
            assert (await asyncio.wait_for(stays.read(), 20)).status == state
        stays.cancel()


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_describes_the_services(version: str) -> None:
    own_name = f"grpc.reflection.{version}.ServerReflection"
    async with served(FakeEngine()) as (_, target), channel_to(target) as channel:
        ask = channel.stream_stream(
            f"/{own_name}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        symbols = ("ppserve.v1.GenerationService", own_name)
        asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
        asked.append(reflection_pb2.ServerReflectionRequest(list_services=""))
        described, itself, listed = [answer async for answer in ask(iter(asked))]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        *("ppserve.v1.GenerationService", "grpc.health.v1.Health"),
        *("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"),
    }
    assert b"ResumeFrom" in described.file_descriptor_response.file_descriptor_proto[0]
    (content,) = itself.file_descriptor_response.file_descriptor_proto
    file = FileDescriptorProto.FromString(content)
    assert file.package == f"grpc.reflection.{version}"
    assert file.service[0].method[0].input_type == f".{file.package}.ServerReflectionRequest"


async def test_an_address_that_cannot_be_bound() -> None:
    async with served(FakeEngine()) as (_, target):
        port = int(target.rpartition(":")[2])
        second = GrpcServer(handler_of(FakeEngine()))
        with pytest.raises(ConfigError, match="address already in use") as refusal:
            await second.start("127.0.0.1", port)
        assert refusal.value.name == "--port"
        with pytest.raises(ConfigError) as refusal:
            await second.start("192.0.2.1", 0)
        assert refusal.value.name == "--host"


async def test_every_method_but_health_wants_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    engine = FakeEngine()
    async with served(engine, ServerSettings(port=0, api_key_file=keys)) as (_, target):
        async with channel_to(target) as channel, stub_of(target) as stub:
            assert await health_of(channel) == SERVING
            good = "0123456789abcdef"
            for metadata in (
                None,
                bearer("wrong"),
                bearer("wrong") + bearer(good),
                (("authorization", good),),
            ):
                calls = [
                    stub.Generate(pb.GenerateRequest(), metadata=metadata),
                    stub.Tokenize(pb.TokenizeRequest(), metadata=metadata),
                    stub.Detokenize(pb.DetokenizeRequest(), metadata=metadata),
                    stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata),
                    stub.GetTopology(pb.GetTopologyRequest(), metadata=metadata),
                    channel.unary_unary("/no.such.Service/Method")(b"", metadata=metadata),
                    reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
                    ),
                ]
                assert {await code_of(call) for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
            assert len(engine.refused) == 4, "only Generate is a request"
            for key in (good, "fedcba9876543210"):
                call = stub.Generate(pb.GenerateRequest(), metadata=bearer(key))
                assert await code_of(call) is grpc.StatusCode.OK
            callers = [request.caller for request in engine.requests]
            assert len(set(callers)) == 2
            assert not any("0123456789abcdef" in caller for caller in callers)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"short\n", "line 1"),
        (b"# nothing\n", "holds no key"),
        (b"\xff\xfe", "line 1"),
        (None, "cannot read"),
        (b"0123456789abcdef\nwith spaces in it, so no\n", "line 2"),
    ],
)
def test_key_files_that_cannot_be_used(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as refusal:
        ApiKeys(path)
    assert refusal.value.name == "--api-key-file"


@needs_openssl
async def test_mutual_tls_whose_certificates_are_replaced_under_a_stream(tmp_path: Path) -> None:
    """The stream goes on by the old ones; a new connection must know the new authority, and be known to it."""
    (tmp_path / "new").mkdir()
    make_certificates(tmp_path)
    make_certificates(tmp_path / "new")
    names = ("ca.pem", "leaf.key", "leaf.pem")
    old, new = (
        grpc.ssl_channel_credentials(*((folder / name).read_bytes() for name in names))
        for folder in (tmp_path, tmp_path / "new")
    )
    anonymous = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    settings = ServerSettings(
        port=0, tls_cert=tmp_path / "leaf.pem", tls_key=tmp_path / "leaf.key", tls_client_ca=tmp_path / "ca.pem"
    )
    engine = FakeEngine(by_hand=True)
    async with served(engine, settings) as (door, target), aio.secure_channel(target, old) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest())
        await engine.until(lambda engine: len(engine.requests) == 1)
        assert engine.requests[0].caller.startswith("certificate:")
        async with aio.secure_channel(target, anonymous) as unknown:
            assert await code_of(health_of(unknown, timeout=5)) is grpc.StatusCode.UNAVAILABLE
        for name in names:
            shutil.copy(tmp_path / "new" / name, tmp_path / name)
        assert door.tls is not None
        door.tls.read()
        async with aio.secure_channel(target, new) as later:
            assert await health_of(later) == SERVING
        apart = [("grpc.use_local_subchannel_pool", 1)]
        async with aio.secure_channel(target, old, apart) as late:
            assert await code_of(health_of(late, timeout=5)) is grpc.StatusCode.UNAVAILABLE
        request = engine.requests[0]
        engine.sinks[request.id](generation(request, 0))
        assert await code_of(call) is grpc.StatusCode.OK


@needs_openssl
async def test_tls_needs_no_certificate_of_the_client(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    anonymous = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    settings = ServerSettings(port=0, tls_cert=tmp_path / "leaf.pem", tls_key=tmp_path / "leaf.key")
    async with served(FakeEngine(), settings) as (_, target):
        async with aio.secure_channel(target, anonymous) as channel:
            assert await health_of(channel) == SERVING
        async with channel_to(target) as channel:
            assert await code_of(health_of(channel, timeout=5)) is grpc.StatusCode.UNAVAILABLE


@needs_openssl
@pytest.mark.parametrize(
    ("files", "flag"),
    [
        ({"tls_cert": "leaf.pem"}, "--tls-key"),
        ({"tls_key": "leaf.key"}, "--tls-cert"),
        ({"tls_client_ca": "ca.pem"}, "--tls-cert"),
        ({"tls_cert": "missing", "tls_key": "leaf.key"}, "--tls-cert"),
        ({"tls_cert": "leaf.pem", "tls_key": "ca.key"}, "--tls-cert"),
        ({"tls_cert": "names", "tls_key": "leaf.key"}, "--tls-cert"),
        ({"tls_cert": "leaf.pem", "tls_key": "leaf.key", "tls_client_ca": "names"}, "--tls-client-ca"),
    ],
)
def test_certificates_that_cannot_be_used(tmp_path: Path, files: dict[str, str], flag: str) -> None:
    make_certificates(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        read_certificates(ServerSettings(**{name: tmp_path / file for name, file in files.items()}))
    assert refusal.value.name == flag


def test_a_certificate_that_goes_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "read_file", lambda flag, path: b"")
    with pytest.raises(ConfigError) as refusal:
        read_certificates(ServerSettings(tls_cert=Path("gone"), tls_key=Path("gone")))
    assert refusal.value.name == "--tls-cert"


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        *((peer, True) for peer in ("ipv4:127.0.0.1:50000", "ipv6:[::1]:50000", "ipv6:%5B::1%5D:50000", "unix:")),
        ("ipv6:[::ffff:127.0.0.1]:50000", True),
        *((peer, False) for peer in ("ipv4:10.0.0.7:50000", "ipv6:[2001:db8::1]:50000", "")),
        ("ipv6:[::ffff:10.0.0.7]:50000", False),
    ],
)
def test_who_calls_from_the_heads_own_host(peer: str, is_local: bool) -> None:
    assert peer.startswith(LOCAL_PEERS) is is_local


def test_grpc_knows_every_option() -> None:
    """A misspelt option has no effect and no error: look for the names in gRPC's own binary."""
    (library,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    binary = library.read_bytes()
    names = [name for name, _ in (*server_options(Limits()), *CHANNEL_OPTIONS)]
    assert [name for name in names if name.encode() + b"\0" not in binary] == []
    assert b"grpc.no_such_option\0" not in binary
