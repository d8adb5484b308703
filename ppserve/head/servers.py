"""The servers of all protocols, gRPC and HTTP, which are opened and closed as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ppserve.config import ServerSettings
from ppserve.head.api.grpc.server import GrpcServer
from ppserve.head.api.http.page import PageState
from ppserve.head.api.http.server import HttpServer
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import read_certificates
from ppserve.head.api.vllm_grpc.service import VllmService
from ppserve.head.listener import Ports
from ppserve.process.network import is_loopback

log = logging.getLogger("ppserve.head")

# So long may the servers take to close once streams have ended.
_CLOSES_WITHIN_S = 5.0


class Servers:
    """Owns the servers of all protocols."""

    def __init__(
        self,
        settings: ServerSettings,
        handler: RequestHandler,
        count_answer: Callable[[str, int], None],
        page_state: PageState | None = None,
    ) -> None:
        """page_state: None where HTTP shows no page.

        Raises ConfigError for certificates that cannot be used. Call it inside the event loop.
        """
        self._settings, self._handler = settings, handler
        others = [VllmService(handler)] if settings.vllm_grpc else []
        self.certificates = read_certificates(settings)
        self._grpc = GrpcServer(handler, others, self.certificates)
        self._http = HttpServer(handler, count_answer, self.certificates, settings.cors_origin, page=page_state)

    async def open(self, metrics_port: int) -> Ports:
        """Bind and listen. metrics_port: the port that serves the metrics, which is open already.

        Raises ConfigError for an address that cannot be bound.
        """
        settings, host = self._settings, self._settings.host
        self._handler.metrics_port = metrics_port
        grpc = await self._grpc.start(host, settings.port)
        ports = Ports(grpc, await self._http.start(host, settings.http_port), metrics_port)
        if self.certificates is None and not is_loopback(host):
            log.warning("listening on %s without TLS: prompts and keys cross the network in the clear", host)
        return ports

    async def close(self, timeout_s: float, at_once: asyncio.Future[None]) -> None:
        """Refuse new requests, let running ones finish for `timeout_s`, or until `at_once`, and close all.

        Closing is not cancelled: an interrupted gRPC server may never stop.
        """
        await self._handler.drain(timeout_s, at_once)
        closing = asyncio.ensure_future(self._stop())
        await asyncio.wait((closing,), timeout=_CLOSES_WITHIN_S)
        if not closing.done():
            log.warning("the servers have not closed within %g s", _CLOSES_WITHIN_S)
            return
        closing.result()

    async def _stop(self) -> None:
        await asyncio.gather(self._grpc.stop(), self._http.stop())
