"""`Pipeline`: the server's engine, scheduler and ledger in one process, with threads for stages."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict, Unpack, cast, get_type_hints

import torch
from msgspec import Meta

from ppserve import config as cfg
from ppserve.answers import Completion, Options, Prompt, Texts, read_options, read_prompt
from ppserve.core.architecture import Split
from ppserve.core.figures import table
from ppserve.core.ledger.causes import CAUSES
from ppserve.errors import ConfigError, Draining, StagesLost, UsageError
from ppserve.head.api.call import Call
from ppserve.head.api.forms import Forms
from ppserve.head.api.requests import echo, encode, to_request
from ppserve.head.api.stream import RequestStream
from ppserve.head.descriptions import (
    ModelDescription,
    StageDescription,
    Topology,
    describe_model,
    describe_topology,
)
from ppserve.head.engine.loop import Engine, build_engine
from ppserve.head.options import GenerationOptions
from ppserve.library.local import LocalControlPlane, make_stages
from ppserve.library.stream import Stream
from ppserve.tokenizer import Tokenizer

_END_WITHIN_S = 10.0

Count = Annotated[int, Meta(ge=1)]


class Settings(TypedDict, total=False):
    """What a pipeline may be told beside its model; each is the flag of `ppserve serve` of that name. None: unset.

    tensor_parallel: how many ranks compute each stage together, each a thread. devices: of each rank, such as
    ["cuda:0", "cuda:1"], in order of stages. layers: of each stage, such as "7.5,4.5" (unset: equal weights).
    threads: of each rank. Sizes are bytes. speculate: draft tokens per step and sequence (unset: where they pay).
    """

    dtype: str
    quantization: str
    kv_dtype: str
    force_cpu: bool
    max_model_len: Count
    layers: str
    microbatches: Count
    threads: Count
    tensor_parallel: Count
    block_size: Count
    kv_cache_memory: Count
    max_num_seqs: Count
    max_queue: Count
    prefill_chunk: Count
    speculate: Annotated[int, Meta(ge=0)]
    replicas: Count
    batch_invariant: bool
    cuda_graphs: bool
    devices: Texts


_TOTALS = ("busy_s", "idle_s", "steps")
_HEADINGS = ("stage", "layers", "busy", *CAUSES, "idle", "steps", "ms/step")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every stage's time went: `busy + bubbles + idle` is its wall time."""

    stages: tuple[StageDescription, ...]
    advice: str  # what would help most; empty when nothing would

    @property
    def wall_s(self) -> float:
        """Since the pipeline was made, or between two ledgers."""
        return sum(_spent_s(self.stages[0]))

    def since(self, earlier: Ledger) -> Ledger:
        """What was added after an earlier ledger of the pipeline."""
        return replace(self, stages=tuple(map(_since, self.stages, earlier.stages)))

    def __repr__(self) -> str:
        advice = [self.advice] if self.advice else []
        return "\n".join([*table(_HEADINGS, *map(self._row, self.stages)), f"{self.wall_s:.3f} s", *advice])

    def _row(self, stage: StageDescription) -> tuple[str, ...]:
        name = f"{stage.replica}.{stage.stage}" if self.stages[-1].replica else str(stage.stage)
        shares = [f"{spent_s / (self.wall_s or 1):.1%}" for spent_s in _spent_s(stage)]
        step = f"{1e3 * stage.busy_s / stage.steps:.2f}" if stage.steps else "-"
        return (name, stage.layers, *shares, str(stage.steps), step)


def _spent_s(stage: StageDescription) -> list[float]:
    return [stage.busy_s, *(stage.bubble_s[cause] for cause in CAUSES), stage.idle_s]


