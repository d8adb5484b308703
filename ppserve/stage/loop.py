"""The life of a stage: load its layers, then one step after another, in one epoch after another.

A stage holds weights, keys and values, and nothing about requests. It runs plans in order of arrival.
When a neighbour dies, it reports the epoch as broken, keeps its weights, and waits for the next epoch.

Nothing here is about the process: a stage may as well be a thread.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ppserve import wire
from ppserve.core.figures import size_text
from ppserve.core.kv_memory import sequence_blocks
from ppserve.core.plan import Drawn, RankResult, StepPlan, StepStamps
from ppserve.errors import TransportError, UsageError
from ppserve.model.backend import CachedModel, LoadedModel
from ppserve.process.identity import this_machine, this_user
from ppserve.process.memory import give_free_memory_back
from ppserve.process.network import ONE_HOST, Route
from ppserve.process.stage_process import StageLine
from ppserve.stage.connecting import Connector
from ppserve.stage.link import HeadLink, Stamped
from ppserve.stage.memory_errors import in_words, lacks_memory
from ppserve.stage.probe import ProbeResult
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames

log = logging.getLogger("ppserve.stage")


@dataclass(slots=True)
class Epoch:
    """One life of the pipeline, as this stage sees it."""

    number: int
    stage: Stage
    drawn: tuple[Drawn, ...] = ()
    """The tokens that the step before drew; they are known on the last stage."""
    first_unexpected: int = 0
    """The lowest id of a step whose hidden states are not expected yet."""


@dataclass(slots=True)
class LoadedPart:
    """The stage's part of the model in one shape of the pipeline, from its `Assign` to the next one."""

    model: LoadedModel
    cached: CachedModel | None = None
    """The model with its KV cache, once an epoch has told the number of blocks. It outlives the epoch."""
    num_blocks: int = 0
    """The number of blocks in that cache. If only other stages get other layers, this part stays, but its cache
    may need another number."""


