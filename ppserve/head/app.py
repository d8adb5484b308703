"""The head as a process: starts the engine, serves once the pipeline has formed, stops both."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn

from ppserve.config import ServeConfig
from ppserve.errors import ConfigError, Draining, StagesLost, UsageError
from ppserve.head.api.answer_parts.formats import FormatNames
from ppserve.head.api.auth import ApiKeys
from ppserve.head.api.chat_template import read_chat_template
from ppserve.head.api.http.page import PageState
from ppserve.head.api.request_handler import RequestHandler
from ppserve.head.descriptions import ModelDescription, Topology, describe_model, describe_topology
from ppserve.head.engine.control_sockets import SocketControlPlane
from ppserve.head.engine.loop import build_engine
from ppserve.head.engine.replica import StepObserver
from ppserve.head.listener import Ports
from ppserve.head.observe.banner import banner
from ppserve.head.observe.history import EVERY_S, History, Moment
from ppserve.head.observe.live import (
    RecentRequests,
    RecentSpans,
    links_of,
    live_pages,
    read_state,
)
from ppserve.head.observe.metrics import Metrics
from ppserve.head.observe.pages import MakePage, PageServer, json_page
from ppserve.head.observe.trace import Trace
from ppserve.head.servers import Servers
from ppserve.head.starting import WaitLimit, describe_start, find_missing
from ppserve.process.environment import RankEnvironment
from ppserve.process.head_endpoint import find_head_endpoint, open_head_socket
from ppserve.process.keeper import Keeper
from ppserve.process.lifetime import EXIT_USAGE
from ppserve.process.log import flush_streams, on_dropped, set_up_logging
from ppserve.process.progress import ProgressLine
from ppserve.process.stage_process import ForkServer
from ppserve.process.tls import stage_context

log = logging.getLogger("ppserve.head")

_HEALTH_EVERY_S = 0.1
_WATCH_EVERY_S = 0.5
_STAGES_END_WITHIN_S = 5.0


def run_head(config: ServeConfig, environment: RankEnvironment, fork_server: ForkServer) -> NoReturn:
    """Run rank 0, and end the process at once: gRPC's threads could hold up `sys.exit`."""
    set_up_logging(config.server)
    # With Python's own interval of 5 ms the engine's thread waits long while streams are written.
    sys.setswitchinterval(0.0005)

    async def run() -> int:
        return await HeadProcess(config, environment, fork_server).run()

    try:
        code = asyncio.run(run())
    except (UsageError, StagesLost) as error:
        print(f"ppserve: error: {error}", file=sys.stderr, flush=True)
        code = EXIT_USAGE if isinstance(error, UsageError) else 1
    flush_streams()
    os._exit(code)