def _since(now: StageDescription, before: StageDescription) -> StageDescription:
    added: dict[str, Any] = {name: getattr(now, name) - getattr(before, name) for name in _TOTALS}
    bubble_s = {cause: seconds - before.bubble_s[cause] for cause, seconds in now.bubble_s.items()}
    pairs = zip(now.ranks, before.ranks, strict=True)
    ranks = tuple(replace(rank, gather_s=rank.gather_s - then.gather_s) for rank, then in pairs)
    step_s = added["busy_s"] / added["steps"] if added["steps"] else None
    return replace(now, **added, bubble_s=bubble_s, measured_step_s=step_s, ranks=ranks)


class Pipeline(AbstractContextManager["Pipeline"]):
    """A model over `stages` stages, threads of this process; hidden states are handed on as they are.

    model: as for `--model` of the server. stages: one, or one for each of `devices`, unless told. The same request
    gives the same tokens here and there, over any number of stages. Any thread may use it. Raises UsageError
    (ConfigError, CheckpointError) for what cannot be run.
    """

    model: ModelDescription
    """What is computed, in which arithmetic, and whether the promises hold here."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "tiny",
        stages: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        config, world_size = _parse_settings(model, {"stages": stages, **settings})
        control = LocalControlPlane(range(world_size))
        self._engine = build_engine(config, world_size, control, lambda call: call())
        self._pid = os.getpid()
        threads = (self._engine, *make_stages(config, world_size, control))
        # Also when nobody holds the pipeline, and before the interpreter ends.
        self._end = weakref.finalize(self, _end_threads, self._engine, threads, torch.get_num_threads())
        for thread in threads:
            thread.start()
        try:
            self.model, self._tokenizer = self._wait_until_formed(config)
        except BaseException:
            self._end()
            raise
        self._forms = Forms(self._tokenizer, self.model)
        self._end_forms = weakref.finalize(self, self._forms.close)

    def _wait_until_formed(self, config: cfg.ServeConfig) -> tuple[ModelDescription, Tokenizer]:
        engine = self._engine
        ends: list[Future[Any]] = [engine.formed, engine.failed]
        wait(ends, return_when=FIRST_COMPLETED)
        if engine.failed.done():
            raise engine.failed.result()
        return describe_model(config, [replica.members for replica in engine.replicas])

    # ---- generating ----

    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Stream:
        """Return a stream of chunks of text, as they are made. Options are those of the Python client.

        prompt: a text, token ids, or a list of such, which run together. Then `chunk.request_id` is the prompt's
        place in the list (after your own `request_id` and a dash, if you give one).
        Closing the stream early ends its requests. Raises InvalidRequest, naming what is wrong, or TypeError
        before anything runs; Overloaded ends those that were queued.
        """
        return self._submit(_as_prompts(prompt), options)

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Call `generate`, and read its stream to the end."""
        return self.complete_all([prompt], **options)[0]

    def complete_all(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Completion]:
        """Complete all of these prompts together. Completions come in the order of prompts."""
        with self._submit(_as_prompts(prompts) if len(prompts) else [], options) as stream:
            return stream.completions()

    def _submit(self, prompts: Sequence[Prompt], options: Options) -> Stream:
        given = cast(Options, read_options(options))
        name = given.get("request_id", "")
        asked, requests, filters = generation_options(given), {}, {}
        for place, prompt in enumerate(prompts):
            call = Call.begin({}, b"", "", has_keys=False).within(given.get("timeout_s"))
            ids = encode("prompt", [prompt], self._tokenizer, self.model) if isinstance(prompt, str) else prompt
            request = to_request(asked, ids, self.model, call)
            own_name = f"{name}-{place}" if name and len(prompts) > 1 else name or str(place)
            requests[own_name] = RequestStream(request, echo(prompt, request, self._tokenizer))
            if (token_filter := self._forms.filter_at_once(asked)) is not None:
                filters[own_name] = token_filter
        return Stream(self._running, self._tokenizer, requests, filters)

    # ---- what it says ----

    def topology(self) -> Topology:
        """Return what each stage holds, and how long its steps take."""
        return describe_topology(self._running().snapshot())

    def ledger(self) -> Ledger:
        """Return where every stage's time went, from the making of the pipeline to now."""
        topology = self.topology()
        return Ledger(topology.stages, topology.advice)

    def __repr__(self) -> str:
        return f"<Pipeline {self.model.name!r}, {self.model.numbers}>"

    def _running(self) -> Engine:
        """Return the engine. Raises Draining after `close` and in another process, or StagesLost."""
        if os.getpid() != self._pid:
            raise Draining("this pipeline's threads are in another process: make one in each process")
        if not self._end.alive:
            raise Draining("this pipeline is closed")
        if self._engine.failed.done():
            raise StagesLost(str(self._engine.failed.result()))
        return self._engine

    # ---- its end ----

    def close(self) -> None:
        """End every stream that is open, and all threads. It may be called twice."""
        self._end()
        self._end_forms()

    def __exit__(self, *_error: object) -> None:
        self.close()


