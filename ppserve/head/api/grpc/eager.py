"""gRPC's server in asyncio, but one that takes calls in as fast as they come.

gRPC's own asks its core for one call, and for the next when the event loop has turned twice. A turn in which
tokens are written to many streams takes milliseconds. So at 400 calls a second they waited inside gRPC for
seconds, where no limit of ours is seen, and were refused, or admitted, when their callers had nearly given up.
This one has asked for `AHEAD` calls before they come. gRPC has no option for it: private names of grpcio are used.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from grpc import aio
from grpc._cython import cygrpc
from grpc.aio import _server

# So many are taken in within four turns of the loop: that long it takes until the next are asked for. A turn takes
# 20 ms under overload; with 32, calls at 400 a second waited for seconds.
AHEAD = 128


class EagerCore(cygrpc.AioServer):  # type: ignore[misc]
    """Its loop asks for one call after the other, and finds those that have come already."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: deque[asyncio.Task[Any]] = deque()

    async def _request_call(self) -> Any:
        while len(self._asked) < AHEAD:
            task = asyncio.ensure_future(super()._request_call())
            # When the server stops, all that still wait fail, and one of them is enough to say so.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._asked.append(task)
        return await self._asked.popleft()


class EagerServer(_server.Server):
    """As `aio.server` makes it, with another core."""

    def __init__(self, interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = EagerCore(self._loop, None, (), interceptors, tuple(options), None)
