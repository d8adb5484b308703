"""The head as a process: starts the pipeline, opens the front door, and closes both in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import sys
import threading
import time

from ppserve import __version__
from ppserve.config import ServeConfig
from ppserve.core.architecture import Architecture
from ppserve.core.ledger.account import TimeAccount
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.lane_count import LaneCount
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.errors import ConfigError, UsageError
from ppserve.head.api.grpc.server import FrontDoor
from ppserve.head.engine import layout
from ppserve.head.engine.control import ControlPlane
from ppserve.head.engine.handle import PipelineHandle, describe_model
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.members import Formed, Hopeless, Members
from ppserve.head.observe.banner import Progress, banner
from ppserve.head.observe.live import serve_page
from ppserve.head.observe.metrics import Metrics
from ppserve.head.observe.observer import Observer
from ppserve.head.observe.trace import Trace
from ppserve.process.environment import (
    EXIT_USAGE,
    LAUNCHER_GRACE,
    RankEnvironment,
    die_with_launcher,
    launcher_grace_s,
    this_machine,
)
from ppserve.process.keeper import Keeper
from ppserve.process.logs import set_up_logging
from ppserve.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("ppserve.head")

_HEALTH_EVERY_S = 0.1
_STAGES_END_WITHIN_S = 5.0
# From the end of the last stream to the end of a rank, as a rule.
_ENDING_S = 5.0


def run_head(config: ServeConfig, environment: RankEnvironment) -> int:
    """The whole life of rank 0; returns its exit code."""
    die_with_launcher()
    set_up_logging(config.log)
    # The engine must not wait long for the interpreter while messages are written.
    sys.setswitchinterval(0.0005)
    try:
        return asyncio.run(Head(config, environment).run())
    except UsageError as error:
        print(f"ppserve: error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE


def warn_of_short_grace(config: ServeConfig) -> None:
    """torchrun kills its ranks a while after it was told to end, whatever they are doing."""
    timeout_s, grace_s = config.server.shutdown_timeout_s, launcher_grace_s()
    if grace_s is not None and timeout_s + _ENDING_S > grace_s:
        log.warning(
            "--shutdown-timeout is %g s, but torchrun kills ranks %g s after a SIGTERM: set %s=%d",
            *(timeout_s, grace_s, LAUNCHER_GRACE, math.ceil(timeout_s + 2 * _ENDING_S)),
        )


class Head:
    """Composes the rooms of the head; each has one owner, and this is where they meet."""

    def __init__(self, config: ServeConfig, environment: RankEnvironment) -> None:
        self._config = config
        self._num_stages = environment.world_size
        one_host = environment.local_world_size == environment.world_size
        token = secrets.token_hex(16)
        self._control = ControlPlane("127.0.0.1" if one_host else "0.0.0.0", self._num_stages, token)
        control_host = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._keeper = Keeper(config, 0, self._num_stages, (control_host, self._control.port, token))
        self._keeper_thread = threading.Thread(target=self._keeper.run, name="keeper", daemon=True)
        self._members = Members(
            num_stages=self._num_stages,
            machine=this_machine(),
            decide=lambda hellos: layout.decide(config, hellos),
            choose_num_blocks=lambda loaded: layout.num_blocks(config, self._architecture, loaded),
            send=self._control.send,
            drop=self._control.drop,
        )
        self._metrics = Metrics(self._num_stages)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def _architecture(self) -> Architecture:
        hello = self._members.stages[0].hello
        assert hello is not None
        return hello.architecture

    async def run(self) -> int:
        """Until a signal, or until the pipeline is lost for good."""
        self._listen_to_signals()
        warn_of_short_grace(self._config)
        account = TimeAccount(self._num_stages, time.monotonic_ns())
        observer = Observer(account, self._metrics, Trace(self._num_stages, self._config.server.trace))
        is_auto = self._config.pipeline.microbatches is None
        lanes = LaneCount(self._num_stages, observer.costs.fixed_s) if is_auto else None
        engine = Engine(
            self._control, self._members, observer, lambda formed: self._make_scheduler(formed, observer), lanes
        )
        self._keeper_thread.start()
        engine.start()
        try:
            return await self._serve(engine, observer)
        finally:
            engine.stop()
            await self._end_stages(engine)
            observer.trace.close()

    async def _serve(self, engine: Engine, observer: Observer) -> int:
        code = await self._wait_for_pipeline(engine)
        if code is not None:
            return code
        tokenizer = self._load_tokenizer()
        engine.tokenizer = tokenizer
        handle = PipelineHandle(
            engine, self._members, observer, describe_model(self._config, self._members, tokenizer)
        )
        door = FrontDoor(self._config.server, handle, tokenizer)
        self._metrics.serve_json("/costs.json", handle.cost_sheet)
        serve_page(self._metrics, handle.state)
        metrics_port = await asyncio.to_thread(self._start_metrics, handle)
        port = await door.start()
        await door.set_serving(True)
        self._on_reload(door, observer)
        host = self._config.server.host
        topology = await asyncio.to_thread(handle.topology)
        about = banner(handle.model_card(), topology, host, port, metrics_port)
        print(about, file=sys.stderr, flush=True)
        print(
            f"ppserve ready grpc={host}:{port} metrics={host}:{metrics_port} stages={self._num_stages}", flush=True
        )
        health = asyncio.create_task(self._report_health(door))
        try:
            await self._first(self._wait(self._stop), engine.failed)
            if not engine.failed.done():
                log.info("draining: running streams have %g s", self._config.server.shutdown_timeout_s)
                engine.drain()
        finally:
            health.cancel()
        return await self._close(door, engine)

    async def _wait_for_pipeline(self, engine: Engine) -> int | None:
        """None when it has formed; an exit code when it will not, or when a signal came first."""
        with Progress(self._members):
            await self._first(self._wait(self._stop), engine.formed, engine.failed)
        if engine.failed.done():
            return self._complain(engine.failed.result())
        return None if engine.formed.done() else 0

    async def _close(self, door: FrontDoor, engine: Engine) -> int:
        """Streams finish, or time out, or a second signal ends them."""
        timeout_s = 0.0 if engine.failed.done() else self._config.server.shutdown_timeout_s
        closing = asyncio.ensure_future(door.stop(timeout_s))
        await self._first(closing, self._wait(self._stop_now))
        if not closing.done():
            closing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await closing
            await door.stop(0.0)
        return self._complain(engine.failed.result()) if engine.failed.done() else 0

    async def _end_stages(self, engine: Engine) -> None:
        """The engine tells the stages; the keeper of stage 0 makes sure of the one that is its child."""
        self._keeper.stop(_STAGES_END_WITHIN_S)
        await asyncio.to_thread(engine.join, 2 * _STAGES_END_WITHIN_S)
        await asyncio.to_thread(self._keeper_thread.join, 2 * _STAGES_END_WITHIN_S)

    # ---- parts ----------------------------------------------------------------------------------------

    def _make_scheduler(self, formed: Formed, observer: Observer) -> Scheduler:
        hellos = tuple(member.hello for member in self._members.stages if member.hello is not None)
        scheduling = layout.scheduler_config(self._config, self._architecture, hellos)
        blocks = BlockManager(formed.num_blocks, scheduling.block_size)
        return Scheduler(scheduling, blocks, observer.costs, formed.epoch)

    def _load_tokenizer(self) -> Tokenizer | None:
        hello = self._members.stages[0].hello
        assert hello is not None
        # What lies beside the weights that stage 0, on this host, has opened: also for a hub id.
        tokenizer = load_tokenizer(hello.checkpoint, hello.architecture.vocab_size)
        if tokenizer is None:
            log.warning("no tokenizer beside %s: only token ids are served", self._config.model.path)
        return tokenizer

    def _start_metrics(self, handle: PipelineHandle) -> int:
        """Waits for the engine: not to be called in the event loop. Returns the port. Raises ConfigError."""
        server = self._config.server
        try:
            port = self._metrics.start_http(server.host, server.metrics_port, handle.stage_times)
        except OSError as error:
            # It was free when the flags were checked.
            where = f"{server.host}:{server.metrics_port}"
            raise ConfigError("--metrics-port", f"cannot listen on {where}: {error.strerror}") from None
        self._metrics.describe(handle.model_card(), handle.topology(), __version__)
        return port

    async def _report_health(self, door: FrontDoor) -> None:
        """SERVING only while every stage was heard of a moment ago."""
        serving = True
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            healthy = self._members.healthy(time.monotonic_ns())
            if healthy != serving:
                serving = healthy
                await door.set_serving(serving)

    # ---- signals --------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        def on_stop() -> None:
            if self._stop.is_set():
                self._stop_now.set()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, on_stop)

    def _on_reload(self, door: FrontDoor, observer: Observer) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, door.reload_keys)
        loop.add_signal_handler(signal.SIGUSR1, observer.trace.toggle)

    @staticmethod
    async def _wait(event: asyncio.Event) -> None:
        await event.wait()

    @staticmethod
    async def _first(*waits: object) -> None:
        """Until one of them is done. Futures given from outside are not cancelled."""
        tasks = [asyncio.ensure_future(w) for w in waits]  # type: ignore[call-overload]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for wait, task in zip(waits, tasks, strict=True):
            if task is not wait:
                task.cancel()

    @staticmethod
    def _complain(hopeless: Hopeless) -> int:
        print(f"ppserve: error: {hopeless.reason}", file=sys.stderr, flush=True)
        return EXIT_USAGE if hopeless.usage else 1