def _end_threads(engine: Engine, threads: Sequence[threading.Thread], torch_threads: int) -> None:
    """End all threads and give torch its own back. This is no method, for that would hold the pipeline."""
    engine.stop()
    for thread in threads:
        thread.join(_END_WITHIN_S)
    torch.set_num_threads(torch_threads)


def generation_options(given: Options) -> GenerationOptions:
    """Return what the caller of the library asks for, in the form that every protocol gives it."""
    return GenerationOptions(
        temperature=given.get("temperature"),
        top_k=given.get("top_k"),
        top_p=given.get("top_p"),
        min_p=given.get("min_p"),
        repetition_penalty=given.get("repetition_penalty"),
        frequency_penalty=given.get("frequency_penalty"),
        presence_penalty=given.get("presence_penalty"),
        seed=given.get("seed"),
        n=given.get("n"),
        logit_bias=given.get("logit_bias"),
        allowed_token_ids=given.get("allowed_token_ids"),
        bad_words=given.get("bad_words"),
        max_tokens=given.get("max_tokens"),
        min_tokens=given.get("min_tokens"),
        stop=given.get("stop"),
        stop_token_ids=given.get("stop_token_ids"),
        ignore_eos=given.get("ignore_eos"),
        include_stop=given.get("include_stop"),
        echo=given.get("echo"),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        token_ids=given.get("token_ids"),
        timings=given.get("timings"),
        stream_interval=given.get("stream_interval"),
        skip_special_tokens=given.get("skip_special_tokens"),
        structured_output=given.get("structured_output"),
        priority=given.get("priority"),
    )


def _as_prompts(given: Any) -> list[Prompt]:
    """Return one prompt or several as a list. Token ids are one prompt. Raises TypeError."""
    try:
        return [read_prompt(given)]
    except TypeError:
        if isinstance(given, bytes | Mapping) or not isinstance(given, Collection):
            raise
        return [read_prompt(prompt) for prompt in given]


_KINDS = {"stages": Count, **get_type_hints(Settings, include_extras=True)}
_CHOICES = {"dtype": cfg.DTYPES, "quantization": cfg.QUANTIZATIONS, "kv_dtype": cfg.KV_DTYPES}


def _parse_settings(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> tuple[cfg.ServeConfig, int]:
    """The configuration and number of ranks. Raises UsageError, naming the setting."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError("model", f"{model!r} is neither a name nor a path")
    try:
        given = read_options(settings, _KINDS)
        if "layers" in given:
            given["layers"] = Split.parse(given["layers"])
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise ConfigError(name, f"{given[name]!r} is none of {', '.join(choices)}")
    stages = given.pop("stages", None)
    config = cfg.ServeConfig.from_flags({"path": os.fspath(model), "transport": "local", **given})
    ranks_per_stage = config.pipeline.tensor_parallel * config.pipeline.replicas
    return config, ranks_per_stage * (stages or max(1, len(given.get("devices", ())) // ranks_per_stage))
