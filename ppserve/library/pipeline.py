"""`Pipeline`: the server's engine, scheduler and ledger in one process, with stages that are threads."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from operator import index
from typing import Any, Self, TypedDict, Unpack, cast, get_type_hints

import torch

from ppserve import config as cfg
from ppserve import wire
from ppserve.answers import Completion, Options, Prompt, read_options, read_prompt
from ppserve.core.architecture import Split
from ppserve.errors import ConfigError, Draining, InvalidRequest, StagesLost, UsageError, Violation
from ppserve.head.api.call import Call
from ppserve.head.api.requests import check_text, to_request
from ppserve.head.descriptions import ModelDescription, Topology
from ppserve.head.engine.building import build_engine
from ppserve.head.engine.loop import Engine
from ppserve.head.handle import describe_model, describe_topology
from ppserve.library.ledger import Ledger
from ppserve.library.local import LocalControlPlane, LocalLink
from ppserve.library.stream import Stream
from ppserve.process.environment import RankEnvironment
from ppserve.stage.loop import StageLoop
from ppserve.stage.probe import ProbeResult, probe
from ppserve.stage.wiring import ThreadWiring
from ppserve.tokenizer import Tokenizer

log = logging.getLogger("ppserve.library")

_END_WITHIN_S = 10.0
_CHOICES = {"dtype": cfg.DTYPES, "quantization": cfg.QUANTIZATIONS, "kv_dtype": cfg.KV_DTYPES}


class Settings(TypedDict, total=False):
    """What a pipeline may be told beside its model; each is the flag of `ppserve serve` of that name. None: unset.

    tensor_parallel: how many ranks compute each stage together, each a thread. devices: of each rank, such as
    ["cuda:0", "cuda:1"], in order of stages. layers: of each stage, such as "7.5,4.5" (unset: equal weights).
    threads: of each rank. Sizes are bytes. speculate: draft tokens per step and sequence, None or unset = where
    they pay.
    """

    dtype: str
    quantization: str
    kv_dtype: str
    force_cpu: bool
    max_model_len: int
    layers: str
    microbatches: int
    threads: int
    tensor_parallel: int
    block_size: int
    kv_cache_memory: int
    max_num_seqs: int
    max_queue: int
    prefill_chunk: int
    speculate: int | None
    replicas: int
    batch_invariant: bool
    cuda_graphs: bool
    devices: Sequence[str]


class Pipeline:
    """A model over `stages` stages, threads of this process; hidden states are handed on as they are.

        with Pipeline("tiny", stages=2) as pipeline:
            for piece in pipeline.generate("Once upon a time", max_tokens=40, seed=1):
                print(piece.text, end="")
            print(pipeline.ledger())

    model: as for `--model` of the server. stages: one, or one for each of `devices`, unless told. The same request
    gives the same tokens here and there, over any number of stages. Any thread may use it. Raises UsageError
    (ConfigError, CheckpointError) for what cannot be run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "tiny",
        stages: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        config, world_size = _parse_settings(model, {"stages": stages, **settings})
        self._control = LocalControlPlane(range(world_size))
        self._engine = build_engine(config, world_size, self._control, lambda call: call(), in_process=True)
        self._pid = os.getpid()
        threads = (self._engine, *_make_stages(config, world_size, self._control))
        # Also when nobody holds the pipeline any more, and before the interpreter ends.
        self._end = weakref.finalize(self, _end_threads, self._engine, threads, torch.get_num_threads())
        for thread in threads:
            thread.start()
        try:
            self._description, self._tokenizer = self._wait_until_formed(config)
        except BaseException:
            self.close()
            raise

    # ---- generating -----------------------------------------------------------------------------------

    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Stream:
        """Pieces of text, as they are made. Options are those of the Python client.

        prompt: a text, token ids, or a list of such, which run together; `piece.request_id` then is the prompt's
        place in the list (after your own `request_id` and a dash, if you give one). Closing the stream early ends
        its requests. Raises InvalidRequest, naming what is wrong, or TypeError before anything runs; Overloaded
        ends those that were queued.
        """
        return self._submit(_as_prompts(prompt), options)

    def _submit(self, prompts: Sequence[Prompt], options: Options) -> Stream:
        given, engine = read_options(options), self._running()
        name, timeout_s = given.pop("request_id", ""), given.pop("timeout_s", None)
        requests = []
        for prompt in prompts:
            call = Call.begin("", timeout_s, None)
            requests.append(to_request(given, self._ids_of(prompt), self._description, call))
        several = len(prompts) > 1
        stream = Stream(self, engine, self._tokenizer)
        try:
            for place, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
                own = f"{name}-{place}" if name and several else name or str(place)
                stream.submit(request, own, self._text_of(prompt) if request.output.echo else "")
        except BaseException:
            stream.close()
            raise
        return stream

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """`generate`, read to its end."""
        with self._submit([read_prompt(prompt)], options) as stream:
            return stream.completions()[0]

    def complete_all(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Completion]:
        """All of these together, in their order."""
        with self._submit(_as_prompts(prompts) if len(prompts) else [], options) as stream:
            return stream.completions()

    def _ids_of(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        check_text("prompt", prompt, self._description)
        try:
            return self._tokenizer.encode(prompt) if self._tokenizer is not None else ()
        except ValueError as error:
            raise InvalidRequest([Violation("prompt", "this text cannot be tokenized")]) from error

    def _text_of(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(prompt)

    # ---- what it says ---------------------------------------------------------------------------------

    @property
    def model(self) -> ModelDescription:
        """What is computed, in which arithmetic, and whether the promises hold on this machine."""
        return self._description

    def ledger(self) -> Ledger:
        """Where every stage's time went, from the making of the pipeline to now."""
        topology = self.topology()
        return Ledger(topology.stages, topology.advice)

    def topology(self) -> Topology:
        """What each stage holds, and how long its steps take."""
        return describe_topology(self._running().snapshot())

    def _running(self) -> Engine:
        """Raises Draining after `close` and in another process, StagesLost where the stages are gone."""
        if os.getpid() != self._pid:
            raise Draining("this pipeline's threads are in another process: make one in each process")
        if not self._end.alive:
            raise Draining("this pipeline is closed")
        if self._engine.failed.done():
            raise StagesLost(self._engine.failed.result().reason)
        return self._engine

    # ---- its end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends every stream that is open, and all threads. May be called twice."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        decision = self._engine.replicas[0].members.decision
        assert decision is not None
        spans = " | ".join(layout.span for layout in decision.layouts)
        return f"<Pipeline {self._description.name!r}, {self._description.dtype}, layers {spans}>"

    def _wait_until_formed(self, config: cfg.ServeConfig) -> tuple[ModelDescription, Tokenizer | None]:
        """Waits until every stage has loaded its layers."""
        engine = self._engine
        wait([cast("Future[Any]", engine.formed), cast("Future[Any]", engine.failed)], return_when=FIRST_COMPLETED)
        if engine.failed.done():
            fatal = engine.failed.result()
            raise UsageError(fatal.reason) if fatal.usage else StagesLost(fatal.reason)
        return describe_model(config, [replica.members for replica in engine.replicas])


def _parse_settings(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> tuple[cfg.ServeConfig, int]:
    """The configuration, and how many ranks there are. Raises ConfigError."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError("model", f"{model!r} is neither a name nor a path")
    given: dict[str, Any] = {"path": os.fspath(model)}
    given |= {name: value for name, value in settings.items() if value is not None or name == "speculate"}
    kinds = {"stages": int, **get_type_hints(Settings)}
    if unknown := set(given) - {"path", *kinds}:
        raise ConfigError(min(unknown), "there is no such setting")
    for name, known in _CHOICES.items():
        if name in given and given[name] not in known:
            raise ConfigError(name, f"{given[name]!r} is none of {', '.join(known)}")
    for name, kind in kinds.items():
        value = given.get(name)
        if value is None:
            continue
        if kind is bool and not isinstance(value, bool):
            raise ConfigError(name, f"{value!r} is neither True nor False")
        if kind in (int, int | None):
            given[name] = _read_number(name, value, least=int(kind is int))
        elif kind is not bool and isinstance(value, str) != (kind is str):
            raise ConfigError(name, f"{value!r} is not {'a text' if kind is str else 'a list of texts'}")
    if "devices" in given:
        given["devices"] = tuple(given["devices"])
    if "layers" in given:
        try:
            given["layers"] = Split.parse(given["layers"])
        except ValueError as error:
            raise ConfigError("layers", str(error)) from None
    stages = given.pop("stages", None)
    config = cfg.ServeConfig.from_flags(given)
    ranks_per_stage = config.pipeline.tensor_parallel * config.pipeline.replicas
    return config, ranks_per_stage * (stages or max(1, len(given.get("devices", ())) // ranks_per_stage))


def _make_stages(config: cfg.ServeConfig, world_size: int, control: LocalControlPlane) -> list[threading.Thread]:
    """A thread for each rank."""
    grid = config.pipeline.grid(world_size)
    wirings = [ThreadWiring() for _ in range(grid.data)]
    found = [probe(config, RankEnvironment(r, world_size, r, world_size)) for r in range(world_size)]
    return [
        threading.Thread(
            target=_run_stage,
            args=(wire.Start(config, rank, world_size), found[rank], link, wirings[grid.place(rank).replica]),
            name=grid.name(rank),
            daemon=True,
        )
        for rank, link in control.links.items()
    ]


def _read_number(name: str, value: Any, least: int) -> int:
    """A whole number, of Python's or numpy's. Raises ConfigError."""
    try:
        number = index(value)
    except TypeError:
        raise ConfigError(name, f"{value!r} is not a whole number") from None
    if number < least:
        raise ConfigError(name, f"{number} is less than {least}")
    return number


def _run_stage(start: wire.Start, found: ProbeResult, link: LocalLink, wiring: ThreadWiring) -> None:
    """The life of a stage's thread. What ends it unforeseen ends the pipeline, with the reason."""
    try:
        found.compute.occupy()
        stage = StageLoop(start, found, link.opened, wiring)
        try:
            stage.run()
        finally:
            stage.leave_epoch()  # which ends the waits of neighbours for this stage
    except Exception as error:
        log.exception("a stage failed")
        link.send(wire.Failed(f"{type(error).__name__}: {error}"))
    finally:
        link.hang_up("exit")


def _end_threads(engine: Engine, threads: Sequence[threading.Thread], torch_threads: int) -> None:
    """Ends all threads, and gives torch back the number of threads that it had.

    A function, not a method: a finalizer that held the pipeline would keep it alive.
    """
    engine.stop()
    for thread in threads:
        thread.join(_END_WITHIN_S)
    torch.set_num_threads(torch_threads)


def _as_prompts(prompt: Any) -> list[Prompt]:
    """One prompt, or a list of them, as a list. (Token ids are a list too, but of numbers: one prompt.) Raises
    TypeError."""
    is_one = isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable)
    parts = prompt if is_one else list(prompt)
    try:
        return [read_prompt(parts)]
    except TypeError:
        if is_one:
            raise
        return [read_prompt(part) for part in parts]
