"""The gRPC server: the services, health, reflection, TLS and keys on one port."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ppserve.errors import ConfigError
from ppserve.head.api.grpc.calls import Context, KeyCheck, Service, registered
from ppserve.head.api.grpc.service import GenerationService
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import Certificates
from ppserve.head.limits import Limits
from ppserve.head.listener import address_text, bound

# Beyond so many calls gRPC answers RESOURCE_EXHAUSTED.
MAX_CALLS = 4096
# So long after the drain the last statuses may still be sent.
CLOSING_S = 1.0

HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HealthState: TypeAlias = health_pb2.HealthCheckResponse


class GrpcServer:
    """A server of all services that speak gRPC, from `start` to `stop`."""

    def __init__(
        self, handler: RequestHandler, others: Sequence[Service] = (), tls: Certificates | None = None
    ) -> None:
        """others: further services on the same port. Call it inside the event loop."""
        self.request_handler, self.tls = handler, tls
        keys = handler.keys
        self._server = aio.server(
            interceptors=[] if keys is None else [KeyCheck(handler, keys)],
            options=server_options(handler.description.limits),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        services = [GenerationService(handler), *others]
        names = [service.descriptor.full_name for service in services]
        self._server.add_generic_rpc_handlers([registered(service, handler) for service in services])
        health_pb2_grpc.add_HealthServicer_to_server(Health(handler, names), self._server)
        self._server.add_generic_rpc_handlers(list(reflecting((*names, HEALTH_NAME))))

    async def start(self, host: str, port: int) -> int:
        """Bind and listen; return the port. Raises ConfigError when it cannot."""
        address = address_text(host, port)
        try:
            if self.tls is None:
                own_port = self._server.add_insecure_port(address)
            else:
                own_port = self._server.add_secure_port(address, _credentials(self.tls))
        except RuntimeError as error:
            bound(host, port, "--port").close()  # says why, which gRPC does not
            raise ConfigError("--port", f"{port} is in use") from error
        await self._server.start()
        return own_port

    async def stop(self) -> None:
        """Close, once the request handler is drained."""
        await self._server.stop(CLOSING_S)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service: it tells whether the server, by the empty name, or a service, by its own, serves.

    The asyncio service of grpcio-health-checking (1.81) has two defects: when a watcher leaves, the others hear of
    no further change; and a watcher that does not read blocks all others.
    """

    def __init__(self, handler: RequestHandler, services: Iterable[str]) -> None:
        self._handler = handler
        self._names = frozenset(("", *services))

    def _state(self, service: str) -> Any:
        if service not in self._names:
            return HealthState.SERVICE_UNKNOWN
        return HealthState.SERVING if self._handler.is_serving else HealthState.NOT_SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> HealthState:
        if request.service not in self._names:
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return HealthState(status=self._state(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        sent = None
        while True:
            changed = self._handler.serving_changed
            state = self._state(request.service)
            if state != sent:
                await context.write(HealthState(status=state))
                sent = state
            await changed.wait()


def reflecting(names: Sequence[str]) -> Iterator[grpc.GenericRpcHandler]:
    """Yield the services that reflect these services and themselves: v1alpha, and v1, which grpcio-reflection
    lacks.

    Both have the same messages, but for that word in their names.
    """
    alpha = reflection_pb2.DESCRIPTOR
    file = FileDescriptorProto()
    alpha.CopyToProto(file)
    stable = text_format.Parse(str(file).replace("v1alpha", "v1"), FileDescriptorProto())
    own_names = [f"{package}.ServerReflection" for package in (alpha.package, stable.package)]
    descriptor_pool.Default().Add(stable)  # the same again changes nothing
    method = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer((*names, *own_names)).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in own_names:
        yield grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})


def server_options(limits: Limits) -> list[tuple[str, Any]]:
    """Return the options of gRPC's core, which ignores unknown names."""
    return [
        # With SO_REUSEPORT a second server silently steals connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # Both limits are the same: between two different ones, gRPC refuses calls by chance.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # Sizes are checked after decompression: half a megabyte may hold half a gigabyte.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Connections may take a quarter of the files that may be open.
        ("grpc.max_allowed_incoming_connections", min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)),
        # A client opens another connection with its next call.
        ("grpc.max_connection_idle_ms", 300_000),
        # Dead connections are found, and idle clients may send pings.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def _credentials(tls: Certificates) -> grpc.ServerCredentials:
    def newest() -> grpc.ServerCertificateConfiguration:
        """Return the certificate as it is now. gRPC calls this in every handshake, in a thread of its own."""
        key, chain, client_ca = tls.pem
        return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca)

    return grpc.dynamic_ssl_server_credentials(newest(), newest, tls.pem[2] is not None)
