"""The front door: one gRPC server with the service, health, reflection, TLS and keys."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ppserve.config import ServerSettings
from ppserve.errors import ConfigError
from ppserve.head.api.auth import ApiKeys, KeyCheck
from ppserve.head.api.grpc.service import SERVICE_NAME, EngineHandle, GenerationService, TextCodec
from ppserve.head.limits import Limits
from ppserve.v1 import generation_pb2 as _registered  # noqa: F401  reflection serves what is registered

log = logging.getLogger(__name__)

# After the drain: time for the last statuses to leave.
LAST_WORDS_S = 1.0


class FrontDoor:
    """Serves until `stop`. Not serving, for health checks, until told that it is."""

    def __init__(self, settings: ServerSettings, engine: EngineHandle, tokenizer: TextCodec | None) -> None:
        """Raises ConfigError for certificates or keys that cannot be used. Call inside the event loop."""
        self._settings = settings
        self._keys = ApiKeys(settings.api_key_file) if settings.api_key_file else None
        self._credentials = server_credentials(settings)
        guards = [KeyCheck(self._keys)] if self._keys else []
        self._server = aio.server(interceptors=guards, options=server_options(engine.model_card().limits))
        self.service = GenerationService(engine, tokenizer, keys_are_checked=self._keys is not None)
        self._health = health.aio.HealthServicer()
        self._server.add_generic_rpc_handlers((self.service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Bind and listen; return the port. Raises ConfigError when the address cannot be bound."""
        settings = self._settings
        await self.set_serving(False)
        address = _address(settings.host, settings.port)
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise _bind_error(settings.host, settings.port) from error
        await self._server.start()
        if self._credentials is None and not _is_loopback(settings.host):
            log.warning("listening on %s without TLS: prompts and keys cross the network in the clear", address)
        return port

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told, for the server and for the service by name."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, state)

    def reload_keys(self) -> None:
        """Read the key file again. A file that cannot be used is logged, and the keys stay as they were."""
        if self._keys is None:
            return
        try:
            self._keys.reload()
        except ConfigError as error:
            log.error("keys stay as they were: %s", error)

    async def stop(self, timeout_s: float) -> None:
        """Say NOT_SERVING at once, refuse new requests, let running ones finish for `timeout_s`, then close."""
        await self._health.enter_graceful_shutdown()
        await self.service.drain(timeout_s)
        await self._server.stop(LAST_WORDS_S)


def server_options(limits: Limits) -> list[tuple[str, Any]]:
    """What the server tells gRPC's core, which ignores names that it does not know."""
    return [
        # With SO_REUSEPORT a second server binds the same port and silently steals connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # The same twice: between the two gRPC refuses some calls and not others, by chance.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # A message is decompressed before its size is looked at, and half a megabyte may hold half a gigabyte.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", 4096),
        # Find dead connections; tolerate the pings of idle clients, which the defaults answer with GOAWAY.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """None where connections are to be in the clear. Raises ConfigError for files that cannot be used."""
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None and key is None:
        if client_ca is not None:
            raise ConfigError("--tls-client-ca", "needs --tls-cert and --tls-key")
        return None
    if cert is None or key is None:
        missing, given = ("--tls-cert", "--tls-key") if cert is None else ("--tls-key", "--tls-cert")
        raise ConfigError(missing, f"needed beside {given}")
    chain, secret = _read("--tls-cert", cert), _read("--tls-key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # gRPC would only log what is wrong, and refuse every handshake
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("--tls-cert", f"{cert} and {key} are not a PEM certificate with its key") from error
    authority = None
    if client_ca is not None:
        authority = _read("--tls-client-ca", client_ca)
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise ConfigError("--tls-client-ca", f"{client_ca} holds no PEM certificate") from error
    return grpc.ssl_server_credentials([(secret, chain)], authority, require_client_auth=authority is not None)


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(flag, f"cannot read {path}: {error.strerror}") from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind_error(host: str, port: int) -> ConfigError:
    """Why the address cannot be bound: gRPC does not say, the socket does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return ConfigError("--host", f"{host!r} is not an address of this machine")
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            return ConfigError(flag, f"cannot listen on {_address(host, port)}: {(error.strerror or '').lower()}")
    return ConfigError("--port", f"{port} is in use")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