class HeadProcess:
    """Stage 0's keeper, the engine and the servers, in the running event loop."""

    def __init__(self, config: ServeConfig, environment: RankEnvironment, fork_server: ForkServer) -> None:
        self._config = config
        self._world_size = environment.world_size
        self._num_here = environment.local_world_size
        self._endpoint = find_head_endpoint(config, environment)
        listener, secret = open_head_socket(self._endpoint)
        tls = stage_context(self._endpoint.tls, serves=True) if self._endpoint.tls else None
        self._control = SocketControlPlane(listener, self._world_size, secret, tls)
        self._keeper = Keeper(config, 0, self._world_size, self._endpoint, fork_server)
        self._keeper_thread = threading.Thread(target=self._keep_stage, name="keeper", daemon=True)
        self._keeper_failed: Future[StagesLost] = Future()
        grid = config.pipeline.grid(self._world_size)
        self._metrics = Metrics(grid.pipeline, grid.data)
        on_dropped(self._metrics.log_lines_dropped)
        self._trace = Trace(grid, config.server.trace)
        self._spans = RecentSpans(grid.pipeline, grid.data)
        self._requests = RecentRequests(grid.data)
        self._history = History()
        self._links: dict[str, str] = {}  # to the page's two views; empty until the servers are open
        self._description: ModelDescription | None = None  # once the pipeline has formed
        observers: list[StepObserver] = [self._metrics.steps, self._trace, self._spans]
        if not config.server.no_page:
            observers.append(self._requests)
        loop = asyncio.get_running_loop()
        self._engine = build_engine(
            config,
            self._world_size,
            self._control,
            hand_over=loop.call_soon_threadsafe,
            on_output=self._metrics.requests.on_output,
            step_observers=observers,
        )
        self._members = tuple(replica.members for replica in self._engine.replicas)
        self._pages = PageServer(self._make_pages())
        self._formed = asyncio.wrap_future(self._engine.formed)
        self._failed = asyncio.wrap_future(self._engine.failed)
        self._keeper_failed.add_done_callback(lambda failed: self._engine.give_up(failed.result()))
        self._stop: asyncio.Future[None] = loop.create_future()  # done at the first signal to end
        self._stop_now: asyncio.Future[None] = loop.create_future()  # at the second one

    async def run(self) -> int:
        """Run until a signal, and return the exit code. Raise UsageError or StagesLost."""
        self._listen_to_signals()
        settings = self._config.server
        metrics_port = await self._pages.start(settings.host, settings.metrics_port)
        self._keeper_thread.start()
        self._engine.start()
        try:
            await self._await_pipeline()
            if self._formed.done() and not self._failed.done():
                await self._serve(metrics_port)
            if self._failed.done():
                raise self._failed.result()
        finally:
            await self._pages.stop()
            self._engine.stop()
            await self._end_stages()
            self._trace.stop()
        return 0

    async def _await_pipeline(self) -> None:
        limit = WaitLimit(self._config.server.start_timeout_s, time.monotonic())
        say = log.info if self._config.server.log_format == "json" else None
        line = ProgressLine(sys.stderr, "starting", time.monotonic(), say)
        while not await _any_done(_WATCH_EVERY_S, self._stop, self._formed, self._failed):
            line.show(self._describe_start(), time.monotonic())
            seen, missing = find_missing(self._members, self._num_here)
            if reason := limit.check((seen, self._keeper.doing), missing, time.monotonic()):
                self._engine.give_up(reason)
        line.erase()

    def _describe_start(self) -> str:
        graphs = self._config.device.cuda_graphs
        return describe_start(self._members, self._keeper.doing, self._num_here, graphs)

    async def _serve(self, metrics_port: int) -> None:
        """Serve until a signal, and then until running streams have ended; or until the pipeline is lost."""
        handler = self._make_handler()
        servers = self._make_servers(handler)
        self._on_reload(handler, servers)
        await self._open(servers, handler, metrics_port)
        history = asyncio.create_task(self._keep_history())
        await self._report_health(handler)
        await servers.close(self._begin_draining(), self._stop_now)
        history.cancel()
        handler.close()

    async def _keep_history(self) -> None:
        """Note a point of the history every second, until this is cancelled."""
        while True:
            with suppress(Draining):  # the engine does not answer, or no more
                readings = await asyncio.to_thread(self._engine.snapshot)
                times = [times for reading in readings for times in reading.times]
                self._history.add(Moment(readings[0].now_ns, self._metrics.read_load(), times))
            await asyncio.sleep(EVERY_S)

    def _make_handler(self) -> RequestHandler:
        settings = self._config.server
        self._description, tokenizer = describe_model(self._config, self._members)
        description = self._description
        keys = ApiKeys(settings.api_key_file) if settings.api_key_file else None
        formats = FormatNames(settings.tool_format, settings.reasoning_format)
        special_ids = tokenizer.special_ids
        template = read_chat_template(settings.chat_template, description.chat_format, special_ids, formats)
        on_refused = self._metrics.requests.on_refused
        return RequestHandler(self._engine, description, tokenizer, keys, on_refused, template)

    async def _report_health(self, handler: RequestHandler) -> None:
        """Tell the health service, until a signal or the pipeline's end: without a replica the server is not
        SERVING."""
        while not await _any_done(_HEALTH_EVERY_S, self._stop, self._failed):
            healthy = self._engine.is_healthy
            if healthy != handler.is_serving:
                handler.set_serving(healthy)

    def _begin_draining(self) -> float:
        """Return the seconds that running streams have; none after a failure."""
        if self._failed.done():
            return 0.0
        timeout_s = self._config.server.shutdown_timeout_s
        log.info("draining: running streams have %g s", timeout_s)
        self._engine.drain()
        return timeout_s

    def _make_pages(self) -> dict[str, MakePage]:
        """Return the pages of the metrics port, which is open from the beginning."""
        metrics = self._metrics
        pages = {"/metrics": metrics.page, "/load.json": json_page(metrics.read_load)}
        return {**pages, **live_pages(self._read_state)}

    def _read_state(self) -> dict[str, Any]:
        if self._description is None:
            return {"status": "starting", "start": self._describe_start()}
        readings, load, spans = self._engine.snapshot(), self._metrics.read_load(), self._spans.recent()
        return read_state(readings, self._description, load, spans, self._links, self._history.points())

    def _make_servers(self, handler: RequestHandler) -> Servers:
        settings = self._config.server
        self._metrics.read_pipelines(self._engine.snapshot)
        shown = None if settings.no_page else PageState(self._read_state, self._requests.steps_of)
        return Servers(settings, handler, self._metrics.http_answered, shown)

    async def _open(self, servers: Servers, handler: RequestHandler, metrics_port: int) -> None:
        description = handler.description
        topology = describe_topology(await asyncio.to_thread(self._engine.snapshot))
        self._metrics.describe(description)
        ports = await servers.open(metrics_port)
        settings = self._config.server
        self._links = links_of(ports, not settings.no_page, settings.tls_cert is not None)
        # What exists now stays. If the collector searched it, streams would stop for 0.1 s.
        gc.collect()
        gc.freeze()
        handler.set_serving(True)
        self._announce(description, topology, ports)

    def _announce(self, description: ModelDescription, topology: Topology, ports: Ports) -> None:
        print(banner(description, topology, self._config.server, ports), file=sys.stderr, flush=True)
        host = self._config.server.host
        host = f"[{host}]" if ":" in host else host
        places = f"grpc={host}:{ports.grpc} metrics={host}:{ports.metrics} stages={self._members[0].grid.pipeline}"
        print(f"ppserve ready {places} http={host}:{ports.http}", flush=True)

    def _keep_stage(self) -> None:
        """Keep stage 0 alive, in the keeper's thread: the stage ends with this thread."""
        try:
            self._keeper.run()
        except Exception as error:
            log.exception("the keeper of stage 0 failed")
            self._keeper_failed.set_result(StagesLost(f"stage 0 cannot be kept alive: {error}"))

    async def _end_stages(self) -> None:
        """Wait for the stages, which the engine has told to exit. The keeper kills stage 0 if it does not."""
        self._keeper.stop(_STAGES_END_WITHIN_S)
        await asyncio.to_thread(self._engine.join, 2 * _STAGES_END_WITHIN_S)
        await asyncio.to_thread(self._keeper_thread.join, 2 * _STAGES_END_WITHIN_S)

    # ---- signals ----

    def _listen_to_signals(self) -> None:
        def on_stop() -> None:
            for signalled in (self._stop, self._stop_now):
                if not signalled.done():
                    signalled.set_result(None)
                    return

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, on_stop)

    def _on_reload(self, handler: RequestHandler, servers: Servers) -> None:
        held = {"keys": handler.keys, "certificates": servers.certificates}
        reads = {what: each.read for what, each in held.items() if each is not None}
        if (tls := self._endpoint.tls) is not None:
            # For new connections of stages, which read their own files.
            reads["certificates for stages"] = lambda: self._control.use_certificate(
                stage_context(tls, serves=True)
            )

        def reload() -> None:
            for what, read_again in reads.items():
                try:
                    read_again()
                    log.info("%s read again", what)
                except ConfigError as error:
                    log.error("%s stay as they are: %s", what, error)

        for signum, act in ((signal.SIGHUP, reload), (signal.SIGUSR1, self._trace.toggle)):
            asyncio.get_running_loop().add_signal_handler(signum, act)


async def _any_done(within_s: float, *futures: asyncio.Future[Any]) -> bool:
    done, _ = await asyncio.wait(futures, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    return len(done) > 0
