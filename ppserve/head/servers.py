"""All that the server listens on: gRPC, HTTP and the pages of the metrics port, opened and closed as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from ppserve.config import ServerSettings
from ppserve.head.api.grpc.server import GrpcServer
from ppserve.head.api.http.server import HttpServer
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.api.tls import read_certificates
from ppserve.head.api.vllm_grpc.service import VllmService
from ppserve.head.listener import Ports
from ppserve.head.observe.pages import MakePage, PageServer
from ppserve.process.network import is_loopback

log = logging.getLogger("ppserve.head")

# Streams have ended: time for the servers to close.
_CLOSES_WITHIN_S = 5.0


class Servers:
    """The servers of all protocols."""

    def __init__(
        self,
        settings: ServerSettings,
        request_handler: RequestHandler,
        count_answer: Callable[[str, int], None],
        pages: Mapping[str, MakePage],
    ) -> None:
        """Raises ConfigError for certificates that cannot be used. Call inside the event loop."""
        self._settings = settings
        self._request_handler = request_handler
        others = [VllmService(request_handler)] if settings.vllm_grpc else []
        self._grpc = GrpcServer(settings, request_handler, others)
        self._http = HttpServer(settings, request_handler, count_answer)
        self._pages = PageServer(pages)

    async def open(self) -> Ports:
        """Bind and listen. Raises ConfigError for an address that cannot be bound."""
        host = self._settings.host
        metrics = await self._pages.start(host, self._settings.metrics_port)
        ports = Ports(await self._grpc.start(), await self._http.start(), metrics)
        if self._settings.tls_cert is None and not is_loopback(host):
            log.warning("listening on %s without TLS: prompts and keys cross the network in the clear", host)
        return ports

    def reload_certificates(self) -> None:
        """Shows what the files hold now to new connections. Raises ConfigError, and then changes nothing."""
        if (certificates := read_certificates(self._settings)) is not None:
            self._grpc.show(certificates)
            self._http.show(certificates)
            log.info("certificates read again")

    async def close(self, timeout_s: float, at_once: asyncio.Future[None]) -> None:
        """Refuse new requests, let running ones finish for `timeout_s`, or until `at_once`, and close all.

        Closing is neither begun twice nor cancelled: a gRPC server that is interrupted while it stops may not stop
        any more. Nor does the head wait for it without a limit: connections end with its process anyway.
        """
        closing = asyncio.ensure_future(self._close(timeout_s))
        waits = closing, at_once
        await asyncio.wait(waits, timeout=timeout_s + _CLOSES_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        if at_once.done() and not closing.done():
            await self._request_handler.drain(0.0)
            await asyncio.wait((closing,), timeout=_CLOSES_WITHIN_S)
        if not closing.done():
            log.warning("the servers have not closed within %g s", _CLOSES_WITHIN_S)
            return
        closing.result()

    async def _close(self, timeout_s: float) -> None:
        await self._request_handler.drain(timeout_s)
        await asyncio.gather(self._grpc.stop(), self._http.stop())
        await self._pages.stop()
