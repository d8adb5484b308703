"""grpc.health.v1: whether the server serves.

grpcio-health-checking's service for asyncio is not used: when one of its watchers leaves, the others hear of no
further change, and one that does not read blocks every change (grpcio 1.81).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HealthState: TypeAlias = health_pb2.HealthCheckResponse
Context = aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The state of the server (the empty name) and of its services by name. NOT_SERVING until told otherwise."""

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset(("", *services))
        self._state = HealthState.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        self._state = HealthState.SERVING if serving else HealthState.NOT_SERVING
        # Watchers wait for the old event.
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> HealthState:
        if request.service not in self._names:
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return HealthState(status=self._state)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        known = request.service in self._names
        sent = None
        while True:
            changed, state = self._changed, self._state if known else HealthState.SERVICE_UNKNOWN
            if state != sent:
                await context.write(HealthState(status=state))
                sent = state
            await changed.wait()