class StageLoop:
    """Handles the head's messages in order. All of it but `_end_waits` runs in one thread."""

    def __init__(
        self,
        start: wire.Start,
        found: ProbeResult,
        link: HeadLink,
        connector: Connector,
        route: Route = ONE_HOST,
    ) -> None:
        self._start = start
        self._found = found
        self._connector = connector
        self._route = route
        self._part: LoadedPart | None = None
        self._epoch: Epoch | None = None
        self._arrived: deque[Stamped] = deque()
        self._link = link
        link.start(self._end_waits)

    @torch.inference_mode()
    def run(self, report: Callable[[StageLine], object] = lambda _: None) -> int:
        """Serve until a Shutdown, and return the exit code. report: is called with READY at each epoch, and once
        with SERVED."""
        self._link.send(self._hello())
        has_served = False
        while True:
            self._receive_messages()
            self._expect_plans()
            arrived_ns, message = self._arrived.popleft()
            match message:
                case wire.Plan(plan):
                    if self._step(plan, arrived_ns) and not has_served:
                        has_served = True
                        report(StageLine.SERVED)
                case wire.Assign():
                    self._load(message)
                case wire.Form():
                    if self._enter_epoch(message):
                        report(StageLine.READY)
                case wire.Abandon(epoch):
                    self._abandon(epoch)
                case wire.Shutdown(code):
                    # A group that cannot be aborted ends with the process.
                    with contextlib.suppress(TransportError):
                        self.leave_epoch()
                    return code

    def _hello(self) -> wire.Hello:
        start = self._start
        setup, checkpoint = self._found.setup, self._found.checkpoint
        host = wire.StageHost(
            name=socket.gethostname(),
            machine=this_machine(),
            address=self._route.own,
            head_address=self._route.head,
            user=this_user(),
        )
        model = wire.FoundModel(
            checkpoint=str(checkpoint.path),
            architecture=checkpoint.architecture,
            dtype=setup.dtype,
            quantization=setup.quantization,
            kv_dtype=setup.kv_dtype,
            weights=self._found.weights,
        )
        device = wire.StageDevice(setup.device.index, shares_gpu=setup.stages_on_gpu > 1)
        return wire.Hello(start.rank, start.world_size, host, model, device, self._found.costs)

    def _receive_messages(self) -> None:
        """Take the messages that have arrived. If there is none, wait for the first."""
        while not self._arrived or not self._link.inbox.empty():
            self._arrived.append(self._link.inbox.get())

    # ---- weights ----

    def _load(self, assign: wire.Assign) -> None:
        """Load layers and report `Loaded`, or `Unable` if that fails.

        The layers that were loaded before, and their cache, are let go first: there may be no memory for both.
        """
        assert self._epoch is None, "the head assigns layers to ranks that are in no epoch"
        if self._part is not None:
            self._part = None
            gc.collect()
        layout, setup = assign.layout, self._found.setup
        try:
            checkpoint, send = self._found.checkpoint, self._link.send
            model = setup.backend().load(checkpoint, layout, lambda *of: send(wire.Loading(*of)))
            reason = model.check_determinism(self._start.config.cache.block_size) or setup.untestable_reason
            give_free_memory_back()
        except Exception as error:
            # The error may be of any type: Triton has its own for a kernel that cannot be compiled.
            problem = in_words(error)
            if not isinstance(error, UsageError | MemoryError):
                setup.raise_if_lost()
                log.exception("stage %d", layout.stage)
                problem = f"it cannot compute on {setup.name}: {type(error).__name__}: {problem}"
            self._link.send(wire.Unable(f"stage {layout.stage}: {problem}"))
            # What was read so far is let go.
            traceback.clear_frames(error.__traceback__)
        else:
            self._part = LoadedPart(model)
            self._link.send(self._loaded(model, reason))

    def _loaded(self, model: LoadedModel, nondeterministic_reason: str | None) -> wire.Loaded:
        setup, cache = self._found.setup, self._start.config.cache
        layout, backend = model.layout, model.backend
        block_bytes = backend.block_bytes(model.arch, layout, cache.block_size)
        context = model.arch.context(self._start.config.model.max_model_len)
        sequence_bytes = sequence_blocks(context, cache.block_size) * block_bytes
        drawn_from = model.arch.vocab_size if layout.is_last else 0
        return wire.Loaded(
            device=setup.name,
            params=model.num_params,
            weight_bytes=model.weight_bytes,
            block_bytes=block_bytes,
            kv_bytes=cache.kv_cache_memory
            or setup.kv_budget_bytes(model.weight_bytes, drawn_from, sequence_bytes),
            nondeterministic_reason=nondeterministic_reason,
            kernels=backend.describe(),
            variants=setup.kernel_variants,
        )

    # ---- epochs ----

    def _enter_epoch(self, form: wire.Form) -> bool:
        """Enter an epoch and report `Ready`. If that fails, report `Broken`, or `Unable` if memory was missing.

        Return whether the stage is ready.
        """
        self.leave_epoch()
        log.debug("epoch %d: entering", form.epoch)
        try:
            self._join(form)
        except (TransportError, RuntimeError, MemoryError) as error:
            problem = f"rank {self._start.rank}: {in_words(error)}"
            unable = wire.Unable(problem) if lacks_memory(error) else None
            self._break_epoch(form.epoch, "it could not form", error, unable)
            return False
        self._link.send(wire.Ready(form.epoch))
        return True

    def _with_cache(self, model: LoadedModel, num_blocks: int) -> CachedModel:
        """Return the model with a KV cache for all epochs of this shape. Each epoch writes over the one before."""
        cache = self._start.config.cache
        asked = cache.kv_cache_memory
        if asked is not None:
            used = num_blocks * model.backend.block_bytes(model.arch, model.layout, cache.block_size)
            log.info("of --kv-cache-memory %s, %s is used", size_text(asked), size_text(used))
        # Memory that the operator sets aside is taken now; other memory is taken as the load grows.
        return model.with_cache(num_blocks, cache.block_size, populate=asked is not None)

    def _join(self, form: wire.Form) -> None:
        part = self._part
        assert part is not None, "only loaded stages enter an epoch"
        model = part.model
        assert model.layout == form.layout, "an epoch has the layers that are loaded"
        if part.cached is None or part.num_blocks != form.num_blocks:
            part.cached = None
            gc.collect()  # before the new one is made: there may be no memory for two caches
            part.cached, part.num_blocks = self._with_cache(model, form.num_blocks), form.num_blocks
        frames = Frames(
            width=model.arch.width,
            dtype=model.backend.precision.hidden,
            max_rows=form.max_rows,
            depth=form.layout.num_stages + 1,
            device=model.backend.device,
        )
        connections = self._connector.connect(form, frames, self._link)
        # The epoch has them at once, so that they are interrupted and closed whatever fails now.
        stage = Stage(part.cached, connections.transport, connections.gather, self._link.with_masks)
        self._epoch = epoch = Epoch(form.epoch, stage)
        if self._link.abandoned >= form.epoch:
            # The link's thread may have looked before there were connections.
            raise TransportError("the epoch was lost while it formed")
        epoch.stage.warm_up()

    def _end_waits(self, number: int) -> None:
        """End the epoch's waits, in the link's thread: the stage's own may be waiting for a neighbour."""
        if (epoch := self._epoch) is not None and epoch.number == number:
            try:
                epoch.stage.interrupt()
            except RuntimeError as error:
                # The head cuts off a stage that cannot leave: this thread must see it.
                log.warning("epoch %d: its waits cannot be ended: %s", number, error)

    def _abandon(self, number: int) -> None:
        """Leave an epoch that the head has given up, unless this stage has left it already."""
        if self._epoch is not None and self._epoch.number == number:
            self.leave_epoch()
            self._link.send(wire.Broken(number, "given up by the head"))

    def leave_epoch(self) -> None:
        """Leave the epoch and close its connections, which wakes the neighbours up.

        Raises TransportError if only a new process helps.
        """
        if self._epoch is not None:
            self._end_waits(self._epoch.number)
            self._epoch.stage.close()
            log.debug("epoch %d: left", self._epoch.number)
        self._epoch = None
        self._connector.leave_epoch()

    def _break_epoch(self, number: int, what: str, error: Exception, said: wire.Unable | None = None) -> None:
        """Leave an epoch in which something failed, and keep the weights for the next one.

        said: the message to send instead of `Broken`. Raises if the device is lost.
        """
        # The error does not tell whether it is: torch's may only lack memory, and Triton's is a RuntimeError.
        self._found.setup.raise_if_lost()
        # If the head has given up the epoch, waits end by an error, and the head has said why.
        is_expected = isinstance(error, TransportError) and self._link.has_given_up(number)
        level = logging.DEBUG if is_expected else logging.WARNING
        log.log(level, "epoch %d: %s: %s", number, what, problem := in_words(error))
        # It is sent first: ending a group may take long, and the others hear of the loss from the head.
        self._link.send(said or wire.Broken(number, f"{type(error).__name__}: {problem}"))
        self.leave_epoch()
        # Connections end with their last reference, and an error may be part of a cycle.
        traceback.clear_frames(error.__traceback__)

    # ---- steps ----

    def _expect_plans(self) -> None:
        """Let hidden states of every known plan arrive during earlier steps."""
        for _, message in self._arrived:
            if (epoch := self._epoch) is None or not isinstance(message, wire.Plan):
                return
            plan = message.plan
            if plan.epoch == epoch.number and plan.step_id >= epoch.first_unexpected:
                try:
                    epoch.stage.expect(plan)
                    epoch.first_unexpected = plan.step_id + 1
                except (TransportError, RuntimeError) as error:
                    self._break_epoch(epoch.number, f"step {plan.step_id} failed", error)

    def _step(self, plan: StepPlan, planned_ns: int) -> bool:
        """Compute one step, and return whether it has a result. Plans of epochs that were left have none."""
        if (epoch := self._epoch) is None or plan.epoch != epoch.number:
            return False
        if plan.is_ahead:
            plan = plan.with_drawn(epoch.drawn)
        if plan.is_ahead and plan.step_id in self._link.cancelled:
            now_ns = time.monotonic_ns()
            stamps = StepStamps(*(now_ns,) * 6)
            self._link.send(
                wire.Result(RankResult(epoch=plan.epoch, step_id=plan.step_id, place=0, stamps=stamps))
            )
            return True
        try:
            computed = epoch.stage.step(plan, planned_ns)
        except (TransportError, RuntimeError) as error:
            self._break_epoch(epoch.number, f"step {plan.step_id} failed", error)
            return False
        self._link.send(wire.Result(computed.result))
        epoch.drawn = computed.result.drawn
        return True
