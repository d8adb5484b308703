"""The life of a stage: find the head, load its blocks, then one step after another until told to stop.

A stage holds weights, keys and values, and nothing about requests. It runs plans in the order in which
they arrive. When a neighbour dies it reports the epoch as broken, keeps its weights, and waits for the
head to form the next one.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

import parallel_state
from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.core.partition import Parts
from ppserve.core.plan import Drawn, Scored, StepPlan, StepResult, StepStamps
from ppserve.errors import CheckpointError, ConfigError, TransportError
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.cpu.kv_cache import KVCache
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.model.selftest import check_determinism, describe_kernels
from ppserve.process.environment import RankEnvironment, this_machine
from ppserve.stage import calibrate, device, rendezvous
from ppserve.stage.link import HeadLink, Stamped
from ppserve.stage.transport import Transport, create_transport

log = logging.getLogger("ppserve.stage")

_FORM_TIMEOUT = timedelta(seconds=20)


@dataclass(slots=True)
class Epoch:
    """One life of the pipeline, as seen from this stage. last_posted: newest step whose receive is posted."""

    number: int
    transport: Transport
    cache: KVCache
    last_posted: int = -1


@dataclass(frozen=True, slots=True)
class Findings:
    """What a stage finds out before it meets the head. costs: None where they decide nothing."""

    checkpoint: Checkpoint
    compute: device.Compute
    costs: Parts | None


def prepare(start: wire.Start, environment: RankEnvironment) -> Findings:
    """Opens the checkpoint (headers only), chooses the device, measures the parts. Raises UsageError."""
    checkpoint = open_checkpoint(start.config.model.path)
    compute = device.choose(start.config, environment, checkpoint.stored_dtype)
    # Too many stages for the model: the head says so.
    cuts = 1 < start.num_stages <= checkpoint.architecture.num_layers
    if not cuts or start.config.pipeline.layers is not None:
        return Findings(checkpoint, compute, None)
    mix = calibrate.Mix(start.config.scheduling.expect_prompt, start.config.scheduling.expect_new)
    return Findings(checkpoint, compute, calibrate.step_costs(checkpoint, compute, mix))


class StageLoop:
    """One stage: owns its model, its cache and its wires. Everything happens in the thread of `run`."""

    def __init__(self, start: wire.Start, found: Findings, connection: socket.socket, token: str) -> None:
        self._start = start
        self._link = HeadLink(connection)
        self._checkpoint = found.checkpoint
        self._compute = found.compute
        self._layout: StageLayout | None = None
        self._dtype = found.compute.dtype
        self._model: GPT2Stage | None = None
        self._cache: KVCache | None = None
        self._epoch: Epoch | None = None
        self._messages: deque[Stamped] = deque()
        self._has_served = False
        self._on_served: Callable[[], object] = lambda: None
        self._greet(found, token)

    def _greet(self, found: Findings, token: str) -> None:
        gpu = found.compute.device.index if found.compute.device.type == "cuda" else None
        self._link.send(
            wire.Hello(
                token=token,
                rank=self._start.stage,
                world_size=self._start.num_stages,
                host=socket.gethostname(),
                checkpoint=str(found.checkpoint.path),
                architecture=found.checkpoint.architecture,
                dtype=found.compute.dtype,
                gpu=gpu,
                shares_gpu=found.compute.shares_gpu,
                costs=found.costs,
                machine=this_machine(),
            )
        )
        self._link.on_abandon = self._end_waits
        self._link.start()

    @torch.inference_mode()
    def run(self, on_served: Callable[[], object]) -> int:
        """Until the head says Shutdown; the exit code that it asks for. `on_served`: after the first step."""
        self._on_served = on_served
        while True:
            self._take_arrived()
            self._post_receives()
            arrived_ns, message = self._messages.popleft()
            match message:
                case wire.Plan(plan):
                    self._step(arrived_ns, plan)
                case wire.Assign():
                    self._load(message)
                case wire.Form():
                    self._enter_epoch(message)
                case wire.Abandon(epoch):
                    self._abandon(epoch)
                case wire.Shutdown(code):
                    self._leave_epoch()
                    return code

    def _take_arrived(self) -> None:
        """At least one message, and all that is there."""
        if not self._messages:
            self._messages.append(self._link.inbox.get())
        while True:
            try:
                self._messages.append(self._link.inbox.get_nowait())
            except queue.Empty:
                break

    def _post_receives(self) -> None:
        """For every known plan, so that hidden states travel while this stage computes an earlier step."""
        epoch = self._epoch
        if epoch is None or self._layout is None or self._layout.is_first:
            return
        for _, message in self._messages:
            if not isinstance(message, wire.Plan):
                break
            if message.plan.epoch == epoch.number and message.plan.step_id > epoch.last_posted:
                try:
                    epoch.transport.post_receive(message.plan)
                except (TransportError, RuntimeError) as error:
                    self._break_epoch(epoch, message.plan, error)
                    return
                epoch.last_posted = message.plan.step_id

    # ---- weights --------------------------------------------------------------------------------------

    def _load(self, assign: wire.Assign) -> None:
        """Reads this stage's tensors and says what they weigh. A failure is final: `Failed`."""
        self._layout = layout = assign.layout
        self._dtype = assign.dtype
        try:
            self._model = GPT2Stage.load(
                self._checkpoint, layout, assign.dtype, self._compute.device, self._report_progress
            )
            why_not = check_determinism(self._model) or ""
        except (CheckpointError, ConfigError, MemoryError, torch.OutOfMemoryError) as error:
            self._link.send(wire.Failed(f"stage {layout.stage}: {error or type(error).__name__}"))
            return
        cache = self._start.config.cache
        arch = self._checkpoint.architecture
        self._link.send(
            wire.Loaded(
                device=self._compute.name,
                params=self._model.num_params,
                weight_bytes=self._model.weight_bytes,
                block_bytes=KVCache.bytes_per_block(arch, layout, cache.block_size, assign.dtype),
                kv_bytes=cache.kv_cache_memory or self._compute.kv_budget_bytes(),
                why_not=why_not,
                kernels=describe_kernels(self._model),
            )
        )

    def _report_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._link.send(wire.Loading(done_bytes, total_bytes))

    # ---- epochs ---------------------------------------------------------------------------------------

    def _enter_epoch(self, form: wire.Form) -> None:
        """Joins the others in a new group with an empty cache; `Ready` or `Broken`."""
        self._leave_epoch()
        log.debug("epoch %d: entering", form.epoch)
        cache = self._open_cache(form.num_blocks)
        assert self._layout is not None
        try:
            if self._layout.num_stages > 1:
                self._join_group(form)
            self._epoch = epoch = Epoch(form.epoch, self._open_transport(form), cache)
            if self._is_over(form.epoch):
                # The link's thread may have looked before there was a transport to interrupt.
                raise TransportError("the epoch was lost while it formed")
            epoch.transport.warm_up()
        except (TransportError, RuntimeError) as error:
            log.warning("epoch %d could not form: %s", form.epoch, error)
            self._leave_epoch()
            self._link.send(wire.Broken(form.epoch, str(error)))
            return
        self._link.send(wire.Ready(form.epoch))

    def _is_over(self, epoch: int) -> bool:
        return self._link.abandoned >= epoch

    def _end_waits(self, number: int) -> None:
        """In the link's thread: the stage's own may be waiting for a neighbour, and hears of nothing else."""
        epoch = self._epoch
        if epoch is not None and epoch.number == number:
            try:
                epoch.transport.interrupt()
            except RuntimeError as error:
                # A backend that cannot be interrupted: the head cuts a stage off that does not leave in time, and
                # this thread must live to see that.
                log.warning("epoch %d: its waits cannot be ended: %s", number, error)

    def _abandon(self, number: int) -> None:
        """Leaves an epoch that the head has given up. One that broke here was left, and reported, before."""
        if self._epoch is not None and self._epoch.number == number:
            self._leave_epoch()
            self._link.send(wire.Broken(number, "given up by the head"))
            log.debug("epoch %d: left", number)

    def _open_transport(self, form: wire.Form) -> Transport:
        assert self._model is not None
        return create_transport(
            form.transport,
            width=self._checkpoint.architecture.width,
            dtype=self._model.dtype,
            device=self._compute.device,
            depth=self._start.num_stages + 1,
            max_rows=form.max_rows,
        )

    def _join_group(self, form: wire.Form) -> None:
        assert self._layout is not None
        if form.store_port == 0:
            store, port = rendezvous.open_epoch_store(form.store_host, _FORM_TIMEOUT)
            self._link.send(wire.StoreOpened(form.epoch, port))
        else:
            store = rendezvous.join_epoch_store(form.store_host, form.store_port, _FORM_TIMEOUT)
        stage, num_stages = self._layout.stage, self._layout.num_stages
        rendezvous.meet(store, stage, num_stages, lambda: self._is_over(form.epoch))
        if form.store_host == "127.0.0.1":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "nccl" if form.transport == "nccl" else "gloo",
            store=store,
            rank=stage,
            world_size=num_stages,
            timeout=_FORM_TIMEOUT,
        )
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)

    def _open_cache(self, num_blocks: int) -> KVCache:
        """The cache of this process, made once: a new epoch overwrites what it holds."""
        assert self._layout is not None
        assert self._model is not None
        if self._cache is None:
            self._cache = KVCache(
                self._checkpoint.architecture,
                self._layout,
                num_blocks,
                self._start.config.cache.block_size,
                self._dtype,
                self._compute.device,
                takes_ahead=True,
            )
        return self._cache

    def _leave_epoch(self) -> None:
        """Closes every wire to the neighbours, so that those blocked on this stage wake up as well."""
        if self._epoch is not None:
            self._epoch.transport.close()
        self._epoch = None
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---- steps ----------------------------------------------------------------------------------------

    def _step(self, planned_ns: int, plan: StepPlan) -> None:
        """One step, and its result. A plan of an epoch that this stage has left is dropped."""
        epoch = self._epoch
        if epoch is None or plan.epoch != epoch.number:
            return
        try:
            self._link.send(wire.Result(self._compute_step(epoch, planned_ns, plan)))
        except (TransportError, RuntimeError) as error:
            self._break_epoch(epoch, plan, error)
            return
        if not self._has_served:
            self._has_served = True
            self._on_served()

    def _break_epoch(self, epoch: Epoch, plan: StepPlan, error: Exception) -> None:
        """A wire or a computation failed: keep the weights, wait for the next epoch."""
        log.warning("step %d of epoch %d failed: %s", plan.step_id, epoch.number, error)
        # Our end of the wires closes too: stages further on, blocked on this one, wake up in turn.
        self._leave_epoch()
        log.debug("epoch %d: left", epoch.number)
        self._link.send(wire.Broken(epoch.number, f"{type(error).__name__}: {error}"))

    def _compute_step(self, epoch: Epoch, planned_ns: int, plan: StepPlan) -> StepResult:
        layout, model = self._layout, self._model
        assert layout is not None
        assert model is not None
        clock = time.monotonic_ns
        inputs = build_inputs(plan, layout, self._start.config.cache.block_size, self._compute.device)
        awaited_ns = clock()
        received_TD = None if layout.is_first else epoch.transport.receive(plan)
        received_ns = clock()
        begun_ns = clock()
        hidden_TD = model.forward(inputs, received_TD, epoch.cache)
        drawn: tuple[Drawn, ...] = ()
        scored: tuple[Scored, ...] = ()
        if layout.is_last:
            drawn, scored = model.read_out(plan, inputs, hidden_TD)
        self._compute.synchronize()
        ended_ns = clock()
        bytes_sent = 0 if layout.is_last else epoch.transport.send(plan, hidden_TD)
        stamps = StepStamps(planned_ns, awaited_ns, received_ns, begun_ns, ended_ns, clock())
        return StepResult(plan.epoch, plan.step_id, layout.stage, stamps, bytes_sent, drawn, scored)
